"""docs/threat-model.md lists each known attack with tests that exist, and says what is not defended."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")

ON_UPDATES = (
    "Arbitrary installation",
    "Endless data",
    "Extraneous dependencies",
    "Fast-forward",
    "Indefinite freeze",
    "Malicious mirrors preventing updates",
    "Mix-and-match",
    "Rollback",
    "Slow retrieval",
    "Vulnerability to key compromises",
    "Wrong software installation",
)
"""Of The Update Framework: 1.5.2 of its specification, and its page on security."""
CHEATS = (
    "Another model",
    "An older version under a newer name",
    "Several versions named",
    "Coarser precision than declared",
    "Greedy, or another temperature",
    "Made-up log-probabilities",
    "Copied completions",
    "Cherry-picked seeds",
    "Truncated answers called finished",
    "Replays",
    "Claimed rewards",
    "Sybils",
)


def entries(heading: str) -> dict[str, str]:
    """The entries of a section, by their names."""
    section = TEXT.split(f"\n### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    found = [entry.partition("**") for entry in section.split("\n- **")[1:]]
    return {name.rstrip("."): words for name, _, words in found}


@pytest.mark.parametrize(
    ("heading", "names"), [("On updates", ON_UPDATES), ("On what is trained on", CHEATS)], ids=["updates", "cheats"]
)
def test_each_attack_has_a_defence_tests_and_what_is_left(heading: str, names: tuple[str, ...]) -> None:
    told = entries(heading)
    for name in names:
        (words,) = [words for found, words in told.items() if found.startswith(name)]
        defence, _, rest = words.partition("Tests:")
        tests, _, left = rest.partition("Not defended:")
        assert defence.strip() and NAMED.search(tests) and left.strip(), name


def test_the_tests_that_are_named_exist() -> None:
    named = set(NAMED.findall(TEXT))
    assert len(named) > 50
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not (ROOT / path).is_file() or not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)
    ]
    assert not missing


def test_whatever_else_it_names_in_the_tests_exists() -> None:
    for path in set(re.findall(r"`(tests/[\w/]+\.py)`", TEXT)):
        assert (ROOT / path).is_file(), path
