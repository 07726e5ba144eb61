"""Probes of the run: what is asked, when a peer is asked, and what follows from its answer.

    trainer ──values at each version──► references ─┐
    beat ──due──► issue ──► node scores ──► answer ─┴─► probe_rules.judge_answer ──► standing ──► set aside, or back

A peer is asked when its process joins, when it holds a version `every` newer than the one measured, and, after an
answer that did not fit, again with growing pauses. It may take its time: a backend scores between two batches.
"""

import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from echo_coordinator.state import probe_rows
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.counters import WORK
from echo_coordinator.state.probe_classes import ClassKey, ClassTable
from echo_coordinator.state.probe_rows import StoredAnswer
from echo_coordinator.state.probe_rules import (
    Gap,
    ProbeJudgement,
    allowed_gap,
    fault_in,
    judge_answer,
    usual_gap,
)
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.roster import MAX_ENTRIES, Node
from echo_swarm import envelope
from echo_swarm.codec import unpack_f32
from echo_swarm.errors import BadSignature, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.probe import PROBE_LIMITS, Probe, ProbeAnswer, ProbeItem, ProbeReply, ProbeVerdict
from echo_swarm.render import short_peer
from echo_swarm.work import BackendReport, Role

KEPT_REFERENCES = 8
"""Versions beside `max_staleness` whose values are kept: an answer is compared with all of them."""
MAX_MISSES = 3
"""Probes in a row that a peer may let run out, or answer with a version that no work needs."""
FIRST_PAUSE_BEATS = 3
LONGEST_PAUSE_BEATS = 60
AGAINST = (ProbeVerdict.OTHER_VERSION, ProbeVerdict.FAR, ProbeVerdict.MALFORMED, ProbeVerdict.NO_ANSWER)
"""Verdicts for which a peer is set aside."""


@dataclass(slots=True, kw_only=True)
class Standing:
    """What is known of one peer."""

    instance: bytes | None = None
    """Process that was asked last."""
    probe_id: bytes | None = None
    """Of the probe that is out."""
    asked_at: float = 0.0
    """Monotonic seconds, as `again_at`."""
    oldest: int = 0
    """Lowest version that an answer to it may have been scored with."""
    held: int = 0
    """Version that the peer held when it was asked."""
    again_at: float = 0.0
    verdict: ProbeVerdict | None = None
    """The last one. None: this process has not answered yet."""
    detail: str = ""
    version: int | None = None
    """That the last measured answer named."""
    gap: Gap | None = None
    confirmed: bool = False
    misses: int = 0
    fails: int = 0
    """In a row."""


