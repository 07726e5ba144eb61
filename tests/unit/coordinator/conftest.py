"""A run with a manual clock, and peers that sample made-up completions for it."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.batch import Prompt, Score
from echo_coordinator.state.intake import Busy
from echo_coordinator.state.leases import LiveLease
from echo_coordinator.state.run_state import RunFacts, RunState, open_run
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm import codec
from echo_swarm.clock import ManualClock
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity, PeerId
from echo_swarm.trajectory import BehaviourPolicy, FinishReason, Reason, Submission, Trajectory, Verdict, prompt_digest
from echo_swarm.work import BackendReport, Hello, Role

RUN_ID = "ab" * 16
END = 3
VOCABULARY = 100


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


def artifact(version: int) -> bytes:
    """The digest of the one artifact of a version."""
    return version.to_bytes(32, "big")


BACKEND = BackendReport(backend="scripted", build="1", precision="float32", device="none", batch=4)


@dataclass
class Run:
    """An open run with handles for what the wiring loop and the nodes do."""

    state: RunState
    clock: ManualClock
    counter: int = 0
    peers: dict[str, Identity] = field(default_factory=dict[str, Identity])

    def identity(self, name: str) -> Identity:
        return self.peers.setdefault(name, Identity.from_seed(name.encode().ljust(32, b".")))

    def peer(self, name: str) -> PeerId:
        return self.identity(name).peer_id

    async def fill(self, count: int | None = None) -> int:
        """Add as many training groups as are wanted, or `count`."""
        wanted = self.state.admission.wanted if count is None else count
        first = self.state.admission.next_prompt_index
        await self.state.admission.add(
            [Prompt(index=first + i, prompt_ids=codec.pack_u32([5, 6, first + i + 7])) for i in range(wanted)]
        )
        return wanted

    async def publish(self, version: int) -> None:
        await self.state.updates.publish(version, [artifact(version)])

    def grant(self, name: str, capacity: int = 10_000, tokens_per_s: float = 0, alone: bool = True) -> list[LiveLease]:
        window = self.state.core.window()
        assert window is not None
        return self.state.core.leases.grant(
            self.peer(name),
            capacity=capacity,
            tokens_per_s=tokens_per_s,
            alone=alone,
            window=window,
            now=self.clock.monotonic_s(),
            new_id=self._new_id,
            offer=self.state.newcomers.offer(self.peer(name)),
        )

    def _new_id(self) -> bytes:
        self.counter += 1
        return self.counter.to_bytes(16, "big")

    def complete(self, lease: LiveLease, member: int, *, version: int | None = None, **changes: Any) -> Trajectory:
        """Make a valid completion, then change fields of it."""
        core = self.state.core
        group = core.groups.by_id.get(lease.group_id)
        sampled = version if version is not None else max(core.artifacts)
        policy = BehaviourPolicy(
            oldest_version=sampled,
            newest_version=sampled,
            artifact_digest=artifact(sampled),
            backend="scripted",
            build="1",
            precision="float32",
        )
        greedy = group is not None and group.kind == "eval"
        ids = [10 + (lease.group_id + member) % 50, 11 + lease.draws.get(member, 0), END]
        fields: dict[str, Any] = dict(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=member,
            prompt_digest=group.prompt_digest if group else prompt_digest(b""),
            policy=policy,
            temperature=0.0 if greedy else core.settings.temperature,
            seed=core.seed_of(lease, member) if member in lease.draws else 0,
            finish_reason=FinishReason.STOP,
            token_ids=codec.pack_u32(ids),
            logprobs=codec.pack_f32([0.0 if greedy else -0.5] * len(ids)),
        )
        policy_changes = {key: changes.pop(key) for key in list(changes) if key in BehaviourPolicy.model_fields}
        fields["policy"] = policy.model_copy(update=policy_changes)
        return Trajectory(**{**fields, **changes})

    def join(self, *names: str, network: str = "") -> None:
        """Let peers have said hello."""
        for name in names:
            hello = Hello(
                run_id=RUN_ID,
                software="test",
                role=Role.INFERENCE,
                instance=name.encode().ljust(16, b"."),
                wall_s=self.clock.wall_s(),
                backend=BACKEND,
                addresses=(),
            )
            self.state.core.roster.admit(self.peer(name), hello, self.clock.monotonic_s(), 0.0, network)

    def sealed(self, name: str, trajectories: Sequence[Trajectory], run_id: str = RUN_ID) -> bytes:
        return seal(self.identity(name), Submission(run_id=run_id, trajectories=tuple(trajectories)))

    async def push(self, name: str, trajectories: Sequence[Trajectory]) -> tuple[Verdict, ...]:
        """Push as `name` and return the verdicts."""
        outcome = await self.state.intake.submit(self.peer(name), self.sealed(name, trajectories))
        assert not isinstance(outcome, Busy)
        return outcome

    async def reasons(self, name: str, trajectories: Sequence[Trajectory]) -> list[Reason]:
        return [verdict.reason for verdict in await self.push(name, trajectories)]

    async def work(self, name: str, *, version: int | None = None, capacity: int = 10_000) -> int:
        """Take leases and fulfil all of them. Returns the number of completions."""
        leases = self.grant(name, capacity)
        await self.state.core.save()
        for lease in leases:
            made = [self.complete(lease, member, version=version) for member in sorted(lease.outstanding)]
            assert set(await self.reasons(name, made)) == {Reason.ACCEPTED}
        return sum(len(lease.draws) for lease in leases)

    async def score(self, reward: Callable[[int, int], float | None] = lambda group, member: float(member % 2)) -> int:
        """Score all that waits."""
        items = await self.state.rewards.take(100_000)
        await self.state.rewards.record(
            [Score(group_id=i.group_id, member=i.member, reward=reward(i.group_id, i.member)) for i in items]
        )
        return len(items)

    async def commit(self, batch: Any, version: int, *, published: bool = True) -> None:
        digests = [artifact(version)] if published else []
        await self.state.updates.commit(
            batch, new_version=version, checkpoint=f"c{version}", metrics={}, artifact_digests=digests
        )


OpenRun = Callable[..., AbstractAsyncContextManager[Run]]


@pytest.fixture
def open_state(tmp_path: Path) -> OpenRun:
    """Open the run in `tmp_path`; keywords are settings. Opening it again is a restart."""
    clock = ManualClock()

    @asynccontextmanager
    async def opened(
        audits: dict[str, Any] | None = None, standing: dict[str, Any] | None = None, **settings: Any
    ) -> AsyncGenerator[Run]:
        chosen = AuditSettings.model_validate(audits or {})
        values = {"group_size": 4, "groups_per_update": 2, "max_tokens": 8, **settings}
        facts = RunFacts(run_id=RUN_ID, vocabulary_size=VOCABULARY, end_token_ids=(END,))
        limits = None if standing is None else StandingSettings.model_validate(standing)
        path, work = tmp_path / "run.sqlite", WorkSettings(**values)
        async with open_run(path, work, facts, clock, audits=chosen, standing=limits) as state:
            run = Run(state=state, clock=clock)
            # Lease ids are made up by counting; a restart must not repeat them.
            run.counter = int.from_bytes(id(run).to_bytes(8, "big"), "big")
            yield run

    return opened
