"""Joining a network through a list of addresses, some of which are stale. For every host."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from echo_swarm.errors import AnotherPeer, BootstrapFailed, HeldBack, PeerUnreachable
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long the other addresses are waited for once one answered."""
SHORTEST_ATTEMPT_S = 2.0
OnRetry = Callable[[BootstrapFailed, float], None]
"""Told about a failed attempt and the pause in seconds that follows it."""
OnStranger = Callable[[Host, AnotherPeer], Awaitable[bool]]
"""Asked whether to take another peer that answers at an address; it is connected then."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_LONGEST_ATTEMPT_S = 60.0


async def no_stranger(_host: Host, _stranger: AnotherPeer) -> bool:
    """Take no other peer than the one asked for."""
    return False


async def dial_any(
    host: Host, addresses: Sequence[str], *, timeout_s: float, on_stranger: OnStranger = no_stranger
) -> list[PeerId]:
    """Dial all addresses at once. Returns the peers that answered, at least one.

    Raises:
        BootstrapFailed: none answered within `timeout_s`; it says why for each.

    """
    found: dict[PeerId, None] = {}
    failures: dict[str, str] = {}
    held_back: set[str] = set()
    with anyio.CancelScope() as scope:

        async def dial(address: str) -> None:
            try:
                try:
                    peer = await host.connect(address, timeout_s=timeout_s)
                except AnotherPeer as e:
                    if not await on_stranger(host, e):
                        raise
                    peer = PeerId(e.found)
            except PeerUnreachable as e:
                failures[address] = str(e).removeprefix(address).removeprefix(": ")
                if isinstance(e, HeldBack):
                    held_back.add(address)
            else:
                found[peer] = None
                scope.deadline = min(scope.deadline, anyio.current_time() + GRACE_S)

        async with anyio.create_task_group() as tasks:
            for address in dict.fromkeys(addresses):
                tasks.start_soon(dial, address)
    if not found:
        raise BootstrapFailed(failures, held_back=frozenset(held_back))
    for address, reason in failures.items():
        logger.info("bootstrap address %s did not answer: %s", address, reason)
    return list(found)


async def dial_patiently(
    host: Host,
    addresses: Sequence[str],
    *,
    attempt_s: float,
    patience_s: float,
    on_retry: OnRetry | None = None,
    on_stranger: OnStranger = no_stranger,
) -> list[PeerId]:
    """Dial until an address answers: for a coordinator that is overloaded, or about to come back.

    Attempts and the pauses between them double, so that one that needs long for its answer gets that long in the end.

    Args:
        host: dials.
        addresses: as in `dial_any`.
        attempt_s: for the first attempt.
        patience_s: attempts begin and end within this, but for `SHORTEST_ATTEMPT_S`; 0 for a single one of `attempt_s`.
        on_retry: told about each failed attempt and the pause in seconds that follows it.
        on_stranger: see OnStranger; by default none is taken.

    Raises:
        BootstrapFailed: with each address's last reason, once `patience_s` is used up.

    """
    reasons: dict[str, str] = {}
    give_up_at = anyio.current_time() + patience_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            left_s = max(SHORTEST_ATTEMPT_S, give_up_at - anyio.current_time())
            timeout_s = min(attempt_s, left_s) if patience_s else attempt_s
            return await dial_any(host, addresses, timeout_s=timeout_s, on_stranger=on_stranger)
        except BootstrapFailed as e:
            reasons |= {
                address: reason
                for address, reason in e.failures.items()
                if address not in e.held_back or address not in reasons
            }
            failed = BootstrapFailed(reasons)
            if anyio.current_time() + pause_s >= give_up_at:
                raise failed from e
            if on_retry is not None:
                on_retry(failed, pause_s)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        attempt_s = max(attempt_s, min(2 * attempt_s, _LONGEST_ATTEMPT_S))
