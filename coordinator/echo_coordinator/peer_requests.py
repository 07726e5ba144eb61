"""What a running coordinator's owner asks about its peers: `peers`, `ban`, `pardon` of the control socket."""

from typing import Any

from echo_coordinator.state import ban_rows
from echo_coordinator.state.roster import Node
from echo_coordinator.state.run_state import RunState
from echo_swarm.identity import PeerId
from echo_swarm.peer_entry import PeerEntry, resolve_peer
from echo_swarm.work import Role

PEER_REQUESTS = frozenset({"peers", "ban", "pardon"})
MAX_REASON = 512
"""Characters that a peer is told."""


async def answer(state: RunState, op: str, request: dict[str, Any]) -> dict[str, Any]:
    """Handle one of PEER_REQUESTS.

    Raises:
        UsageError: the request names no peer, or one that may be several.
        LocalFault: it could not be written.

    """
    entries = await peer_entries(state)
    if op == "peers":
        return {"peers": [entry.model_dump(mode="json") for entry in entries]}
    peer = resolve_peer(str(request["peer"]), [entry.peer_id for entry in entries])
    if op == "ban":
        taken = await state.bans.ban(
            peer, str(request["reason"])[:MAX_REASON], take_back=bool(request.get("take_back"))
        )
        return {"peer_id": peer, "taken_back": taken}
    was_banned = await state.bans.pardon(peer)
    had_failed = await state.audits.pardon(peer, was_banned=was_banned)
    return {"peer_id": peer, "was_banned": was_banned, "had_failed": had_failed}


async def peer_entries(state: RunState) -> list[PeerEntry]:
    """Return every peer that the run knows, the live ones first, then the latest heard."""
    core = state.core
    await core.save()
    stored = await core.committer.execute(lambda db: ban_rows.load_entries(db, core.clock.wall_s()))
    nodes = {node.peer: node for node in core.roster.nodes()}
    found = [_with_present(state, entry, nodes.get(PeerId(entry.peer_id))) for entry in stored]
    return sorted(found, key=lambda entry: (not entry.live, entry.last_seen_s or 0.0))


def _with_present(state: RunState, entry: PeerEntry, node: Node | None) -> PeerEntry:
    """Add what only memory knows."""
    if node is None:
        return entry
    core, now = state.core, state.core.clock.monotonic_s()
    samples = node.role is Role.INFERENCE
    held = core.leases.in_flight(node.peer)
    last_seen_s = max(0.0, now - node.last_seen) if node.instance is not None else entry.last_seen_s
    changes = {
        "precision": node.backend.precision if node.backend else "",
        "set_aside": node.peer in core.roster.set_aside,
        "in_flight": held,
        "limit": (0 if state.bars(node.peer) else core.leases.pace.allowance(node.peer, now)) if samples else None,
        "live": node.live,
        "last_seen_s": last_seen_s,
    }
    return entry.model_copy(update=changes)
