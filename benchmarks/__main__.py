"""All benchmarks, one after the other: `python -m benchmarks`. About half an hour on two quiet cores."""

import subprocess
import sys

NAMES = ("backend_throughput", "intake", "async_utilisation", "compare_trl")


def main() -> int:
    """Run each in a process of its own; go on after a failure and report it at the end."""
    failed: list[str] = []
    for name in NAMES:
        print(f"== benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
