"""The option string of `--backend`, such as `torch:batch=16,precision=bfloat16`, and each engine's typed settings."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_swarm.errors import UsageError

Batch = Annotated[int, Field(ge=1, le=4096)]


class EngineOptions(BaseModel):
    """What every engine understands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: Batch = 16
    """Completions at once."""


class TorchOptions(EngineOptions):
    """Settings of the torch engine."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """None: float32 on a CPU, bfloat16 on a GPU."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: as many as the machine gives this process."""
    isolate: bool = False
    """Never let requests of different submit calls share a forward pass: exact repetition, at the price of speed."""


class ScriptedOptions(EngineOptions):
    """Settings of the scripted engine: lognormal times and lengths."""

    mean_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Mean time of one completion, seconds."""
    sigma: Annotated[float, Field(ge=0, le=4)] = 0.5
    """Of the underlying normal distribution of the time."""
    length: Annotated[int, Field(ge=1, le=1 << 17)] = 8
    """Mean completion length, tokens, the end token included."""
    length_sigma: Annotated[float, Field(ge=0, le=4)] = 0.5


OPTIONS: dict[str, type[EngineOptions]] = {"torch": TorchOptions, "scripted": ScriptedOptions}
"""The engines there are. `serve.make_engine` knows how to build each."""


def split_option(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value`.

    Raises:
        UsageError: it is not of that form.

    """
    name, _, rest = text.partition(":")
    pairs: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or key in pairs:
            raise UsageError(f"--backend {text}: write options as NAME:key=value,key=value, each key once")
        pairs[key.strip()] = value.strip()
    return name.strip(), pairs


def parse_options(name: str, values: dict[str, Any]) -> EngineOptions:
    """Check the settings of engine `name`.

    Raises:
        UsageError: an unknown engine or key, or a value out of range; says what there is.

    """
    model = OPTIONS.get(name)
    if model is None:
        raise UsageError(f"unknown backend {name!r}; there are: auto, {', '.join(OPTIONS)}")
    try:
        return model.model_validate(values)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(model.model_fields)
        raise UsageError(f"backend {name}, option {key!r}: {first['msg']} (options: {known})") from None
