"""The environment of libtorrent and shardcast: one of its own, below .venv-distribution/, made on first use."""

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks._report import ROOT

FOLDER = ROOT / ".venv-distribution"
PACKAGES = ("libtorrent==2.1.1", "shardcast==0.3.2", "blake3==1.0.11")


def others_python() -> Path:
    """Return the interpreter of the environment, making it if it is missing or was made from other packages.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; their own message stands above.

    """
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / ".installed"
    wanted = hashlib.sha256("\n".join(PACKAGES).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"Installing {', '.join(PACKAGES)} into {FOLDER} (once, 50 MB) ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python
