"""Hearing of the first version at once, when a node has joined before there is any.

A node with a version asks for work, and the answer to that is also how it hears of the next. One without has nothing to
ask for, so it would hear of the first version with a beat, seconds later. It asks for work that it cannot do yet: the
answer comes when a version is published.
"""

from collections.abc import Callable

import anyio

from echo_node.link import Link
from echo_node.worker import LEASE_WAIT_S, MIN_PAUSE_S
from echo_swarm.errors import MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.work import LeaseReply, LeaseRequest


async def hear_of_first_version(
    link: Link, known_head: Callable[[], int | None], heard: Callable[[int | None], None]
) -> None:
    """Return once some version is known, or the coordinator refuses to tell in this way.

    Args:
        link: to the coordinator.
        known_head: the newest version heard of.
        heard: told what the coordinator says.

    """
    request = LeaseRequest(capacity=1, held_version=None, tokens_per_s=0, wait_s=LEASE_WAIT_S)
    while True:
        await link.ready()
        if known_head() is not None:
            return
        try:
            reply = await link.call("lease", request, LeaseReply, timeout_s=LEASE_WAIT_S + 20)
        except PeerUnreachable:
            continue  # The link tells people, and dials again.
        except (RemoteError, MalformedMessage):
            return  # Beats tell it, too.
        heard(reply.head_version)
        await anyio.sleep(max(reply.retry_after_s, MIN_PAUSE_S))
