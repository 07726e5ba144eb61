"""Learning what the run is, before a backend is chosen for it.

    coordinator ─► where the directory says it is now ─► peers that hold a version ─► what lies on this disk ─► again

Whoever tells it: the run's key in the invite must have signed it.
"""

import contextlib

import anyio

from echo_node.activity import Activity, Part
from echo_node.backoff import Backoff
from echo_node.following import Following
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
from echo_swarm.succession import RunKeys
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
    following: Following | None = None,
) -> Signed[RunManifest]:
    """Return the run's description, as the run's key signed it.

    Args:
        host: asks.
        invite: names run, key and coordinator.
        clock: for the patience.
        activity: told what is waited for.
        patience_s: how long to try.
        peers: tell where the coordinator is if not where the invite says, and answer in its place.
        known: what lies on this disk, to begin with if nobody answers now.
        following: of the run's key; None to know only the one in the invite.

    Raises:
        RunNotFound: the coordinator serves another run.
        PeerUnreachable: no answer of any kind within `patience_s`.
        MalformedMessage, BadSignature, Untrusted: what it answers does not fit the invite.

    """
    keys = RunKeys(invite.run, invite.key) if following is None else following.keys
    backoff, started_s = Backoff(first_s=0.5, limit_s=5.0), clock.monotonic_s()
    while True:
        try:
            left_s = patience_s - (clock.monotonic_s() - started_s) if patience_s else ANSWER_S
            timeout_s = DIAL_S if known else max(SHORTEST_ANSWER_S, min(ANSWER_S, left_s))
            run = await _ask_run(host, keys.coordinator, keys, following, timeout_s=timeout_s)
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
            problem = without_name(str(e), keys.coordinator)
            run = known or await _from_peers(host, keys, peers, following)
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
        await _dial_elsewhere(host, keys, peers, following)
        await anyio.sleep(backoff.next_s())


async def _ask_run(
    host: Host, peer: PeerId, keys: RunKeys, following: Following | None, *, timeout_s: float
) -> Signed[RunManifest]:
    if following is not None:
        await following.ask(peer)
    async with BlobClient(host, peer) as client:
        raw = await client.run(keys.run_id, timeout_s=timeout_s)
    return check_run_manifest(raw, run_id=keys.run_id, publisher_key=keys.pinned, keys=keys)


async def _from_peers(
    host: Host, keys: RunKeys, peers: Peers | None, following: Following | None
) -> Signed[RunManifest] | None:
    holders = [] if peers is None else await peers.holders(0)
    for peer in holders[:MAX_ASKED]:
        with contextlib.suppress(PeerUnreachable, PeerFault):
            return await _ask_run(host, peer, keys, following, timeout_s=DIAL_S)
    return None


async def _dial_elsewhere(host: Host, keys: RunKeys, peers: Peers | None, following: Following | None) -> None:
    """Dial a coordinator that is not where the invite says, or is another peer by now."""
    if following is not None:
        for address in following.invited:
            with contextlib.suppress(PeerUnreachable):
                if await following.at(address) == keys.coordinator:
                    return
        await following.look(lost=True)
    if peers is None:
        return
    peers.coordinator = keys.coordinator
    for address in await peers.coordinator_addresses():
        with contextlib.suppress(PeerUnreachable):
            if await host.connect(address, timeout_s=DIAL_S) == keys.coordinator:
                return


async def learn_head(
    host: Host, invite: Invite, *, clock: Clock, peers: Peers | None = None, keys: RunKeys | None = None
) -> CheckpointManifest | None:
    """Return the newest version's manifest as the coordinator, or another peer, has it now; None without a good one.

    Only for choosing a backend: what is trusted is learnt anew by policy sync.
    """
    keys = keys or RunKeys(invite.run, invite.key)
    with contextlib.suppress(PeerUnreachable, PeerFault):
        return await _ask_head(host, keys.coordinator, keys, clock)
    for peer in ([] if peers is None else await peers.holders(0))[:MAX_ASKED]:
        with contextlib.suppress(PeerUnreachable, PeerFault):
            return await _ask_head(host, peer, keys, clock)
    return None


async def _ask_head(host: Host, peer: PeerId, keys: RunKeys, clock: Clock) -> CheckpointManifest:
    trusted = TrustedHead(run_id=keys.run_id, publisher_key=keys.pinned, keys=keys)
    raw = await ask_manifest(host, peer, keys.run_id, timeout_s=ANSWER_S)
    return trusted.update(raw, clock.wall_s()).message
