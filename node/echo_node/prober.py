"""Answers probes: fetches the one that is due, has the backend score it, hands the signed answer in.

    a beat's reply says that one is due ─► probe ─► backend scores, when it runs empty ─► answer ─► verdict

The answer names the version that the backend had loaded while it scored, not the newest one held.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from echo_node.activity import Activity
from echo_node.backends.base import CannotScore, ScoreRequest, Scores
from echo_node.backoff import Backoff
from echo_node.link import Link
from echo_swarm.codec import pack_f32, unpack_u32
from echo_swarm.envelope import seal
from echo_swarm.errors import BackendFailed, MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.identity import Identity
from echo_swarm.probe import Probe, ProbeAnswer, ProbeReply, ProbeRequest, ProbeVerdict
from echo_swarm.trajectory import BehaviourPolicy
from echo_swarm.work import BackendReport

FIRST_RETRY_S = 2.0
LAST_RETRY_S = 120.0
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Scores and what made them. `scores` is text where the backend cannot score."""

    scores: Scores | str
    report: BackendReport


class Prober:
    """One task runs `run`; the heartbeat calls `due`."""

    def __init__(
        self,
        *,
        identity: Identity,
        run_id: str,
        link: Link,
        activity: Activity,
        can_score: Callable[[], bool],
        score: Callable[[ScoreRequest], Awaitable[Scored]],
    ) -> None:
        """Describe it.

        Args:
            identity: signs answers.
            run_id: of the run.
            link: to the coordinator.
            activity: for what people see.
            can_score: whether a version is loaded.
            score: raises BackendFailed when no backend runs.

        """
        self._identity = identity
        self._run_id = run_id
        self._link = link
        self._activity = activity
        self._can_score = can_score
        self._score = score
        self._backoff = Backoff(first_s=FIRST_RETRY_S, limit_s=LAST_RETRY_S)
        self._trouble = ""
        self._due = anyio.Event()
        self._told: ProbeVerdict | None = None

    def due(self) -> None:
        """Note that the coordinator has a probe for this node."""
        self._due.set()

    async def run(self) -> None:
        """Answer probes for ever. What goes wrong with one is tried again, and the node goes on meanwhile."""
        while True:
            await self._due.wait()
            await self._link.ready()
            while not self._can_score():  # noqa: ASYNC110 - a version is loaded now and then, and nothing here is urgent
                await anyio.sleep(LOOK_AGAIN_S)
            self._due = anyio.Event()
            try:
                await self._answer()
                self._backoff.reset()
            except PeerUnreachable:
                self._due.set()  # The link tells people, and `ready` waits.
            except (RemoteError, MalformedMessage, BackendFailed) as e:
                if str(e) != self._trouble:
                    self._activity.say(f"a probe could not be answered and is tried again ({e})")
                self._trouble = str(e)
                await anyio.sleep(self._backoff.next_s())
                self._due.set()

    async def _answer(self) -> None:
        asked = await self._link.call("probe", ProbeRequest(answer=None), ProbeReply)
        if asked.probe is None:
            return
        with anyio.move_on_after(asked.probe.expires_in_s):
            sealed = seal(self._identity, await self._scored(asked.probe))
            reply = await self._link.call("probe", ProbeRequest(answer=sealed), ProbeReply)
            self._tell(reply)

    async def _scored(self, probe: Probe) -> ProbeAnswer:
        request = ScoreRequest(
            items=tuple(
                (tuple(unpack_u32(item.prompt_ids)), tuple(unpack_u32(item.completion_ids))) for item in probe.items
            ),
            temperature=probe.temperature,
        )
        scored = await self._score(request)
        scores, report = scored.scores, scored.report
        measured = isinstance(scores, Scores)
        version = scores.policy_version if measured else 0
        return ProbeAnswer(
            run_id=self._run_id,
            probe_id=probe.probe_id,
            policy=BehaviourPolicy(
                oldest_version=version,
                newest_version=version,
                artifact_digest=scores.artifact_digest if measured else bytes(32),
                backend=report.backend,
                build=report.build,
                precision=report.precision,
            ),
            logprobs=b"".join(map(pack_f32, scores.logprobs)) if measured else b"",
            refusal="" if measured else scores[:1024],
        )

    def _tell(self, reply: ProbeReply) -> None:
        """Print what is new about the verdicts."""
        if reply.verdict is None or reply.verdict is self._told:
            return
        if reply.verdict is ProbeVerdict.MATCHES:
            if self._told is not None:
                self._activity.say(f"the probe fits now: {reply.detail}")
        else:
            self._activity.say(f"probe: {reply.verdict.value.replace('_', ' ')} ({reply.detail})")
        self._told = reply.verdict


async def score_or_refusal(score: Callable[[ScoreRequest], Awaitable[Scores]], request: ScoreRequest) -> Scores | str:
    """Return the scores, or the backend's reason for having none. Raises BackendFailed when it is gone."""
    try:
        return await score(request)
    except CannotScore as e:
        return str(e) or "the backend cannot score"
