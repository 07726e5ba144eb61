"""How a coordinator ended is kept for `status`, whatever way it ended."""

import json
from pathlib import Path

import pytest

from echo_coordinator.ending import ending_noted, how_it_ended
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import BackendFailed, SettingsError


def test_an_error_is_kept_with_its_code_until_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert how_it_ended(folder) == ""
    with pytest.raises(BackendFailed), ending_noted(folder):
        raise BackendFailed("the trainer ended with signal 9")
    assert how_it_ended(folder) == "it ended 0 s ago with exit code 6, BackendFailed: the trainer ended with signal 9"
    with ending_noted(folder):
        assert how_it_ended(folder) == "", "it runs"
    assert how_it_ended(folder) == "it ended in good order 0 s ago"


def test_a_fault_of_the_program_is_kept_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ending_noted(RunFolder(tmp_path)):
        _ = 1 / 0
    assert "ZeroDivisionError: division by zero" in how_it_ended(RunFolder(tmp_path))


def test_a_run_that_was_killed_is_told_from_one_that_never_ran(tmp_path: Path) -> None:
    (tmp_path / "last_status.json").write_text("{}")
    assert "killed" in how_it_ended(RunFolder(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{}", "7", "[" * 50_000, '{"at": [], "error": 1}'])
def test_a_damaged_note_is_no_note(tmp_path: Path, content: str) -> None:
    (tmp_path / "last_end.json").write_text(content)
    assert how_it_ended(RunFolder(tmp_path)) == ""


def test_what_is_kept_is_bounded_and_shown_as_plain_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsError), ending_noted(RunFolder(tmp_path)):
        raise SettingsError("\x1b[2J" + "x" * 1_000_000)
    assert len(json.loads((tmp_path / "last_end.json").read_text())["message"]) == 2_000
    assert "\x1b" not in how_it_ended(RunFolder(tmp_path))
