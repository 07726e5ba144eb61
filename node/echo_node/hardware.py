"""Which backend samples for a run on this machine, and why. No torch in this process.

--backend option ─► read_option ─┬─ a name ─────────────────────────────────────────► fit ─► BackendChoice
                                 └─ auto ─► engines in the order of ORDER, the first that suits ─► with reasons
survey (what is installed), Machine, RunManifest, head (which files are published) ─┘
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from echo_node.backends.options import (
    EngineOptions,
    LlamaCppOptions,
    TorchOptions,
    parse_options,
    read_option,
    split_option,
)
from echo_node.backends.survey import Installed, Survey, look
from echo_node.fit import BackendChoice, fit, needed_bytes, usable_gpu
from echo_node.machine import Machine, probe
from echo_node.refusals import USE_ANOTHER, against_backend
from echo_swarm.errors import BackendFailed, EchoError, UsageError
from echo_swarm.extras import install_command
from echo_swarm.manifest import ArtifactKind, CheckpointManifest, RunManifest

ORDER = ("vllm", "llama_cpp", "torch")
"""What `auto` looks at: by tokens a second where it suits. vLLM without a GPU is for tests."""

__all__ = ["ORDER", "BackendChoice", "auto", "choose", "needed_bytes", "probe", "require_backend"]


def choose(
    option: str | None,
    run: RunManifest,
    machine: Machine | None = None,
    *,
    python: str = sys.executable,
    survey: Survey | None = None,
    head: CheckpointManifest | None = None,
) -> BackendChoice:
    """Pick backend and batch size for `run`.

    Args:
        option: `auto` (or None), a name, or a name with settings, such as `torch:batch=4,device=cpu`.
        run: gives the model's shape and the run's limits.
        machine: from `probe`, which is called when it is not given; that may block for some seconds.
        python: the interpreter that runs the engine; with `auto`, the one in which `survey` found it.
        survey: what there is to choose from; what this interpreter has when it is not given.
        head: the newest version, if one is published: which kinds of files there are.

    Raises:
        UsageError: the option cannot be understood, or the run takes no work of that backend.
        BackendFailed: nothing suitable is installed, or the model does not fit, with both figures.

    """
    machine = machine or probe()
    name, given = split_option(option or "auto")
    if name == "auto":
        return auto(given, run, machine, survey or look(), head, python=python)
    if problem := against_backend(name, run):
        raise UsageError(f"--backend {name}: {problem}; {USE_ANOTHER}")
    _, options, named = read_option(option, elsewhere=python != sys.executable)
    choice = fit(options, run, machine, fixed="batch" in named, file_bytes=file_bytes(options, head))
    return replace(choice, python=python)


def auto(
    given: dict[str, str],
    run: RunManifest,
    machine: Machine,
    survey: Survey,
    head: CheckpointManifest | None,
    *,
    python: str = sys.executable,
) -> BackendChoice:
    """Return the first engine of ORDER that is installed, has what it needs, and into which the model fits.

    Raises:
        UsageError: `given` holds a setting that an engine does not have.
        BackendFailed: none; with the reason for each.

    """
    reasons: list[str] = []
    for name in ORDER:
        options = parse_options(name, given)
        problem = against_backend(name, run) or _against(name, options, survey, machine, head)
        if not problem:
            try:
                choice = fit(options, run, machine, fixed="batch" in given, file_bytes=file_bytes(options, head))
            except EchoError as e:
                problem = str(e)
            else:
                runs_it = survey[name].python
                where = "" if runs_it == python else f"; in this command's own environment, since {python} lacks it"
                reasons.append(f"{choice.name}: {_FOR[name]}{where}")
                return replace(choice, reasons=tuple(reasons), python=runs_it)
        reasons.append(f"not {name}: {problem}")
    raise BackendFailed(f"no backend suits this run on this machine ({'; '.join(reasons)})")


_FOR = {
    "vllm": "there is a CUDA device, and vLLM keeps it busiest",
    "llama_cpp": "the run publishes a gguf file for it, which is smaller and faster on a CPU",
    "torch": "it runs every model of this project on any device",
}


def _against(
    name: str, options: EngineOptions, survey: Survey, machine: Machine, head: CheckpointManifest | None
) -> str:
    """Return what speaks against an engine before memory is looked at; empty: nothing."""
    found = survey.get(name)
    if found is None or found.missing:
        missing = " and ".join(found.missing) if found else name
        return f"{missing} not installed; run: {install_command(name.replace('_', '-'))}"
    return _CONDITIONS[name](options, found, machine, head)


def _against_vllm(_: EngineOptions, found: Installed, machine: Machine, __: CheckpointManifest | None) -> str:
    if not machine.gpus:
        return "nvidia-smi shows no CUDA device"
    return "this build is for CPUs" if found.for_cpus_only else ""


def _against_llama_cpp(options: EngineOptions, _: Installed, __: Machine, head: CheckpointManifest | None) -> str:
    if head is None:
        return "no version is known that could have a gguf file"
    wanted = options.wanted()
    return "" if wanted.choose(head) is not None else wanted.lacking(head)


_CONDITIONS: dict[str, Callable[[EngineOptions, Installed, Machine, CheckpointManifest | None], str]] = {
    "vllm": _against_vllm,
    "llama_cpp": _against_llama_cpp,
    "torch": lambda options, found, machine, head: "",
}


def file_bytes(options: EngineOptions, head: CheckpointManifest | None) -> int | None:
    """Return the size of the GGUF file that would be fetched, None where it is not known."""
    artifact = options.wanted().choose(head) if head is not None and isinstance(options, LlamaCppOptions) else None
    return artifact.size_bytes if artifact is not None and artifact.kind is ArtifactKind.GGUF else None


def require_backend(option: str | None, machine: Machine, *, elsewhere: bool = False) -> None:
    """Raise what `choose` would of `option`, as far as that is known without the run: before anybody is dialled.

    Raises:
        UsageError: the option cannot be understood, or asks for a device that this machine does not have.
        BackendFailed: the engine is not installed.

    """
    _, options, _ = read_option(option, elsewhere=elsewhere)
    if isinstance(options, TorchOptions):
        usable_gpu(options, machine)
