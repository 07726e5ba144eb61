"""Run a module as a command line that ends with its starter: `python -m echo_swarm.under_parent MODULE ARGS`.

For programs that start whole peers as children (the demo, tests): a killed parent leaves nothing behind.
"""

import runpy
import sys

from echo_swarm.children import die_with_parent


def main() -> None:
    """Tie this process to its parent, then become `MODULE`."""
    die_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
