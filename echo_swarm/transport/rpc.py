"""Framed calls over a host's streams: what the rest of the project uses. See `rpc_client`, `rpc_server`, `frames`.

async with RpcServer(host, PROTOCOL, max_request_bytes=65_536) as server:
    server.method("beat", typed(Beat, on_beat))

async with RpcClient(host, peer, PROTOCOL, max_reply_bytes=65_536) as client:
    reply = await call_message(client, "beat", beat, BeatReply, timeout_s=10)
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from echo_swarm.identity import PeerId
from echo_swarm.transport.call import reserve_answer
from echo_swarm.transport.rpc_client import RpcClient
from echo_swarm.transport.rpc_errors import error_code
from echo_swarm.transport.rpc_server import Method, RpcServer
from echo_swarm.transport.traffic import Traffic, TrafficLedger
from echo_swarm.wire import Message

__all__ = [
    "Method",
    "RpcClient",
    "RpcServer",
    "Traffic",
    "TrafficLedger",
    "call_message",
    "error_code",
    "reserve_answer",
    "typed",
]

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


async def call_message(
    client: RpcClient, method: str, request: Message, reply_type: type[Reply], *, timeout_s: float
) -> Reply:
    """Call a method with a message and return its checked reply.

    Raises:
        PeerUnreachable, RemoteError: as `RpcClient.call`.
        MalformedMessage: the reply is none of `reply_type`.

    """
    return reply_type.from_wire(await client.call(method, request.to_wire(), timeout_s=timeout_s))


def typed(request_type: type[Request], handler: Callable[[PeerId, Request], Awaitable[Message]]) -> Method:
    """Return a method that checks its payload, so that `handler` sees only valid messages."""

    async def method(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        return (await handler(peer, request_type.from_wire(payload))).to_wire()

    return method
