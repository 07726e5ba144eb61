"""Which backend suits this machine, and whether the run's model fits. No torch in this process.

probe ─► Machine ┐
--backend option ┼─► choose ─► BackendChoice(options with a batch size, text for people)
RunManifest      ┘
"""

import importlib.metadata
from dataclasses import dataclass

from echo_node.backends.options import OPTIONS, EngineOptions, LlamaCppOptions, TorchOptions, read_option
from echo_node.machine import Gpu, Machine, gib, probe
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What `choose` decided."""

    name: str
    options: EngineOptions
    """With `batch` filled in; goes to `backends.child.start_backend`."""
    text: str
    """Why, for people."""

    @property
    def batch(self) -> int:
        """Completions at once."""
        return self.options.batch


def choose(
    option: str | None, run: RunManifest, machine: Machine | None = None, *, elsewhere: bool = False
) -> BackendChoice:
    """Pick backend and batch size for `run`.

    Args:
        option: `auto` (or None), a name, or a name with settings, such as `torch:batch=4,device=cpu`.
        run: gives the model's shape and the run's limits.
        machine: from `probe`, which is called when it is not given; that may block for some seconds.
        elsewhere: another interpreter runs the engine.

    Raises:
        UsageError: the option cannot be understood.
        BackendFailed: nothing suitable is installed, or the model does not fit, with both figures.

    """
    name, options, given = read_option(option, elsewhere=elsewhere)
    if isinstance(options, LlamaCppOptions):
        return _choose_llama_cpp(options, "batch" in given, run, machine or probe())
    if not isinstance(options, TorchOptions):
        return BackendChoice(name=name, options=options, text=f"{name}, batch {options.batch}")
    return _choose_torch(options, "batch" in given, run, machine or probe())


def require_backend(option: str | None, machine: Machine, *, elsewhere: bool = False) -> None:
    """Raise what `choose` would of `option`, as far as that is known without the run: before anybody is dialled.

    Raises:
        UsageError: the option cannot be understood, or asks for a device that this machine does not have.
        BackendFailed: the engine is not installed.

    """
    _, options, _ = read_option(option, elsewhere=elsewhere)
    if isinstance(options, TorchOptions):
        _usable_gpu(options, machine)


def needed_bytes(shape: ModelShape, run: RunManifest, *, batch: int, width: int) -> int:
    """Return what a torch child takes with a batch of `batch`: weights, cache, logits. `width`: bytes a number."""
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    # The cache grows by reallocation, so that old and new stand side by side; prompts are run ahead of need.
    cache = 2.5 * shape.cache_numbers_per_token * tokens * width
    # Logits, log-probabilities (float32) and their running sums (float64).
    logits = shape.vocabulary_rows * 16
    return int(PROCESS_BYTES + run.parameters * width + batch * (cache + logits))


def _choose_torch(options: TorchOptions, fixed: bool, run: RunManifest, machine: Machine) -> BackendChoice:
    shape = ModelShape.parse(run.model_config_json)
    gpu = _usable_gpu(options, machine)
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
    return BackendChoice(name="torch", options=chosen, text=text)


def _choose_llama_cpp(options: LlamaCppOptions, fixed: bool, run: RunManifest, machine: Machine) -> BackendChoice:
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
    base = LLAMA_PROCESS_BYTES + run.parameters * LLAMA_PARAMETER_BYTES
    least = base + each * (options.batch if fixed else 1)
    if least > available:
        raise BackendFailed(
            f"the model does not fit: {run.parameters:,} parameters in 16 bits with a batch of "
            f"{options.batch if fixed else 1} need {gib(least)}, memory has {gib(available)} to give; "
            "free some, or run the node on a larger machine"
        )
    batch = options.batch if fixed else max(1, min(CPU_BATCH, (available - base) // each))
    chosen = options.model_copy(update={"batch": batch, "threads": options.threads or machine.cpu_count})
    text = f"llama_cpp, {chosen.threads} threads, batch {batch}: needs up to {gib(base + batch * each)}"
    return BackendChoice(name="llama_cpp", options=chosen, text=f"{text} of {gib(available)}")


def _largest_batch(shape: ModelShape, run: RunManifest, width: int, available: int, cap: int) -> int:
    base = needed_bytes(shape, run, batch=0, width=width)
    each = max(1, needed_bytes(shape, run, batch=1, width=width) - base)
    return max(1, min(cap, (available - base) // each))


def _usable_gpu(options: TorchOptions, machine: Machine) -> Gpu | None:
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


def backends() -> tuple[str, ...]:
    """Return the names that `--backend` takes besides `auto`."""
    return tuple(OPTIONS)
