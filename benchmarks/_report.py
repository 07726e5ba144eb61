"""What every benchmark says beside its figures: command, machine, commit. Written to benchmarks/results/NAME.json."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def write_report(name: str, figures: dict[str, Any], *, packages: tuple[str, ...] = (), folder: Path = RESULTS) -> Path:
    """Write and print `figures`, which must be plain JSON values with units in their names."""
    report = {
        "benchmark": name,
        "command": command(),
        "commit": commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "packages": {package: _version(package) for package in packages},
        "figures": figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))
    print(f"written to {path}", file=sys.stderr)
    return path


def command() -> str:
    """Return how this benchmark was started, from the repository's root."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(ROOT) and script.suffix == ".py"
    module = ".".join(script.relative_to(ROOT).with_suffix("").parts) if inside else script.name
    return " ".join(["python -m", module.removesuffix(".__main__"), *sys.argv[1:]])


def commit() -> str:
    """Return the commit, with `+changes` when tracked files differ from it."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+changes" if head != "unknown" and _git("status", "--porcelain", "-uno") else head


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, and how busy others keep it: a figure from a loaded machine says so."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min_at_end": round(psutil.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
