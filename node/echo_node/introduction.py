"""Learning what the run is, before a backend is chosen for it.

    coordinator ─► where the directory says it is now ─► peers that hold a version ─► what lies on this disk ─► again

Whoever tells it: the run's key in the invite must have signed it.
"""

import contextlib

import anyio

from echo_node.activity import Activity, Part
from echo_node.backoff import Backoff
from echo_node.peers import Peers
from echo_node.waits import without_name
from echo_swarm.checkpoint.blob import BlobClient, ask_manifest
from echo_swarm.checkpoint.trust import TrustedHead, check_run_manifest
from echo_swarm.clock import Clock
from echo_swarm.envelope import Signed
from echo_swarm.errors import PeerFault, PeerUnreachable, RemoteError, RunNotFound
from echo_swarm.identity import PeerId
from echo_swarm.invite import Invite
from echo_swarm.manifest import CheckpointManifest, RunManifest
from echo_swarm.transport.base import Host

ANSWER_S = 15.0
DIAL_S = 5.0
SHORTEST_ANSWER_S = 2.0
MAX_ASKED = 4
"""Peers that are asked in the coordinator's place, in each round."""
UNKNOWN_RUN = "unknown_run"


async def learn_run(
    host: Host,
    invite: Invite,
    *,
    clock: Clock,
    activity: Activity,
    patience_s: float,
    peers: Peers | None = None,
    known: Signed[RunManifest] | None = None,
) -> Signed[RunManifest]:
    """Return the run's description, as the invite's key signed it.

    Args:
        host: asks.
        invite: names run, key and coordinator.
        clock: for the patience.
        activity: told what is waited for.
        patience_s: how long to try.
        peers: tell where the coordinator is if not where the invite says, and answer in its place.
        known: what lies on this disk, to begin with if nobody answers now.

    Raises:
        RunNotFound: the coordinator serves another run.
        PeerUnreachable: no answer of any kind within `patience_s`.
        MalformedMessage, BadSignature, Untrusted: what it answers does not fit the invite.

    """
    backoff = Backoff(first_s=0.5, limit_s=5.0)
    started_s = clock.monotonic_s()
    while True:
        try:
            left_s = patience_s - (clock.monotonic_s() - started_s) if patience_s else ANSWER_S
            timeout_s = DIAL_S if known else max(SHORTEST_ANSWER_S, min(ANSWER_S, left_s))
            run = await _ask_run(host, invite.coordinator, invite, timeout_s=timeout_s)
            activity.done(Part.LINK)
            return run
        except RemoteError as e:
            if e.code == UNKNOWN_RUN:
                raise RunNotFound(
                    f"the coordinator in the invite does not serve run {invite.run}; ask for a new invite"
                ) from e
            # It is there, and not ready yet: that is told, and waited for however long it takes.
            problem, started_s = str(e), clock.monotonic_s()
        except PeerUnreachable as e:
            problem = without_name(str(e), invite.coordinator)
            run = known or await _from_peers(host, invite, peers)
            if run is not None:
                activity.waits(Part.LINK, "the coordinator", problem)
                activity.say("what the run is, is known already: getting ready meanwhile")
                return run
            if clock.monotonic_s() - started_s >= patience_s:
                raise PeerUnreachable(
                    f"the coordinator did not answer within {patience_s:.0f} s ({e}); "
                    "check that the run is started and the invite is current"
                ) from e
        activity.waits(Part.LINK, "the coordinator", problem)
        await _dial_elsewhere(host, invite, peers)
        await anyio.sleep(backoff.next_s())


async def _ask_run(host: Host, peer: PeerId, invite: Invite, *, timeout_s: float) -> Signed[RunManifest]:
    async with BlobClient(host, peer) as client:
        raw = await client.run(invite.run, timeout_s=timeout_s)
    return check_run_manifest(raw, run_id=invite.run, publisher_key=invite.key)


async def _from_peers(host: Host, invite: Invite, peers: Peers | None) -> Signed[RunManifest] | None:
    holders = [] if peers is None else await peers.holders(0)
    for peer in holders[:MAX_ASKED]:
        with contextlib.suppress(PeerUnreachable, PeerFault):
            return await _ask_run(host, peer, invite, timeout_s=DIAL_S)
    return None


async def _dial_elsewhere(host: Host, invite: Invite, peers: Peers | None) -> None:
    """Dial a coordinator that is not where the invite says: it may have moved."""
    for address in () if peers is None else await peers.coordinator_addresses():
        with contextlib.suppress(PeerUnreachable):
            if await host.connect(address, timeout_s=DIAL_S) == invite.coordinator:
                return


async def learn_head(
    host: Host, invite: Invite, *, clock: Clock, peers: Peers | None = None
) -> CheckpointManifest | None:
    """Return the newest version's manifest as the coordinator, or another peer, has it now; None without a good one.

    Only for choosing a backend: what is trusted is learnt anew by policy sync.
    """
    with contextlib.suppress(PeerUnreachable, PeerFault):
        return await _ask_head(host, invite.coordinator, invite, clock)
    for peer in ([] if peers is None else await peers.holders(0))[:MAX_ASKED]:
        with contextlib.suppress(PeerUnreachable, PeerFault):
            return await _ask_head(host, peer, invite, clock)
    return None


async def _ask_head(host: Host, peer: PeerId, invite: Invite, clock: Clock) -> CheckpointManifest:
    trusted = TrustedHead(run_id=invite.run, publisher_key=invite.key)
    raw = await ask_manifest(host, peer, invite.run, timeout_s=ANSWER_S)
    return trusted.update(raw, clock.wall_s()).message
