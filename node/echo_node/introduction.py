"""Learning what the run is, before a backend is chosen for it."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import anyio

from echo_node.activity import Activity, Part
from echo_node.backoff import Backoff
from echo_swarm.checkpoint.blob import BlobClient, ask_manifest
from echo_swarm.checkpoint.trust import TrustedHead, check_run_manifest
from echo_swarm.clock import Clock
from echo_swarm.errors import PeerFault, PeerUnreachable, RemoteError, RunNotFound
from echo_swarm.invite import Invite
from echo_swarm.manifest import CheckpointManifest, RunManifest
from echo_swarm.transport.base import Host

ANSWER_S = 15.0
DIAL_S = 5.0
SHORTEST_ANSWER_S = 2.0
UNKNOWN_RUN = "unknown_run"


async def _nowhere_else() -> Sequence[str]:
    return ()


async def learn_run(
    host: Host,
    invite: Invite,
    *,
    clock: Clock,
    activity: Activity,
    patience_s: float,
    elsewhere: Callable[[], Awaitable[Sequence[str]]] = _nowhere_else,
) -> RunManifest:
    """Return the run's description, as the coordinator has it and the invite's key signed it.

    Where it does not answer, the addresses that `elsewhere` returns are dialled before the next try.

    Raises:
        RunNotFound: the coordinator serves another run.
        PeerUnreachable: no answer of any kind within `patience_s`.
        MalformedMessage, BadSignature, Untrusted: what it answers does not fit the invite.

    """
    backoff = Backoff(first_s=0.5, limit_s=5.0)
    started_s = clock.monotonic_s()
    while True:
        try:
            async with BlobClient(host, invite.coordinator) as client:
                left_s = patience_s - (clock.monotonic_s() - started_s) if patience_s else ANSWER_S
                raw = await client.run(invite.run, timeout_s=max(SHORTEST_ANSWER_S, min(ANSWER_S, left_s)))
            activity.done(Part.LINK)
            return check_run_manifest(raw, run_id=invite.run, publisher_key=invite.key).message
        except RemoteError as e:
            if e.code == UNKNOWN_RUN:
                raise RunNotFound(
                    f"the coordinator in the invite does not serve run {invite.run}; ask for a new invite"
                ) from e
            # It is there, and not ready yet: that is told, and waited for however long it takes.
            problem, started_s = str(e), clock.monotonic_s()
        except PeerUnreachable as e:
            problem = str(e)
            if clock.monotonic_s() - started_s >= patience_s:
                raise PeerUnreachable(
                    f"the coordinator did not answer within {patience_s:.0f} s ({e}); "
                    "check that the run is started and the invite is current"
                ) from e
        activity.waits(Part.LINK, "the coordinator", problem)
        for address in await elsewhere():
            with contextlib.suppress(PeerUnreachable):
                if await host.connect(address, timeout_s=DIAL_S) == invite.coordinator:
                    break
        await anyio.sleep(backoff.next_s())


async def learn_head(host: Host, invite: Invite, *, clock: Clock) -> CheckpointManifest | None:
    """Return the newest version's manifest as the coordinator has it now; None when there is none, or no good one.

    Only for choosing a backend: what is trusted is learnt anew by policy sync.
    """
    trusted = TrustedHead(run_id=invite.run, publisher_key=invite.key)
    try:
        raw = await ask_manifest(host, invite.coordinator, invite.run, timeout_s=ANSWER_S)
        return trusted.update(raw, clock.wall_s()).message
    except (PeerUnreachable, PeerFault):
        return None
