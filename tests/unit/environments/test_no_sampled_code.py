"""Field case 87: nothing that was sampled is ever run here. Who wants rewards that run code installs a plug-in."""

import ast
from pathlib import Path

import pytest

import echo_coordinator

ROOT = Path(echo_coordinator.__file__).parent
FILES = [*sorted((ROOT / "environments").glob("*.py")), *sorted((ROOT / "scoring").glob("*.py"))]
RUNS = {"exec", "eval", "compile", "system", "popen", "spawn", "Popen", "execv", "execve", "fork", "run_path"}
LIBRARIES = {"subprocess", "multiprocessing", "runpy", "code", "pty", "ctypes", "pickle"}


def test_the_files_are_found() -> None:
    assert {path.name for path in FILES} >= {"math_answers.py", "reasoning_gym.py", "jsonl.py", "worker.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_environment_and_no_scorer_runs_code(path: Path) -> None:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # `re.compile` makes a pattern.
            ours = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "re"
            found |= {name} & RUNS if not ours else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & LIBRARIES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & LIBRARIES
    assert not found
