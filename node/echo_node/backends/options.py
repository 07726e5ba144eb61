"""The option string of `--backend`, such as `torch:batch=16,precision=bfloat16`, and each engine's typed settings."""

import importlib.util
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_node.wanted import Wanted
from echo_swarm.errors import BackendFailed, UsageError
from echo_swarm.extras import install_command
from echo_swarm.manifest import ArtifactKind
from echo_swarm.plain_errors import no_such, problems

Batch = Annotated[int, Field(ge=1, le=4096)]


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is not allowed, choose auto, cpu, cuda, or one GPU such as cuda:1")
    return text


class EngineOptions(BaseModel):
    """What every engine understands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: Batch = 16
    """Completions at once."""

    def wanted(self) -> Wanted:
        """Return which files of a version the engine can load."""
        return Wanted()

    def environment(self) -> dict[str, str]:
        """Return the variables that the engine's process starts with, beside those of every backend."""
        return {}


class TorchOptions(EngineOptions):
    """Settings of the torch engine."""

    device: Annotated[str, AfterValidator(_device)] = "auto"
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """None: float32 on a CPU, bfloat16 on a GPU."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: as many as the machine gives this process."""
    isolate: bool = False
    """Never let requests of different submit calls share a forward pass: exact repetition, at the price of speed."""

    def wanted(self) -> Wanted:
        """Return safetensors: an adapter with its base, or a whole model."""
        return Wanted(adapter=ArtifactKind.LORA)


class LlamaCppOptions(EngineOptions):
    """Settings of the llama.cpp engine."""

    batch: Annotated[int, Field(ge=1, le=256)] = 16
    """Completions at once; llama.cpp knows no more than 256 sequences."""
    context: Annotated[int, Field(ge=64, le=1 << 20)] | None = None
    """Tokens of one completion with its prompt. None: what the run allows. Less saves memory and refuses long ones."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: as many as the machine gives this process."""
    gpu_layers: Annotated[int, Field(ge=-1, le=4096)] = -1
    """Layers on the GPU, where the build of llama.cpp has one; -1: all of them."""
    kv: Literal["f32", "f16", "q8_0"] | None = None
    """Numbers of the key-value memory. None: f32 for a file in f32, else f16."""
    precision: Literal["q8_0", "bf16", "f16", "f32", "q4_0"] | None = None
    """Of the file, where a version has several. None: the first of these that there is."""

    def wanted(self) -> Wanted:
        """Return GGUF, and the precisions in the order in which they are taken; of LoRA runs an adapter over one."""
        best_first = ("q8_0", "bf16", "f16", "f32", "q4_0")
        first = () if self.precision is None else (self.precision,)
        precisions = tuple(dict.fromkeys(first + best_first))
        return Wanted(kind=ArtifactKind.GGUF, precisions=precisions, adapter=ArtifactKind.LORA_GGUF)

    def environment(self) -> dict[str, str]:
        """Let threads that wait for each other give up their CPU soon.

        By default they spin for milliseconds, some hundred times a token. On two cores that others kept busy, two
        threads made 3 tokens a second that way, and 20 to 30 with this (the last figure with one thread, too).
        """
        return {"GOMP_SPINCOUNT": "1000"}


class VllmOptions(EngineOptions):
    """Settings of the vLLM engine. The longest sequence is what the run allows."""

    batch: Batch = 64
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """None: float32 on a CPU, bfloat16 on a GPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share the model."""
    memory: Annotated[float, Field(gt=0, le=0.98)] = 0.85
    """Share of a GPU's memory that vLLM may take, weights included; less where less is free. On a CPU it takes what the
    batch needs."""
    eager: bool | None = None
    """Without compilation and CUDA graphs. None: on a CPU, where compiling takes minutes and brings little."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """On a CPU; 0: as many as the machine gives this process."""

    def wanted(self) -> Wanted:
        """Return safetensors: an adapter with its base, or a whole model."""
        return Wanted(adapter=ArtifactKind.LORA)

    def environment(self) -> dict[str, str]:
        """Keep vLLM in one process, quiet, and to itself."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
            # Threads that spin at barriers wait for threads that others' work keeps from running: four to seven times
            # slower on a machine that is not idle.
            "OMP_WAIT_POLICY": "passive",
        }


class ScriptedOptions(EngineOptions):
    """Settings of the scripted engine: lognormal times and lengths."""

    mean_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Mean time of one completion, seconds."""
    sigma: Annotated[float, Field(ge=0, le=4)] = 0.5
    """Of the underlying normal distribution of the time."""
    length: Annotated[int, Field(ge=1, le=1 << 17)] = 8
    """Mean completion length, tokens, the end token included."""
    length_sigma: Annotated[float, Field(ge=0, le=4)] = 0.5
    scores: bool = False
    """Answer probes. Only a trainer that is scripted as well gives the same values."""

    def wanted(self) -> Wanted:
        """Return whatever a version has: nothing is computed with it."""
        return Wanted(adapter=ArtifactKind.LORA)


OPTIONS: dict[str, type[EngineOptions]] = {
    "torch": TorchOptions,
    "llama_cpp": LlamaCppOptions,
    "vllm": VllmOptions,
    "scripted": ScriptedOptions,
}
"""The engines there are. `serve.make_engine` knows how to build each."""
NEEDS: dict[str, tuple[str, ...]] = {"torch": ("torch", "transformers"), "llama_cpp": ("llama_cpp",), "vllm": ("vllm",)}
"""Modules an engine imports; the extra of its name installs them."""
PREFERRED = ("torch", "llama_cpp", "vllm")
"""Of which one must be there before a run is dialled with `auto`. What suits it is decided in `hardware`."""


def read_option(text: str | None, *, elsewhere: bool = False) -> tuple[str, EngineOptions, frozenset[str]]:
    """Return the engine, its settings, and which of these were given, of the value of `--backend` (`auto` if None).

    With `elsewhere`, another interpreter runs the engine (`--backend-python`), and its modules are not looked for here.

    Raises:
        UsageError: the option cannot be understood.
        BackendFailed: that engine is not installed, or with `auto` none is; says what is, and how to install it.

    """
    name, given = split_option(text or "auto")
    if name == "auto":
        name = next((engine for engine in PREFERRED if _missing(engine) == ()), PREFERRED[0])
    options = parse_options(name, given)
    if not elsewhere and (missing := _missing(name)):
        raise BackendFailed(
            f"the backend {name} is not installed ({' and '.join(missing)} missing); run: "
            f"{install_command(name.replace('_', '-'))} (there are: {_listed()})"
        )
    return name, options, frozenset(given)


def _missing(name: str) -> tuple[str, ...]:
    return tuple(module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None)


def _listed() -> str:
    return ", ".join(f"{name} ({'not installed' if _missing(name) else 'installed'})" for name in OPTIONS)


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
        raise UsageError(f"unknown backend {name!r}; there are: auto, {_listed()}")
    try:
        return model.model_validate(values)
    except ValidationError as e:
        key, said = problems(e)[0]
        if key not in model.model_fields:
            raise UsageError(f"--backend {name}: {no_such(key, model.model_fields)}") from None
        raise UsageError(f"--backend {name}: {key}: {said}") from None
