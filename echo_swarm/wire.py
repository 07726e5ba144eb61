"""The base of everything that crosses the wire: frozen, strict, bounded, and refusing unknown fields.

A message is a pydantic model whose field types carry the limits. `from_wire` turns what `codec.decode` returned into
a checked object or raises MalformedMessage; `to_wire` is its inverse. No message does IO.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from echo_swarm.errors import MalformedMessage

T = TypeVar("T")


def clean(text: str) -> str:
    """Return `text` with everything that a terminal would not print as itself replaced by `?`.

    What peers write for people ends up in terminals and logs, where an escape sequence could forge or hide lines.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


U32 = Annotated[int, Field(ge=0, lt=2**32)]
U63 = Annotated[int, Field(ge=0, lt=2**63)]
"""Counters and versions; fits SQLite's signed 64-bit integers."""
Seconds = Annotated[float, Field(ge=0, le=4e9)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
"""sha256."""
PublicKeyBytes = Annotated[bytes, Field(min_length=32, max_length=32)]
ProtocolVersion = Annotated[int, Field(ge=1, le=1)]
"""Not Literal[1], which also takes true and 1.0."""
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
LeaseId = Annotated[bytes, Field(min_length=16, max_length=16)]
Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(clean)]
Label = Annotated[str, Field(max_length=128), AfterValidator(clean)]
Text = Annotated[str, Field(max_length=1024), AfterValidator(clean)]
Address = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
"""A multiaddress: visible ASCII only."""


def _only_text(value: object) -> object:
    # Not strict, pydantic takes an enumeration's word as bytes too.
    if not isinstance(value, str):
        raise ValueError("Input should be a string")
    return value


Word = (Field(strict=False), BeforeValidator(_only_text))
"""For enumerations, which travel as strings: `Annotated[Role, *Word]`."""


class Message(BaseModel):
    """Base of wire messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_wire(self) -> dict[str, Any]:
        """Return plain values for `codec.encode`."""
        return self.model_dump(mode="python")

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Check `value`, as returned by `codec.decode`.

        Raises:
            MalformedMessage: naming the first field that is wrong, never echoing its content at length.

        """
        try:
            return cls.model_validate(value)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:120] or "value"
            raise MalformedMessage(f"{cls.__name__}.{where}: {first['msg'][:200]}") from None
