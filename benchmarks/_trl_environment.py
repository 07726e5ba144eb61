"""The environment that TRL runs in: one of its own, below .venv-trl/, made on first use and never mixed with ours.

torch, transformers, reasoning-gym and whatever else both sides use come at this project's pinned versions.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks._report import ROOT

FOLDER = ROOT / ".venv-trl"
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = (
    "torch==2.13.0",
    "transformers==5.24.0",
    "trl==1.16.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "reasoning-gym",
    "pydantic",
    "jinja2",
)
"""What has no version here is pinned by CONSTRAINTS."""


def trl_python() -> Path:
    """Return the interpreter of the environment, making it if it is missing or was made from other packages.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; their own message stands above.

    """
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / ".installed"
    wanted = hashlib.sha256("\n".join(PACKAGES).encode() + CONSTRAINTS.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"Installing TRL into {FOLDER} (once, one to three minutes, about 1.5 GB) ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(CONSTRAINTS), *PACKAGES], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python
