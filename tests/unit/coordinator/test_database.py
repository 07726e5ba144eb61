"""The file is ours, of a known form, and used by one coordinator."""

import sqlite3
from pathlib import Path

import pytest

from echo_coordinator.state.database import SCHEMA_VERSION, open_database
from echo_swarm.errors import LocalFault


def test_a_file_of_a_newer_program_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "run.sqlite"
    connection = open_database(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(LocalFault, match="newer version of this program"):
        open_database(path)


def test_a_database_of_another_program_is_refused(tmp_path: Path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(LocalFault, match="another program"):
        open_database(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    path = tmp_path / "run.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LocalFault, match="cannot be used"):
        open_database(path)


def test_commits_are_on_disk_when_they_return(tmp_path: Path):
    connection = open_database(tmp_path / "run.sqlite")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()


def test_a_second_coordinator_of_the_same_run_is_refused(tmp_path: Path):
    path = tmp_path / "run.sqlite"
    first = open_database(path)
    with pytest.raises(LocalFault, match="in use by another process"):
        open_database(path, busy_timeout_s=0)
    first.close()
    open_database(path).close()
