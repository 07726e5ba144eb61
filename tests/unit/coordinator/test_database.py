"""The file is ours, of a known form, and used by one coordinator."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from echo_coordinator.state import peer_rows, retention, rows
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.database import SCHEMA_VERSION, open_database
from echo_coordinator.state.groups import GroupState
from echo_coordinator.state.peer_rows import MAX_IDLE_PEERS
from echo_coordinator.state.roster import MAX_ENTRIES
from echo_coordinator.state.run_state import RunFacts, open_run
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.errors import LocalFault
from echo_swarm.identity import PeerId
from echo_swarm.work import Role


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


@pytest.mark.anyio
async def test_a_file_that_is_damaged_inside_is_refused_with_its_name(tmp_path: Path):
    path = tmp_path / "run.sqlite"
    open_database(path).close()
    content = bytearray(path.read_bytes())
    content[4096:] = bytes([0xFF]) * (len(content) - 4096)
    path.write_bytes(content)
    facts = RunFacts(run_id="ab" * 16, vocabulary_size=10, end_token_ids=(1,))
    with pytest.raises(LocalFault, match=r"run\.sqlite cannot be used"):
        async with open_run(path, WorkSettings(), facts):
            pass


@pytest.mark.anyio
async def test_of_the_peers_there_ever_were_only_as_many_are_remembered_as_the_roster_may_hold(tmp_path: Path):
    connection = open_database(tmp_path / "run.sqlite")
    connection.execute("PRAGMA synchronous = OFF")
    for number in range(MAX_ENTRIES + 10):
        peer_rows.write_peer(connection, f"peer {number}", Role.INFERENCE, None, float(number))
    connection.close()
    facts = RunFacts(run_id="ab" * 16, vocabulary_size=10, end_token_ids=(1,))
    async with open_run(tmp_path / "run.sqlite", WorkSettings(), facts) as state:
        nodes = state.core.roster.nodes()
        assert len(nodes) == MAX_ENTRIES and "peer 9" not in {node.peer for node in nodes}


@pytest.mark.anyio
async def test_peers_that_never_delivered_are_forgotten_oldest_first_and_the_sums_of_refusals_stay(tmp_path: Path):
    path = tmp_path / "run.sqlite"
    connection = open_database(path)
    connection.execute("PRAGMA synchronous = OFF")
    for number in range(MAX_IDLE_PEERS + 10):
        peer_rows.write_peer(connection, f"peer {number}", Role.INFERENCE, None, float(number))
    counted = [
        ("total", "accepted", 5),
        ("total", "malformed", 7),
        ("peer 0", "accepted", 5),
        ("peer 0", "malformed", 1),
    ]
    counted += [("peer 1", "malformed", 2), ("strangers", "malformed", 1), ("peer 4000", "malformed", 3)]
    rows.write_counters(connection, counted)
    connection.close()
    facts = RunFacts(run_id="ab" * 16, vocabulary_size=10, end_token_ids=(1,))
    async with open_run(path, WorkSettings(), facts) as state:
        await state.core.write_peer(PeerId("newest"), Role.SEEDER, None)
    for _ in range(2):
        async with open_run(path, WorkSettings(), facts) as state:
            await state.core.write_peer(PeerId("newest"), Role.SEEDER, None)
            assert (state.accepted(), state.rejected()) == (5, {"malformed": 7})
            assert state.rejected("strangers") == {"malformed": 3}
            assert state.rejected("peer 1") == {} and state.rejected("peer 4000") == {"malformed": 3}
            assert (state.accepted("peer 0"), state.rejected("peer 0")) == (5, {"malformed": 1})
    connection = open_database(path)
    kept = {peer for (peer,) in connection.execute("SELECT peer FROM peers")}
    scopes = {scope for (scope,) in connection.execute("SELECT DISTINCT scope FROM counters")}
    connection.close()
    assert len(kept) == MAX_IDLE_PEERS + 1 and {"peer 0", "newest", "peer 4000"} <= kept
    assert "peer 1" not in kept and "peer 1" not in scopes


def test_what_is_left_of_groups_long_trained_takes_the_room_of_a_line(tmp_path: Path):
    with closing(open_database(tmp_path / "run.sqlite", durable=False)) as db:

        def pages() -> int:
            used, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
            return used - free

        taken: list[int] = []
        for update in range(1, 401):
            prompts = [Prompt(index=4 * update + place, prompt_ids=bytes(1000)) for place in range(4)]
            groups = [rows.new_group(prompt.index, prompt, 8, None) for prompt in prompts]
            rows.insert_groups(db, groups)
            for group in groups:
                group.state = GroupState.CONSUMED
            rows.update_groups(db, groups, update)
            retention.prune(db, update - 8)
            taken.append(pages())
        settled = db.execute("SELECT count(*) FROM groups WHERE state = 'consumed' AND update_no > 0").fetchone()[0]
        assert settled == 1600
        assert (taken[-1] - taken[99]) * 4096 / 1200 < 100
        kept = db.execute("SELECT prompt_index, update_no, slots, prompt_ids FROM groups WHERE group_id = 8").fetchone()
        assert kept == (8, 2, b"", b"")
