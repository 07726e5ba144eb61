"""The converting process: `python -m echo_coordinator.publisher.gguf.child WEIGHTS CONFIG FOLDER PRECISION...`.

For each precision one frame to the parent, in the order given: {precision, reason, seconds}; reason is empty when
FOLDER/PRECISION.gguf is written and passes the check that nodes make. One that fails does not stop the others.
"""

import sys
import time
from pathlib import Path

from echo_coordinator.publisher.gguf.write import write_gguf
from echo_swarm.checkpoint.gguf_file import check_gguf
from echo_swarm.children import claim_pipes, die_with_parent, write_frame
from echo_swarm.errors import EchoError


def main() -> None:
    """Convert and end."""
    die_with_parent()
    _, writer = claim_pipes()
    weights, config, folder = map(Path, sys.argv[1:4])
    for precision in sys.argv[4:]:
        started_s = time.monotonic()
        reason = _convert(weights, config, folder / f"{precision}.gguf", precision)
        write_frame(writer, {"precision": precision, "reason": reason, "seconds": time.monotonic() - started_s})


def _convert(weights: Path, config: Path, target: Path, precision: str) -> str:
    try:
        write_gguf(weights, config.read_text(encoding="utf-8"), target, precision)
        check_gguf(target)
    except EchoError as e:
        return str(e)
    except OSError as e:
        return f"{e.filename or target}: {e.strerror}"
    except MemoryError:
        return "not enough memory"
    return ""


if __name__ == "__main__":
    main()
