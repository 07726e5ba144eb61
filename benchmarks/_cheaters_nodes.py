"""Nodes of the cheaters benchmark: real ones, on hivemind's host, each with one thing altered.

    Part (who) ──► engine (torch, llama.cpp) ──► Altered by a cheat ──► Node ──► link ──► coordinator
                                                                         └─ some cheats alter what is pushed

All nodes run in this process, their engines too: twenty processes would wait for each other on two cores. They find
each other in a directory of this process: that of twenty DHT nodes took half of its time.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio

from benchmarks import _cheaters_engines as cheats
from echo_coordinator.demo.answers import careful
from echo_coordinator.demo.tokenizer import EOS_ID, VOCABULARY
from echo_node.backends.base import Engine
from echo_node.backends.inline import InlineBackend
from echo_node.backends.options import EngineOptions, LlamaCppOptions, TorchOptions
from echo_node.backends.serve import make_engine
from echo_node.config import NodeConfig
from echo_node.link import Link
from echo_node.node import Node, NodeSeams
from echo_swarm.clock import SystemClock
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.envelope import seal, unseal
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.trajectory import SUBMISSION_LIMITS, Submission
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.work import Push, PushReply

PUSHES_S = 25.0
HONEST_FIRST = 160
"""Completions that a turncoat makes honestly."""
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
_CHARACTERS = {number: text for text, number in VOCABULARY.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One peer."""

    name: str
    kind: str
    """`honest`, or a cheat of `Crew.cheat` or of `PUSHED`."""
    backend: str = "torch"
    precision: str = "float32"
    batch: int = 8

    @property
    def identity(self) -> Identity:
        """Its key: made of its name."""
        return Identity.from_seed(self.name.encode().ljust(32, b"."))


def is_right(prompt: tuple[int, ...], ids: Any) -> float:
    """Return the reward of a completion, as whoever knows the environment computes it."""
    asked, said = ("".join(_CHARACTERS[i] for i in some if i > EOS_ID) for some in (prompt, ids))
    return float(said.rpartition("]")[2].strip() == careful(asked).rpartition("]")[2])


@dataclass(slots=True, kw_only=True)
class Crew:
    """All nodes of a run."""

    folder: Path
    invite: Invite
    other_model: Path
    records: DirectoryStore = field(default_factory=DirectoryStore)
    overheard: cheats.Overheard = field(default_factory=cheats.Overheard)
    envelopes: list[bytes] = field(default_factory=list[bytes])
    """What honest nodes pushed last, for thieves."""
    refused: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """Name → answers to what it pushed beside or in place of its work."""
    joined: list[Part] = field(default_factory=list[Part])

    def cheat(self, part: Part) -> cheats.Cheat | None:
        """Return what alters the engine of a part; None if nothing does."""
        made: dict[str, Callable[[], cheats.Cheat]] = {
            "other model": lambda: cheats.OtherModel(self.other_model / "model.safetensors"),
            "first version": lambda: cheats.OldVersion(self.folder / f"{part.name}-kept", behind=0),
            "version before": lambda: cheats.OldVersion(self.folder / f"{part.name}-kept", behind=1),
            "bfloat16 as float32": lambda: cheats.Coarser("float32"),
            "q8_0 as f16": lambda: cheats.Coarser("f16"),
            "q4_0 as q8_0": lambda: cheats.Coarser("q8_0"),
            "greedy": lambda: cheats.OtherTemperature(0.0, rescored=True),
            "colder": lambda: cheats.OtherTemperature(0.7, rescored=True),
            "hotter": lambda: cheats.OtherTemperature(1.5, rescored=True),
            "colder, own values": lambda: cheats.OtherTemperature(0.7, rescored=False),
            "constant values": lambda: cheats.MadeUp(constant=True),
            "made-up values": lambda: cheats.MadeUp(constant=False),
            "copied": lambda: cheats.Copied(self.overheard),
            "old work": cheats.OldWork,
            "best of 4 seeds": lambda: cheats.CherryPicked(4, is_right),
            "worst of 4 seeds": lambda: cheats.CherryPicked(4, lambda prompt, ids: -is_right(prompt, ids)),
            "best of 4, as vllm": lambda: cheats.CherryPicked(4, is_right, backend="vllm"),
            "hands wrong ones back": lambda: cheats.HandsBack(is_right),
            "cut": lambda: cheats.Truncated(EOS_ID, rescored=False),
            "cut, true values": lambda: cheats.Truncated(EOS_ID, rescored=True),
            "turns to made-up values": lambda: cheats.Turncoat(HONEST_FIRST, cheats.MadeUp(constant=False)),
            "turns to seeds": lambda: cheats.Turncoat(HONEST_FIRST, cheats.CherryPicked(4, is_right)),
        }
        return made[part.kind]() if part.kind in made else None

    def engine(self, part: Part) -> tuple[Engine, EngineOptions]:
        """Make a part's engine."""
        if part.backend == "torch":
            options = TorchOptions.model_validate({"batch": part.batch, "threads": 1, "precision": part.precision})
        else:
            made = {"batch": part.batch, "threads": 1, "gpu_layers": 0, "precision": part.precision}
            options = LlamaCppOptions.model_validate(made)
        engine: Any = make_engine(options)
        cheat = self.cheat(part)
        if cheat is not None:
            return cheats.Altered(engine, cheat), options
        return (engine if part.kind in PUSHED else cheats.Loud(engine, self.overheard)), options

    async def take_part(self, part: Part, *, until: Callable[[Node], bool] = lambda node: False) -> None:
        """Run a node until the run is over or `until` says so."""
        self.joined.append(part)
        engine, options = self.engine(part)

        @asynccontextmanager
        async def open_backend() -> AsyncGenerator[InlineBackend]:
            yield InlineBackend(engine)

        async with open_hivemind_host(part.identity, listen=LISTEN, bootstrap=self.invite.boot, patience_s=60) as host:
            seams = NodeSeams(
                host=host,
                directory=MemoryDirectory(self.records, part.identity, SystemClock()),
                identity=part.identity,
                clock=SystemClock(),
                open_backend=open_backend,
                emit=lambda line: None,
                wanted_files=options.wanted(),
            )
            config = NodeConfig(state_dir=self.folder / part.name)
            node = _Pushing(config, self.invite, seams, part, self)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, node, until)
                try:
                    await node.run(grace_s=1.0)
                except EchoError as e:
                    self.refused.setdefault(part.name, Counter())[f"ended: {e}"] += 1
                tasks.cancel_scope.cancel()

    async def one_after_another(self, parts: Iterable[Part], *, at_once: int, most: int) -> None:
        """Let cheaters take part, so many at a time: each until it gets no more work, or `most` of it was accepted.

        One whose pushes are refused as a whole leaves after PUSHES_S.
        """
        waiting = iter(parts)

        async def places() -> None:
            for part in waiting:
                since_s = anyio.current_time()

                def is_over(node: Node, part: Part = part, since_s: float = since_s) -> bool:
                    if part.kind in PUSHED and anyio.current_time() - since_s > PUSHES_S:
                        return True
                    return "audit" in node.heartbeat.standing or node.status().accepted >= most

                await self.take_part(part, until=is_over)

        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(places)


