"""Check the trainer and the samplers on a CUDA device: `make check-gpu`, or `python -m tools.check_gpu`.

Runs one piece of `tools/gpu_checks.py` after the other, each in a process of its own and with its own limit, and writes
what came out to runs/check-gpu.json after each. Called again, it runs what has not passed yet with this commit on this
device. All pieces together take about ten minutes.

Exit code: 0 all that could be checked passed, 1 something failed, 2 it cannot be checked as this machine is set up,
75 time is up and pieces are left (call it again), 77 there is no CUDA device.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_node.backends.survey import Survey, survey
from echo_node.machine import probe
from echo_swarm.checkpoint.files import write_atomically
from echo_swarm.errors import BackendFailed
from tools.make_vllm_env import python_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "check-gpu.json"
LIMITS_S = {"trainer": 180.0, "torch": 180.0, "vllm": 300.0, "llama_cpp": 120.0}
"""Longest time of each piece, in the order in which they run."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
ALL_PASSED, SOME_FAILED, NOT_SET_UP, NOT_DONE, NO_DEVICE = 0, 1, 2, 75, 77


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be checked on what."""

    device: str
    names: tuple[str, ...]
    vllm_python: str
    results: Path
    budget_s: float
    speed: bool = True


def run(plan: Plan) -> int:
    """Run the pieces that have not passed yet; return the exit code."""
    identity = _identity(plan.device)
    kept = _read(plan.results, identity)
    until_s, ran = time.monotonic() + plan.budget_s, 0
    for name in plan.names:
        if kept.get(name, {}).get("status") == PASSED:
            print(f"{name}: passed before", flush=True)
            continue
        if ran and time.monotonic() + LIMITS_S[name] > until_s:
            print(f"{name}: no time left; call again for the rest", flush=True)
            return NOT_DONE
        print(f"{name} ...", flush=True)
        kept[name] = _piece(plan, name)
        ran += 1
        plan.results.parent.mkdir(parents=True, exist_ok=True)
        content = {**identity, "checks": kept}
        write_atomically(plan.results, (json.dumps(content, indent=2) + "\n").encode())
        problem = kept[name].get("problem", "")
        print(f"{name}: {kept[name]['status']} in {kept[name]['seconds']} s{problem and f': {problem}'}", flush=True)
    states = [kept[name]["status"] for name in plan.names]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (PASSED, FAILED, SKIPPED) if state in states)
    print(f"{counts}; figures: {plan.results}")
    return SOME_FAILED if FAILED in states else ALL_PASSED


def _piece(plan: Plan, name: str) -> dict[str, Any]:
    began_s = time.monotonic()
    reason = why_not(name, plan.device, plan.vllm_python)
    done = {"status": SKIPPED, "problem": reason} if reason else _call(plan, name)
    return {**done, "seconds": round(time.monotonic() - began_s, 1)}


def _call(plan: Plan, name: str) -> dict[str, Any]:
    """Run a piece in a process of its own, with all that it starts in its group."""
    command = [sys.executable, "-m", "tools.gpu_checks", name, plan.device, "--vllm-python", plan.vllm_python]
    command += [] if plan.speed else ["--no-speed"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LIMITS_S[name])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"status": FAILED, "problem": f"it took more than {LIMITS_S[name]:.0f} s"}
    try:
        said: dict[str, Any] = json.loads((output.strip().splitlines() or [""])[-1])
    except ValueError:
        said = {"problem": f"it ended with exit code {process.returncode} and no result; see what it printed above"}
    return {"status": FAILED if "problem" in said else PASSED, **said}


def why_not(name: str, device: str, vllm_python: str) -> str:
    """Return why a piece cannot run here; empty when it can."""
    if name == "trainer":
        return ""
    try:
        found: Survey = survey(vllm_python if name == "vllm" else sys.executable)
    except BackendFailed as e:
        return str(e)
    installed = found[name]
    if installed.missing:
        return f"{' and '.join(installed.missing)} not installed in {vllm_python if name == 'vllm' else sys.executable}"
    if name == "vllm" and device == "cuda" and installed.for_cpus_only:
        return f"{vllm_python} has a build for CPUs; name the interpreter of another one with --vllm-python"
    return ""


def why_no_device() -> tuple[int, str]:
    """Return 0 when torch sees a CUDA device; else an exit code and what is in the way."""
    import torch

    if torch.cuda.is_available():
        return 0, ""
    gpus = probe().gpus
    if not gpus:
        return NO_DEVICE, "no CUDA device on this machine: nothing checked"
    build = f"nvidia-smi shows {gpus[0].name}, but torch {torch.__version__} cannot use it"
    return NOT_SET_UP, f"{build}; delete torch's line in constraints.txt and run: make clean install"


def _identity(device: str) -> dict[str, Any]:
    """Return what makes earlier results count for nothing when it changes."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "commit": _git("rev-parse", "HEAD") + _changes()}


def _changes() -> str:
    return "+changes" if _git("status", "--porcelain", "-uno") else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _read(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = all(content.get(key) == value for key, value in identity.items())
    return content.get("checks", {}) if same else {}


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(LIMITS_S), choices=LIMITS_S, help="pieces")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--budget-s", type=float, default=1200.0, help="begin none that could end later; one at least")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON", str(python_in())))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the same checks, without a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-speed", action="store_true", help="leave out the model of 135 M parameters")
    given = parser.parse_args()
    if given.device == "cuda":
        code, problem = why_no_device()
        if code:
            print(f"check-gpu: {problem}", file=sys.stderr)
            return code
    if given.again:
        given.results.unlink(missing_ok=True)
    plan = Plan(
        device=given.device,
        names=tuple(given.only),
        vllm_python=given.vllm_python,
        results=given.results,
        budget_s=given.budget_s,
        speed=not given.no_speed,
    )
    return run(plan)


if __name__ == "__main__":
    sys.exit(main())
