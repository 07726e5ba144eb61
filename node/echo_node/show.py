"""`echo-node status`: the nodes of this machine, or with an invite the whole run."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from echo_node.bare_errors import bare_errors
from echo_node.hosts import open_network, peers_of
from echo_node.status import LEFT_BANNED, LEFT_REFUSED, LocalStatus, Seen, in_words, read_statuses
from echo_swarm.clock import SystemClock
from echo_swarm.errors import MalformedMessage, PeerUnreachable, RemoteError, RunNotFound
from echo_swarm.identity import Identity, PeerId
from echo_swarm.invite import Invite
from echo_swarm.render import counts, duration, literal, render_run_status, short_peer, size
from echo_swarm.status import RunStatus
from echo_swarm.succession import day
from echo_swarm.tables import Column, FittedTable
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.work import WORK_PROTOCOL, Role, StatusReply, StatusRequest

MAX_STATUS_BYTES = 4 << 20
ANSWER_S = 15.0


def show_local(state_dir: Path, console: Console, *, as_json: bool) -> None:
    """Show what the nodes of a state folder last said about themselves."""
    seen = read_statuses(state_dir, SystemClock())
    if as_json:
        rows = [{**s.status.model_dump(mode="json"), "age_s": s.age_s, "live": s.live} for s in seen]
        console.print_json(json.dumps(rows))
    elif not seen:
        console.print(f"no node has run from {state_dir} yet; start one with: echo-node join INVITE")
    else:
        console.print(_local_table(seen))
        for line in _key_lines(seen):
            console.print(line)


def _key_lines(seen: Sequence[Seen]) -> list[Text]:
    lines: list[Text] = []
    for status in (item.status for item in seen):
        if (change := status.key_change) is not None:
            run, count = status.run_name or status.run_id[:8], status.key_changes
            often = "once" if count == 1 else f"{count} times, last"
            keys = f"{short_peer(change.before)} → {short_peer(change.after)}"
            said = f"{run}: the run's key was replaced {often} on {day(change.at)} ({keys}); this node has followed"
            lines.append(literal(said, style="dim"))
    return lines


_COLUMNS = (
    Column(title="run", sentence=True),
    Column(title="node", spare=3),
    Column(title="seen"),
    Column(title="backend", spare=2),
    Column(title="version", number=True, spare=1),
    Column(title="swap", number=True, spare=5),
    Column(title="tok/s", number=True),
    Column(title="accepted", number=True),
    Column(title="not accepted", sentence=True),
    Column(title="unanswered", number=True, spare=4),
    Column(title="state", sentence=True),
)


def _local_table(seen: Sequence[Seen]) -> FittedTable:
    return FittedTable(columns=_COLUMNS, rows=[(_cells(item), "" if item.live else "dim") for item in seen])


def _cells(item: Seen) -> list[Text]:
    status = item.status
    return [
        literal(status.run_name or status.run_id[:8]),
        literal(short_peer(status.peer_id)),
        Text(f"{duration(item.age_s)} ago"),
        literal(_doing_what(status)),
        literal(_version(status)),
        Text(f"{status.swaps[-1].total_s:.1f} s" if status.swaps else "-"),
        Text(f"{status.tokens_per_s:.0f}" if item.live else "-"),
        Text(str(status.accepted)),
        literal(counts(in_words(status.rejected)) or "0"),
        Text(str(status.pending)),
        literal(_state(item)),
    ]


def _state(item: Seen) -> str:
    if item.live:
        return f"{item.status.state}; {item.status.standing}" if item.status.standing else item.status.state
    return item.status.state if item.status.state in (LEFT_BANNED, LEFT_REFUSED) else "(gone)"


def _doing_what(status: LocalStatus) -> str:
    return f"seeder, {size(status.bytes_served)} served" if status.role == Role.SEEDER else status.backend or "-"


def _version(status: LocalStatus) -> str:
    held = status.held_versions
    if status.role == Role.SEEDER and held:
        return str(held[0]) if len(held) == 1 else f"{held[0]}-{held[-1]}"
    return "-" if status.loaded_version is None else str(status.loaded_version)


def show_run(invite: Invite, console: Console, *, as_json: bool) -> None:
    """Ask the coordinator for the run's status and show it.

    Raises:
        BootstrapFailed, PeerUnreachable: it cannot be reached.
        RunNotFound: it serves another run.
        MalformedMessage: its answer cannot be read.

    """
    with bare_errors():
        status = anyio.run(_ask, invite)
    if as_json:
        console.print_json(json.dumps(status))
        return
    try:
        parsed = RunStatus.model_validate(status)
    except ValidationError as e:
        raise MalformedMessage(f"the coordinator's status cannot be read ({e.error_count()} errors)") from e
    console.print(render_run_status(parsed))


async def _ask(invite: Invite) -> dict[str, Any]:
    # An identity of its own: looking at a run must not disturb the node that takes part in it.
    async with open_network(Identity.generate(), invite, outbound_only=True) as network:
        following = network.following
        try:
            return await ask_status(network.host, invite, following.keys.coordinator)
        except PeerUnreachable:
            if not await following.look(lost=True):
                raise
            for address in await peers_of(network, invite, SystemClock()).coordinator_addresses():
                with contextlib.suppress(PeerUnreachable):
                    await network.host.connect(address, timeout_s=ANSWER_S)
            return await ask_status(network.host, invite, following.keys.coordinator)


async def ask_status(host: Host, invite: Invite, coordinator: PeerId | None = None) -> dict[str, Any]:
    """Return the run's status as the coordinator gives it. Raises PeerUnreachable, RunNotFound, MalformedMessage.

    `coordinator` is who has the run's key now; None for the one in the invite.
    """
    whom = coordinator or invite.coordinator
    async with RpcClient(host, whom, WORK_PROTOCOL, max_reply_bytes=MAX_STATUS_BYTES) as client:
        try:
            request = StatusRequest(run_id=invite.run)
            return (await call_message(client, "status", request, StatusReply, timeout_s=ANSWER_S)).status
        except RemoteError as e:
            if e.code == "unknown_run":
                raise RunNotFound(
                    f"the coordinator was reached, but does not serve run {invite.run}: {e.message}"
                ) from e
            raise
        except PeerUnreachable as e:
            advice = "it may have stopped: ask who runs it"
            raise PeerUnreachable(f"the coordinator cannot be reached ({e}); {advice}") from e
