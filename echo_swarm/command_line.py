"""How a command line ends: one line on stderr and an exit code by cause; with `--json`, that line is one JSON object.

    {"error": "UsageError", "message": "…", "exit_code": 2}

`error` is a name of docs/exit-codes.md. What stands on stdout is not changed by it. Imports nothing heavy.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from echo_swarm import __version__, errors
from echo_swarm.errors import EchoError, UsageError

INTERRUPTED = 130
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""For a typer app's `context_settings`; its commands inherit it."""


def print_version(wanted: bool) -> None:
    """Print this release and end, when `wanted`."""
    if wanted:
        print(f"echo-swarm {__version__}")
        raise SystemExit(0)


def run_command_line(app: Callable[..., Any], program: str) -> None:
    """Run a typer app as the process' whole work.

    Raises:
        SystemExit: always, except after a fault of our own that nobody foresaw.

    """
    as_json = "--json" in sys.argv[1:]
    try:
        # Standing alone, typer draws what it refuses in a box; a program could not read that.
        code = app(standalone_mode=False) if as_json else app()
    except EchoError as e:
        print(error_line(program, e, as_json=as_json), file=sys.stderr)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as e:
        format_message = getattr(e, "format_message", None)
        if format_message is None:
            raise
        # What typer itself refuses: an unknown flag, a missing argument.
        print(error_line(program, UsageError(format_message()), as_json=True), file=sys.stderr)
        sys.exit(UsageError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def error_line(program: str, error: EchoError, *, as_json: bool) -> str:
    """Return what is said of an error, for people or for programs, in one line."""
    message = f"{error}; {error.advice}" if error.advice else str(error)
    if not as_json:
        return f"{program}: {message}"
    return json.dumps({"error": error_name(error), "message": message, "exit_code": error.exit_code})


def error_name(error: EchoError) -> str:
    """Return the documented name of an error: that of its nearest class in `echo_swarm.errors`."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
