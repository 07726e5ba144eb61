"""Fail when a file or a function of the product grows past what a reader can hold.

Limits: 350 lines a file, 60 lines a function (CONTRIBUTING.md says why). Run: python tools/check_size.py
"""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
ROOTS = ("echo_swarm", "node", "coordinator", "benchmarks", "tools")


def complaints(path: Path) -> list[str]:
    """Return what is too long in one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    found = [f"{path}: {lines} lines, limit {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, limit {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    """Check every Python file below ROOTS."""
    root = Path(__file__).resolve().parent.parent
    paths = sorted(p.relative_to(root) for name in ROOTS for p in (root / name).rglob("*.py"))
    found = [line for path in paths for line in complaints(root / path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
