"""Where the key lives, and that it is live once."""

import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from echo_node.config import NodeConfig, default_state_dir
from echo_node.instance import claim_identity
from echo_swarm.errors import IdentityInUse, UsageError


def test_the_first_join_makes_a_private_key_and_says_to_back_it_up(tmp_path: Path):
    with claim_identity(tmp_path / "state") as first:
        assert first.is_new
        assert str(first.key_path) in first.backup_notice and "Back this file up" in first.backup_notice
        assert stat.S_IMODE(first.key_path.stat().st_mode) == 0o600
        peer_id = first.identity.peer_id
    with claim_identity(tmp_path / "state") as second:
        assert not second.is_new and second.identity.peer_id == peer_id


def test_a_key_restored_on_a_clean_machine_is_the_same_peer(tmp_path: Path):
    with claim_identity(tmp_path / "old") as old:
        peer_id = old.identity.peer_id
        backup = old.key_path.read_text()
    restored = tmp_path / "new" / "identity.key"
    restored.parent.mkdir()
    restored.touch(mode=0o600)
    restored.write_text(backup)
    with claim_identity(tmp_path / "new") as new:
        assert new.identity.peer_id == peer_id


def test_the_same_key_is_refused_while_another_process_holds_it(tmp_path: Path):
    with (
        claim_identity(tmp_path),
        pytest.raises(IdentityInUse, match="already runs") as raised,
        claim_identity(tmp_path),
    ):
        pass
    assert raised.value.exit_code == 9


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--state-dir"), claim_identity(tmp_path / "file" / "state"):
        pass


def test_the_state_folder_follows_the_platform():
    assert default_state_dir({"XDG_STATE_HOME": "/x"}, platform="linux") == Path("/x/echo-swarm")
    assert default_state_dir({}, platform="linux") == Path.home() / ".local" / "state" / "echo-swarm"
    assert default_state_dir({"LOCALAPPDATA": "/l"}, platform="win32") == Path("/l/echo-swarm")


def test_settings_out_of_range_are_refused(tmp_path: Path):
    with pytest.raises(ValidationError):
        NodeConfig(state_dir=tmp_path, batch=0)
    with pytest.raises(ValidationError):
        NodeConfig(state_dir=tmp_path, unknown=1)  # pyright: ignore[reportCallIssue]
