"""Tells the coordinator regularly that the node is alive, and hears what changed meanwhile."""

from collections.abc import Callable, Collection

import anyio

from echo_node.activity import Activity, Part
from echo_node.link import CALL_TIMEOUT_S, Link
from echo_node.waits import describe_wait
from echo_swarm.clock import Clock
from echo_swarm.errors import MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.work import Beat, BeatReply, WaitReason

MIN_PATIENCE_S = 2.0


class Heartbeat:
    """One beat every `beat_s`; a beat without an answer takes the link down, which is how a loss is noticed."""

    def __init__(
        self,
        *,
        link: Link,
        clock: Clock,
        activity: Activity,
        compose: Callable[[], Beat],
        heard: Callable[[int | None], None],
        renewed: Callable[[Collection[bytes], Collection[bytes], float], None],
        probe_due: Callable[[], None],
        run_finished: Callable[[], None],
    ) -> None:
        """Describe it.

        Args:
            link: to the coordinator.
            clock: for lease times.
            activity: for what people see.
            compose: makes a beat.
            heard: told the head version in each reply.
            renewed: told the leases that a beat named, those of them that no longer hold, and when it was sent.
            probe_due: called when a probe waits for this node.
            run_finished: called when the run is over.

        """
        self._link = link
        self._clock = clock
        self._activity = activity
        self._compose = compose
        self._heard = heard
        self._renewed = renewed
        self._quiet = False
        self._probe_due = probe_due
        self._run_finished = run_finished
        self.beat_s = 5.0
        """Set from each Welcome."""
        self.standing = ""
        """Why this node gets no work, or less than others, in the coordinator's words."""

    def be_quiet(self) -> None:
        """Beat no more: a beat after the farewell would have to begin with a new hello."""
        self._quiet = True

    async def run(self) -> None:
        """Beat until told to be quiet."""
        while not self._quiet:
            await self._link.ready()
            beat, sent_s = self._compose(), self._clock.monotonic_s()
            try:
                reply = await self._link.call(
                    "beat",
                    beat,
                    BeatReply,
                    timeout_s=min(CALL_TIMEOUT_S, max(MIN_PATIENCE_S, 2 * self.beat_s)),
                )
            except PeerUnreachable:
                continue  # The link tells people, and `ready` waits.
            except (RemoteError, MalformedMessage) as e:
                self._activity.rejected("beat", str(e))
            else:
                self._take(beat, reply, sent_s)
            await anyio.sleep(self.beat_s)

    def _take(self, beat: Beat, reply: BeatReply, sent_s: float) -> None:
        self._heard(reply.head_version)
        self._renewed(beat.lease_ids, reply.expired, sent_s)
        if reply.standing != self.standing:
            self._activity.say(f"the coordinator: {reply.standing or 'this node gets what others get again'}")
            self.standing = reply.standing
        if reply.probe:
            self._probe_due()
        if reply.finished:
            self._run_finished()
        elif reply.stopping:
            self._activity.waits(Part.WORK, describe_wait(WaitReason.STOPPING))
