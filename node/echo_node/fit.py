"""Whether a run's model fits an engine on this machine, and with how many completions at once. Pure.

engine's settings, RunManifest, Machine ─► fit ─► BackendChoice: the settings with a batch, needed and available bytes
"""

import importlib.metadata
import sys
from dataclasses import dataclass

from echo_node.backends.options import EngineOptions, LlamaCppOptions, TorchOptions, VllmOptions
from echo_node.machine import Gpu, Machine, gib
from echo_node.model_shape import ModelShape
from echo_swarm.errors import BackendFailed, UsageError
from echo_swarm.manifest import RunManifest

CPU_BATCH = 32
"""Largest batch picked on a CPU: beyond it, tokens a second hardly grow, while a lease takes longer to finish."""
GPU_BATCH = 256
PROCESS_BYTES = 700 << 20
"""Resident memory of a torch child before any model: interpreter, torch, transformers (measured: about 450 MB)."""
LLAMA_PROCESS_BYTES = 400 << 20
"""Resident memory of a llama.cpp child before any model, and room for the activations of a pass."""
LLAMA_PARAMETER_BYTES = 2
"""A published GGUF file is rarely wider than 16 bits a parameter; mostly it is half of that."""
_LLAMA_PAGE_TOKENS = 256
"""llama.cpp rounds each sequence's memory up to this many tokens."""
USABLE_SHARE = 0.85
"""Of the memory that is free now; the rest is for the person whose machine this is."""
VLLM_PROCESS_BYTES = 2 << 30
"""Of a vLLM child before any model: on a CPU its resident memory, on a GPU its graphs and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What `fit` and `choose` decided."""

    name: str
    options: EngineOptions
    """With `batch` filled in; goes to `backends.child.start_backend`."""
    text: str
    """How it will run, for people."""
    needed_bytes: int = 0
    available_bytes: int = 0
    reasons: tuple[str, ...] = ()
    """With `auto`: what spoke against each engine that was looked at before this one, and for this one."""
    python: str = sys.executable
    """The interpreter that runs it."""

    @property
    def batch(self) -> int:
        """Completions at once."""
        return self.options.batch


def fit(
    options: EngineOptions, run: RunManifest, machine: Machine, *, fixed: bool, file_bytes: int | None = None
) -> BackendChoice:
    """Return how an engine would run `run`'s model.

    Args:
        options: whose `batch` is kept when `fixed`, and else chosen.
        run: gives the model's shape and the run's limits.
        machine: what there is.
        fixed: the person named the batch.
        file_bytes: size of the file that would be loaded, where that is known.

    Raises:
        UsageError: a device is asked for that is not there.
        BackendFailed: the model does not fit, with both figures.

    """
    if isinstance(options, TorchOptions):
        return _fit_torch(options, fixed, run, machine)
    if isinstance(options, LlamaCppOptions):
        return _fit_llama_cpp(options, fixed, run, machine, file_bytes)
    if isinstance(options, VllmOptions):
        return _fit_vllm(options, run, machine)
    return BackendChoice(name="scripted", options=options, text=f"scripted, batch {options.batch}")


def needed_bytes(shape: ModelShape, run: RunManifest, *, batch: int, width: int) -> int:
    """Return what a torch child takes with a batch of `batch`: weights, cache, logits. `width`: bytes a number."""
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    # The cache grows by reallocation, so that old and new stand side by side; prompts are run ahead of need.
    cache = 2.5 * shape.cache_numbers_per_token * tokens * width
    # Logits, log-probabilities (float32) and their running sums (float64).
    logits = shape.vocabulary_rows * 16
    return int(PROCESS_BYTES + run.parameters * width + batch * (cache + logits))


def _fit_torch(options: TorchOptions, fixed: bool, run: RunManifest, machine: Machine) -> BackendChoice:
    shape = ModelShape.parse(run.model_config_json)
    gpu = usable_gpu(options, machine)
    precision = options.precision or ("bfloat16" if gpu else "float32")
    width = 4 if precision == "float32" else 2
    available = int(USABLE_SHARE * (gpu.free_bytes if gpu else machine.available_bytes))
    where = gpu.name if gpu else "memory"
    least = needed_bytes(shape, run, batch=options.batch if fixed else 1, width=width)
    if least > available:
        raise BackendFailed(
            f"the model does not fit: {run.parameters:,} parameters in {precision} with a batch of "
            f"{options.batch if fixed else 1} need {gib(least)}, {where} has {gib(available)} to give; "
            "free some, or run the node on a larger machine"
        )
    batch = options.batch if fixed else _largest_batch(shape, run, width, available, GPU_BATCH if gpu else CPU_BATCH)
    need = needed_bytes(shape, run, batch=batch, width=width)
    chosen = options.model_copy(update={"batch": batch, "precision": precision, "device": _device(options, gpu)})
    text = f"torch on {gpu.name if gpu else 'CPU'}, {precision}, batch {batch}: needs {gib(need)} of {gib(available)}"
    return BackendChoice(name="torch", options=chosen, text=text, needed_bytes=need, available_bytes=available)