class Probes:
    """The probes of one run."""

    def __init__(self, core: RunCore, settings: ProbeSettings, connection: Connection) -> None:
        self._core = core
        self.settings = settings
        self.items: tuple[ProbeItem, ...] = probe_rows.load_items(connection) if settings.prompts else ()
        self._references = dict(probe_rows.load_references(connection))
        self.standings: dict[PeerId, Standing] = {}
        self.classes = ClassTable()
        self.fault = ""
        """Why the trainer gives no values; then nobody is asked."""
        for answer in probe_rows.load_answers(connection):
            self._remember(answer, self.standings.setdefault(answer.peer, Standing()))

    @property
    def references(self) -> Mapping[int, "array[float]"]:
        """What the trainer gives to all completion tokens, item after item, by version."""
        return self._references

    async def set_items(self, items: Sequence[ProbeItem]) -> None:
        """Choose what is asked, once for the run."""
        chosen = tuple(items)
        await self._core.committer.execute(lambda db: probe_rows.insert_items(db, chosen))
        self.items, self._references = chosen, {}

    async def set_reference(self, version: int, values: Sequence["array[float]"]) -> None:
        """Keep what the trainer gives to each item at a version, before nodes can fetch it."""
        logprobs = array("f")
        for piece in values:
            logprobs.extend(piece)
        kept = KEPT_REFERENCES + self._core.settings.max_staleness
        gone = sorted(v for v in self._references if v != version)[: max(0, len(self._references) + 1 - kept)]
        await self._core.committer.execute(lambda db: probe_rows.insert_reference(db, version, logprobs, gone))
        self._references[version] = logprobs
        for old in gone:
            self._references.pop(old, None)

    # Asking.

    def due(self, node: Node, now: float) -> bool:
        """Whether a peer should ask for a probe now."""
        window, held = self._core.window(), node.held_version
        if node.role is not Role.INFERENCE or node.backend is None or window is None or held is None:
            return False
        if not self.items or self.fault or held not in self._references or held < window.oldest():
            return False
        standing = self._standing(node.peer)
        if standing.instance != node.instance:
            return True
        if standing.probe_id is not None:
            return self._ran_out(node, standing, now)
        if standing.verdict is None or standing.verdict in AGAINST or standing.verdict is ProbeVerdict.OUTDATED:
            return now >= standing.again_at
        return held >= standing.held + self.settings.every

    def issue(self, node: Node, now: float) -> Probe | None:
        """Return the probe that is due, or once more the one that is out: its reply may have been lost."""
        window, standing = self._core.window(), self._standing(node.peer)
        due = self.due(node, now)
        if window is None or not self.items or (not due and standing.instance != node.instance):
            return None
        if due:
            if standing.instance != node.instance:
                standing.misses, standing.verdict = 0, None
            standing.instance, standing.probe_id = node.instance, secrets.token_bytes(16)
            standing.asked_at, standing.oldest, standing.held = now, window.oldest(), node.held_version or 0
        if standing.probe_id is None:
            return None
        return Probe(
            probe_id=standing.probe_id,
            items=self.items,
            temperature=self._core.settings.temperature,
            expires_in_s=max(0.001, standing.asked_at + self._answer_s - now),
        )

    def bars(self, peer: PeerId) -> bool:
        """Whether a peer gets no work because of its probes."""
        if peer in self._core.roster.set_aside:
            return True
        if not (self.settings.required and self.settings.prompts) or self.fault:
            return False
        node, standing = self._core.roster.get(peer), self.standings.get(peer)
        if node is None or standing is None or standing.instance != node.instance:
            return True
        return standing.version is None or standing.verdict in (None, ProbeVerdict.NOT_MEASURED)

    # Answers.

    async def take(self, node: Node, raw: bytes, now: float) -> ProbeReply:
        """Judge the answer of a peer, write it down, and let follow what has to.

        Raises:
            MalformedMessage, BadSignature, RemoteError: the answer as a whole was refused.

        """
        signed = envelope.unseal(raw, ProbeAnswer, PROBE_LIMITS)
        if signed.peer_id != node.peer:
            raise BadSignature(f"signed by {signed.peer_id}, sent by {node.peer}; answer your own probes only")
        answer = signed.message
        if answer.run_id != self._core.facts.run_id:
            raise RemoteError("unknown_run", f"this is run {self._core.facts.run_id}, not {answer.run_id}")
        standing, backend = self._standing(node.peer), node.backend
        if standing.probe_id != answer.probe_id or standing.instance != node.instance or backend is None:
            detail = "no such probe is out with this process"
            return ProbeReply(probe=None, verdict=ProbeVerdict.UNKNOWN_PROBE, detail=detail)
        standing.probe_id = None
        if not answer.refusal and answer.policy.backend == backend.backend:
            # A GGUF file's precision is known only once it is loaded, which a hello comes before.
            backend = node.backend = backend.model_copy(update={"precision": answer.policy.precision})
        judgement = self._judge(node.peer, backend, answer, standing)
        await self._follow(node, standing, backend, answer, judgement, now)
        return ProbeReply(probe=None, verdict=judgement.verdict, detail=judgement.detail[:1024])

    def _judge(self, peer: PeerId, backend: BackendReport, answer: ProbeAnswer, standing: Standing) -> ProbeJudgement:
        policy, version = answer.policy, answer.policy.oldest_version
        if answer.refusal:
            return ProbeJudgement(verdict=ProbeVerdict.NOT_MEASURED, detail=answer.refusal)
        if policy.backend != backend.backend:
            return _malformed("it names another backend than its process did when it joined")
        if policy.newest_version != version or policy.artifact_digest not in self._core.artifacts.get(version, ()):
            return _malformed("it names no file that was published for one version")
        if version < standing.oldest or version not in self._references:
            detail = f"scored with version {version}; asked for {standing.oldest} or newer"
            return ProbeJudgement(verdict=ProbeVerdict.OUTDATED, detail=detail)
        reference = self._references[version]
        values = unpack_f32(answer.logprobs) if len(answer.logprobs) == 4 * len(reference) else array("f")
        if problem := fault_in(values, len(reference)):
            return _malformed(problem)
        return judge_answer(values, version, self._references, self.allowed(peer, (backend.backend, backend.precision)))

    def allowed(self, peer: PeerId, key: ClassKey) -> float:
        """Return the largest mean gap that a peer may have which computes with that backend and precision."""
        precisions = {key[1], *self._core.facts.precisions}
        others = self.classes.others(key, peer)
        return allowed_gap(precisions, others, self.settings.tolerance)

    async def _follow(
        self,
        node: Node,
        standing: Standing,
        backend: BackendReport,
        answer: ProbeAnswer,
        judgement: ProbeJudgement,
        now: float,
    ) -> None:
        stored = StoredAnswer(
            at=self._core.clock.wall_s(),
            peer=node.peer,
            backend=backend.backend,
            precision=backend.precision,
            version=answer.policy.oldest_version,
            verdict=judgement.verdict,
            detail=judgement.detail[:1024],
            gap=judgement.gap,
            confirmed=judgement.confirmed,
            logprobs=answer.logprobs,
        )
        self._core.counters.add(WORK, f"probe_{judgement.verdict.value}")
        await self._core.committer.execute(lambda db: probe_rows.insert_answer(db, stored))
        self._remember(stored, standing)
        if judgement.verdict is ProbeVerdict.OUTDATED:
            self._miss(node, standing, now)
        else:
            self._settle(node, standing, now)
        await self._core.save()

    def _remember(self, answer: StoredAnswer, standing: Standing) -> None:
        standing.verdict, standing.detail = answer.verdict, answer.detail
        if answer.gap is not None:
            standing.version, standing.gap, standing.confirmed = answer.version, answer.gap, answer.confirmed
        if answer.verdict is ProbeVerdict.MATCHES and answer.gap is not None:
            self.classes.add((answer.backend, answer.precision), answer.peer, answer.version, answer.gap)
        if answer.verdict in AGAINST and self.settings.action == "set_aside":
            self._core.roster.set_aside[answer.peer] = answer.detail
        elif answer.verdict is ProbeVerdict.MATCHES:
            self._core.roster.set_aside.pop(answer.peer, None)

    # What follows.

    def _settle(self, node: Node, standing: Standing, now: float) -> None:
        """Let a verdict have its consequences."""
        core = self._core
        standing.misses = 0
        standing.fails = standing.fails + 1 if standing.verdict in AGAINST else 0
        self._pause(standing, now)
        if core.roster.set_aside.get(node.peer) is not None:
            core.on_dropped(core.leases.release_all(node.peer, "set aside", now))
        # It may be waiting for work that it may have now, or that others may have instead.
        core.notify_all()

    def _ran_out(self, node: Node, standing: Standing, now: float) -> bool:
        if now < standing.asked_at + self._answer_s:
            return False
        standing.probe_id = None
        self._miss(node, standing, now)
        return now >= standing.again_at

    def _miss(self, node: Node, standing: Standing, now: float) -> None:
        standing.misses += 1
        if standing.misses < MAX_MISSES:
            self._pause(standing, now)
            return
        standing.verdict = ProbeVerdict.NO_ANSWER
        standing.detail = f"{standing.misses} probes in a row without an answer that could be compared"
        if self.settings.action == "set_aside":
            self._core.roster.set_aside[node.peer] = standing.detail
        self._settle(node, standing, now)

    def _pause(self, standing: Standing, now: float) -> None:
        beats = min(LONGEST_PAUSE_BEATS, FIRST_PAUSE_BEATS * 2 ** min(standing.fails, 8))
        standing.again_at = now + beats * self._core.settings.beat_s

    @property
    def _answer_s(self) -> float:
        # As long as the longest lease: a backend may have to run empty before it scores.
        return self._core.settings.lease_max_s

    def _standing(self, peer: PeerId) -> Standing:
        if peer not in self.standings and len(self.standings) >= 2 * MAX_ENTRIES:
            gone = [other for other in self.standings if self._core.roster.get(other) is None]
            for other in gone:
                del self.standings[other]
                self._core.roster.set_aside.pop(other, None)
        return self.standings.setdefault(peer, Standing())

    def warnings(self) -> list[str]:
        """Return what a person should know."""
        found = [f"no node is probed: {self.fault}"] if self.fault else []
        for node in self._core.roster.nodes():
            standing = self.standings.get(node.peer)
            if node.live and standing is not None and standing.verdict in AGAINST:
                done = "set aside" if node.peer in self._core.roster.set_aside else "not trusted"
                found.append(f"{short_peer(node.peer)} is {done} ({standing.verdict}): {standing.detail}")
        return [*found, *self._far_classes()]

    def _far_classes(self) -> Iterator[str]:
        for (backend, precision), record in self.classes.records.items():
            usual = usual_gap({precision, *self._core.facts.precisions}, self.settings.tolerance)
            version, gap = record.trend(1)[0]
            if gap > usual:
                yield (
                    f"{backend} in {precision} is {gap:.2g} nats a token from the trainer at version {version}, usual "
                    f"are up to {usual:.2g}: its samples are corrected for, and worth less; try a finer precision"
                )


def _malformed(detail: str) -> ProbeJudgement:
    return ProbeJudgement(verdict=ProbeVerdict.MALFORMED, detail=detail)
