"""`peers`, `ban` and `pardon` on a run that is not running: its database is read and written under the run's lock."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from echo_coordinator.commands.peers import ban_peer, pardon_peer, peers_table, show_peers
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state import peer_rows, rows
from echo_coordinator.state.database import open_database
from echo_swarm.errors import Unavailable, UsageError
from echo_swarm.identity import Identity
from echo_swarm.peer_entry import PeerEntry
from echo_swarm.work import Role

ANN, BOB = (Identity.from_seed(name.ljust(32, b".")).peer_id for name in (b"ann", b"bob"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that two peers have worked for."""
    (tmp_path / "run.toml").touch()
    db = open_database(RunFolder(tmp_path).database)
    for peer in (ANN, BOB):
        peer_rows.write_peer(db, peer, Role.INFERENCE, None, 1000.0)
        rows.write_counters(db, [(peer, "accepted", 3), (peer, "late", 1)])
    db.close()
    return tmp_path


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, PeerEntry]:
    capsys.readouterr()
    show_peers(root, Console(), as_json=True)
    return {entry["peer_id"]: PeerEntry(**entry) for entry in json.loads(capsys.readouterr().out)}


def test_bans_and_pardons_of_a_stopped_run_are_kept(root: Path, capsys: pytest.CaptureFixture[str]):
    said = ban_peer(root, ANN[-6:], reason="spam", take_back=True)
    assert said == f"banned {ANN}; what it delivered and was not trained on is taken back at the next start"
    found = listed(root, capsys)
    assert (found[ANN].standing, found[ANN].detail, found[BOB].standing) == ("banned", "spam", "new")
    assert (found[ANN].accepted, found[ANN].rejected, found[ANN].limit) == (3, {"late": 1}, None)
    assert pardon_peer(root, ANN[-6:]) == f"pardoned {ANN}: its ban; it begins as a newcomer"
    assert "nothing was changed" in pardon_peer(root, ANN)
    assert listed(root, capsys)[ANN].standing == "new"


def test_names_that_fit_several_peers_or_none_change_nothing(root: Path, capsys: pytest.CaptureFixture[str]):
    for name, said in (
        ("12D3Koo", "may be any of 2 peers"),
        ("zzzzzz", "no peer of this run"),
        (ANN[-1], "too short"),
    ):
        with pytest.raises(UsageError, match=said):
            ban_peer(root, name, reason="", take_back=False)
    with pytest.raises(UsageError, match="at most 512"):
        ban_peer(root, ANN, reason="x" * 513, take_back=False)
    assert {entry.standing for entry in listed(root, capsys).values()} == {"new"}


def test_a_coordinator_that_is_just_starting_is_waited_for(root: Path):
    with RunFolder(root).locked(), pytest.raises(Unavailable, match="starting or ending"):
        ban_peer(root, ANN, reason="", take_back=False)


def test_what_peers_and_owners_write_is_shown_as_it_stands():
    entry = PeerEntry(peer_id=ANN, backend="[red]x", standing="banned", detail="\x1b[31mspam[/]", rejected={"late": 2})
    out = io.StringIO()
    Console(file=out, width=160).print(peers_table([entry]))
    assert "[red]x" in out.getvalue() and "spam[/]" in out.getvalue() and "\x1b" not in out.getvalue()
    assert "late 2" in out.getvalue() and "banned" in out.getvalue()
