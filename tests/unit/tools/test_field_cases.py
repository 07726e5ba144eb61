"""The table of field cases names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "field-cases.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
GROUPS = {
    "b": {9, 10, 12, 14, 15},
    "c": {17, 18, 19, 20, 22, 23, 25},
    "d": {27, 28, 31, 32, 35, 36, 37, 38, 39, 40, 41, 43, 44, 45},
    "e": {47, 49, 50, 51, 52, 53, 54, 55},
    "f": {56, 57, 59, 61, 62, 63, 64},
    "g": {66, 67, 68, 69},
}


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_test_in_the_table_exists():
    found = NAMED.findall(TABLE.read_text())
    assert len(found) > 100
    for path, name in found:
        file = ROOT / "tests" / path
        assert file.is_file(), path
        assert re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_case_has_a_test_or_a_reason_and_stands_once():
    numbers = [int(row[0]) for row in rows()]
    assert numbers == sorted(set(numbers))
    for _, _, tests, note in rows():
        assert NAMED.search(tests) or note


def test_the_groups_that_must_be_whole_are():
    numbers = {int(row[0]) for row in rows()}
    for group, cases in GROUPS.items():
        assert cases <= numbers, group
