# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
"""Messages of p2pd's control protocol: a length, as protobuf encodes numbers, then a protobuf message."""

from google.protobuf.message import DecodeError, Message

from echo_swarm.transport.hivemind_stream import HivemindStream

_MAX_BYTES = 1 << 20
_MAX_LENGTH_BYTES = 4
_AT_ONCE_BYTES = 4096
"""A message comes in one piece nearly always: whoever reads it byte by byte is late in a burst of streams."""


async def write_message(stream: HivemindStream, message: Message) -> None:
    """Send one message."""
    body = message.SerializeToString()
    await stream.send(_length(len(body)) + body)


async def read_message(stream: HivemindStream, message: Message) -> None:
    """Read one message into `message`; what came behind it stays for the next reader.

    Raises:
        ValueError: it is none, or longer than 1 MiB.
        anyio.EndOfStream, anyio.BrokenResourceError: from the stream.

    """
    data = bytearray()
    while (place := _place(data)) is None or len(data) < place[1]:
        data += await stream.receive(_AT_ONCE_BYTES)
    start, stop = place
    stream.unread(bytes(data[stop:]))
    try:
        message.ParseFromString(bytes(data[start:stop]))
    except DecodeError as e:
        raise ValueError(f"no message of p2pd's: {e}") from e


def _length(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


def _place(data: bytearray) -> tuple[int, int] | None:
    """Return where the message at the beginning starts and stops; None while its length is incomplete."""
    length = 0
    for at, byte in enumerate(data):
        length |= (byte & 0x7F) << (7 * at)
        if length > _MAX_BYTES or at >= _MAX_LENGTH_BYTES:
            raise ValueError(f"a message of {length} bytes")
        if byte < 0x80:
            return at + 1, at + 1 + length
    return None
