"""Messages that no honest peer sends, made of ones that it does. Pure; every one of them is wrong by construction.

`broken_values` works on the decoded message: each key left out, given another type, a value out of range, one that is
far too long, a key too many, depth. `broken_bytes` works on encoded ones: bits flipped, bytes cut off, doubled, put in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

LONG = 5000
"""Longer than any text or name, and than lists of leases."""
_DEEP: Any = None
for _ in range(20):
    _DEEP = [_DEEP]

_WRONG: Mapping[type, tuple[Any, ...]] = {
    bool: (None, 0, 1, "x", b"", [], {}),
    int: (None, True, "1", b"\x01", 1.5, -1, 2**63, 2**64 - 1, float("nan"), [], {}, _DEEP),
    float: (None, True, "1", b"", -1.0, 1e300, float("nan"), float("inf"), float("-inf"), [], {}, _DEEP),
    str: (None, True, 1, b"x", "x" * LONG, [], {}, _DEEP),
    bytes: (None, True, 1, "x", b"x" * 3, b"x" * LONG * 200, [], {}, _DEEP),
    list: (None, True, 1, "x", b"x", {}, [None], [1.5], [{}], [[]], ["x"] * LONG, _DEEP),
    dict: (None, True, 1, "x", b"x", [], {}, {"x": 1}, {1: 1}, _DEEP),
}
"""By what stands there in a valid message."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A message that is wrong, and in what way."""

    what: str
    value: Any
    """The message: plain values or bytes."""


def broken_values(message: dict[str, Any], *, harmless: frozenset[tuple[str, str]] = frozenset()) -> Iterator[Broken]:
    """Yield every way in which one place of a message can be wrong.

    Args:
        message: plain values; is not changed.
        harmless: (key, what) pairs that leave the message valid: what may be left out, or null.

    """
    for path, value in _places(message, ()):
        name = ".".join(map(str, path))
        if isinstance(path[-1], str) and (path[-1], "left out") not in harmless:
            yield Broken(what=f"{name} left out", value=_changed(message, path, remove=True))
        for wrong in _WRONG.get(type(value), ()):
            if (str(path[-1]), _say(wrong)) not in harmless:
                yield Broken(what=f"{name} is {_say(wrong)}", value=_changed(message, path, wrong))
        if isinstance(value, dict):
            yield Broken(what=f"{name} has a key too many", value=_changed(message, (*path, "reward"), 1.0))
    yield Broken(what="a key too many", value={**message, "reward": 1.0})


def broken_bytes(raw: bytes, random: Random) -> Broken:
    """Return encoded bytes that differ from `raw` in one place."""
    at = random.randrange(len(raw))
    match random.randrange(5):
        case 0:
            changed = bytes([raw[at] ^ 1 << random.randrange(8)])
            return Broken(what=f"bit flipped at {at}", value=raw[:at] + changed + raw[at + 1 :])
        case 1:
            return Broken(what=f"cut off at {at}", value=raw[:at])
        case 2:
            return Broken(what=f"a byte put in at {at}", value=raw[:at] + random.randbytes(1) + raw[at:])
        case 3:
            end = min(len(raw), at + random.randint(1, 64))
            return Broken(what=f"doubled from {at} to {end}", value=raw[:end] + raw[at:])
        case _:
            length = random.randint(1, 16)
            other = random.randbytes(length)
            if other == raw[at : at + length]:
                return Broken(what="cut off at 0", value=b"")
            return Broken(what=f"{length} other bytes at {at}", value=raw[:at] + other + raw[at + length :])


def _places(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield where values stand, the message itself left out; of lists the first element only."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from _places(cast("list[Any]", value)[0], (*path, 0))


def _changed(value: Any, path: Path, new: Any = None, *, remove: bool = False) -> Any:
    """Return a copy of `value` in which one place is another."""
    copy: Any = dict(cast("dict[Any, Any]", value)) if isinstance(value, dict) else list(value)
    first, *rest = path
    if rest:
        copy[first] = _changed(copy[first], tuple(rest), new, remove=remove)
    elif remove:
        del copy[first]
    else:
        copy[first] = new
    return copy


def _say(value: Any) -> str:
    if isinstance(value, str | bytes | list) and len(cast("list[Any]", value)) > 8:
        return f"{type(value).__name__} of {len(cast('list[Any]', value))}"
    return "nested deeply" if value is _DEEP else repr(value)