def _fit_llama_cpp(
    options: LlamaCppOptions, fixed: bool, run: RunManifest, machine: Machine, file_bytes: int | None
) -> BackendChoice:
    shape = ModelShape.parse(run.model_config_json)
    # Whether the build uses a GPU is known only in the child, which halves the batch where this guess was too high.
    available = machine.available_bytes
    if options.gpu_layers:
        available = max([available, *(gpu.free_bytes for gpu in machine.gpus)])
    available = int(USABLE_SHARE * available)
    tokens = options.context or run.max_prompt_tokens + run.max_completion_tokens
    tokens = -(-tokens // _LLAMA_PAGE_TOKENS) * _LLAMA_PAGE_TOKENS
    width = {"f32": 4.0, "q8_0": 34 / 32}.get(options.kv or "", 2.0)
    # Logits are kept twice: where they are computed and where they are read.
    each = int(shape.cache_numbers_per_token * tokens * width) + shape.vocabulary_rows * 8
    base = LLAMA_PROCESS_BYTES + (file_bytes or run.parameters * LLAMA_PARAMETER_BYTES)
    least = base + each * (options.batch if fixed else 1)
    if least > available:
        raise BackendFailed(
            f"the model does not fit: {run.parameters:,} parameters with a batch of "
            f"{options.batch if fixed else 1} need {gib(least)}, memory has {gib(available)} to give; "
            "free some, or run the node on a larger machine"
        )
    batch = options.batch if fixed else max(1, min(CPU_BATCH, (available - base) // each))
    chosen = options.model_copy(update={"batch": batch, "threads": options.threads or machine.cpu_count})
    need = base + batch * each
    text = f"llama_cpp, {chosen.threads} threads, batch {batch}: needs up to {gib(need)} of {gib(available)}"
    return BackendChoice(name="llama_cpp", options=chosen, text=text, needed_bytes=need, available_bytes=available)


def _fit_vllm(options: VllmOptions, run: RunManifest, machine: Machine) -> BackendChoice:
    """One completion at least: vLLM fits its batch into what there is by itself, by waiting or by halving."""
    shape = ModelShape.parse(run.model_config_json)
    gpus = machine.gpus[: options.tensor_parallel]
    width = 4 if (options.precision or ("bfloat16" if gpus else "float32")) == "float32" else 2
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    need = VLLM_PROCESS_BYTES + width * (run.parameters + shape.cache_numbers_per_token * tokens)
    if gpus:
        available = sum(min(gpu.free_bytes, int(options.memory * gpu.total_bytes)) for gpu in gpus)
    else:
        available = int(USABLE_SHARE * machine.available_bytes)
    where = gpus[0].name if gpus else "memory"
    if need > available:
        raise BackendFailed(
            f"the model does not fit: {run.parameters:,} parameters and one completion need {gib(need)}, "
            f"{where} has {gib(available)} to give; free some, or run the node on a larger machine"
        )
    text = f"vllm on {gpus[0].name if gpus else 'CPU'}, batch {options.batch}: needs at least {gib(need)}"
    text = f"{text} of {gib(available)}"
    return BackendChoice(name="vllm", options=options, text=text, needed_bytes=need, available_bytes=available)


def _largest_batch(shape: ModelShape, run: RunManifest, width: int, available: int, cap: int) -> int:
    base = needed_bytes(shape, run, batch=0, width=width)
    each = max(1, needed_bytes(shape, run, batch=1, width=width) - base)
    return max(1, min(cap, (available - base) // each))


def usable_gpu(options: TorchOptions, machine: Machine) -> Gpu | None:
    """Return the GPU that torch would use, None for the CPU. Raises UsageError for a device that is not there."""
    if options.device == "cpu" or not machine.gpus:
        if options.device.startswith("cuda"):
            raise UsageError("--backend asks for a CUDA device, but nvidia-smi shows none on this machine")
        return None
    if options.device == "auto" and "+cpu" in _version("torch"):
        return None
    index = int(options.device.partition(":")[2] or 0)
    if index >= len(machine.gpus):
        raise UsageError(f"--backend asks for {options.device}, but there are {len(machine.gpus)} GPU(s)")
    return machine.gpus[index]


def _device(options: TorchOptions, gpu: Gpu | None) -> str:
    if options.device != "auto":
        return options.device
    return "cuda" if gpu else "cpu"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
