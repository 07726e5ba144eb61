"""What to type to get an optional part of this project."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, if this is one.

    A name alone would ask a package index, which may not have this project, or have another one under its name.
    """
    where = str(_ROOT) if (_ROOT / "pyproject.toml").is_file() else "echo-swarm"
    return f"pip install '{where}[{extra}]'"