async def _watch(node: Node, until: Callable[[Node], bool]) -> None:
    while not until(node):  # noqa: ASYNC110 - looks at a status, which no event announces
        await anyio.sleep(0.2)
    node.stop()


class _Pushing(Node):
    """A node of which some pushes are altered, or others come beside them."""

    def __init__(self, config: NodeConfig, invite: Invite, seams: NodeSeams, part: Part, crew: Crew) -> None:
        self._part = part
        self._crew = crew
        super().__init__(config, invite, seams)

    def _make_link(self) -> Link:
        link: Any = super()._make_link()
        honest, altered = link.call, PUSHED.get(self._part.kind)

        async def call(method: str, message: Any, reply: Any, **options: Any) -> Any:
            if method != "push":
                return await honest(method, message, reply, **options)
            if altered is not None:
                message = Push(envelope=altered(self._part.identity, self._crew, message.envelope))
            elif self._part.kind == "honest":
                self._crew.envelopes[:] = [*self._crew.envelopes[-31:], message.envelope]
            answer = await honest(method, message, reply, **options)
            if self._part.kind == "replayed":
                for _ in range(2):
                    self._count(await honest(method, message, reply, **options), "again: ")
            if altered is not None:
                self._count(answer, "")
            return answer

        link.call = call
        return link

    def _count(self, answer: PushReply, what: str) -> None:
        counts = self._crew.refused.setdefault(self._part.name, Counter())
        counts.update(f"{what}{verdict.reason}" for verdict in answer.verdicts)


def _claims_rewards(identity: Identity, crew: Crew, envelope: bytes) -> bytes:
    """Sign the same work with a reward in each completion."""
    said = unseal(envelope, Submission, SUBMISSION_LIMITS).message.to_wire()
    for made in said["trajectories"]:
        made["reward"] = 1.0
    return seal(identity, cast(Any, _Rewarded(said)))


def _steals(identity: Identity, crew: Crew, envelope: bytes) -> bytes:
    """Push what an honest peer pushed, as it is."""
    return crew.envelopes.pop(0) if crew.envelopes else envelope


def _relabels(identity: Identity, crew: Crew, envelope: bytes) -> bytes:
    """Sign what an honest peer pushed, under the leases it was made for."""
    if not crew.envelopes:
        return envelope
    return seal(identity, unseal(crew.envelopes.pop(0), Submission, SUBMISSION_LIMITS).message)


PUSHED: dict[str, Callable[[Identity, Crew, bytes], bytes]] = {
    "claimed rewards": _claims_rewards,
    "stolen envelopes": _steals,
    "stolen work": _relabels,
    "replayed": lambda identity, crew, envelope: envelope,
}
"""Cheats that sample honestly."""


class _Rewarded:
    """A submission with a field that there is not."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def to_wire(self) -> dict[str, Any]:
        """Return it."""
        return self._said


_Rewarded.__name__ = "Submission"
