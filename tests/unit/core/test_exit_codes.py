"""docs/exit-codes.md says what the code does."""

import re
from pathlib import Path

from echo_swarm import errors
from echo_swarm.command_line import error_name
from echo_swarm.errors import EchoError

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in DOCUMENT.splitlines() if line[:1] == "|"][2:]
DOCUMENTED = {name: int(row[0]) for row in ROWS for name in row[1].split(", ") if name}


def all_errors(base: type[EchoError] = EchoError) -> list[type[EchoError]]:
    return [base, *(found for child in base.__subclasses__() for found in all_errors(child))]


def test_every_error_ends_with_its_documented_code() -> None:
    for error in all_errors():
        if error.__module__ == errors.__name__:
            assert DOCUMENTED.get(error.__name__, 1) == error.exit_code, error


def test_an_error_without_a_row_is_named_below_the_table() -> None:
    below = DOCUMENT.rpartition("|\n")[2]
    for error in all_errors():
        if error.__module__ == errors.__name__ and error.__name__ not in DOCUMENTED:
            assert error.__name__ in below


def test_every_code_that_is_set_anywhere_is_documented() -> None:
    set_by: dict[int, str] = {}
    for folder in ("echo_swarm", "node", "coordinator"):
        for path in (ROOT / folder).rglob("*.py"):
            name = ""
            for line in path.read_text(encoding="utf-8").splitlines():
                if found := re.match(r"class (\w+)", line):
                    name = found[1]
                if found := re.fullmatch(r"    exit_code(?:: ClassVar\[int\])? = (\d+)", line):
                    set_by[int(found[1])] = name
    assert {code: DOCUMENTED[name] for code, name in set_by.items()} == {code: code for code in set_by}
    assert set(set_by) | {0, 130} == {int(row[0]) for row in ROWS}


def test_the_tree_in_the_module_has_every_error() -> None:
    assert errors.__doc__
    for error in all_errors():
        if error.__module__ == errors.__name__:
            drawn = re.search(rf"\b{error.__name__}\b *(\d+)?", errors.__doc__)
            assert drawn, error
            assert drawn[1] is None or int(drawn[1]) == error.exit_code


def test_errors_are_told_to_programs_under_their_documented_names() -> None:
    for error in all_errors():
        name = error_name(error.__new__(error))
        assert name in DOCUMENT
        assert getattr(errors, name).exit_code == error.exit_code
