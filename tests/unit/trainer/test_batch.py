"""The batch file."""

import os
import signal

import pytest

from echo_coordinator.trainer import batch as batches
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.errors import MalformedMessage


def test_a_batch_survives_its_file(tmp_path, batch, member):
    written = batch([member(1.0), member(None, trained=False)], [member(0.5)], data_position={"epoch": 2, "index": 7})
    batches.write(written, tmp_path / "batch")
    assert batches.read(tmp_path / "batch") == written
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_what_a_killed_write_left_behind_is_written_over_by_the_next(tmp_path, batch, member):
    child = os.fork()
    if not child:
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        batches.write(batch([member(0.0)]), tmp_path / "batch")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    batches.write(batch([member(1.0)]), tmp_path / "batch")
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_missing_or_cut_off_file_is_named(tmp_path, batch, member):
    path = tmp_path / "batch"
    with pytest.raises(MalformedMessage, match="cannot read batch"):
        batches.read(path)
    batches.write(batch([member(1.0)]), path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(MalformedMessage):
        batches.read(path)
    path.write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(MalformedMessage, match="no batch of this version"):
        batches.read(path)


def test_a_data_position_that_no_checkpoint_can_hold_is_refused_before_training(batch):
    with pytest.raises(MalformedMessage, match="data_position"):
        batches.check(batch(data_position={"seen": b"\x00"}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logprobs": pack_f32([-1.0])}, "4 ids and 1 log-probabilities"),
        ({"logprobs": pack_f32([-1.0, float("nan"), -1.0, -1.0])}, "NaN"),
        ({"token_ids": b"", "logprobs": b""}, "completion of 0 bytes"),
        ({"prompt_ids": b""}, "prompt of 0 bytes"),
        ({"reward": float("inf")}, "reward inf"),
        ({"newest_version": 1}, "versions 0 to 1"),
        ({"finish_reason": "eos"}, "finish reason"),
        ({"token_ids": pack_u32([1]) + b"\x00", "logprobs": b"12345"}, "completion of 5 bytes"),
    ],
)
def test_an_impossible_member_is_refused_by_group_and_index(batch, member, values, words):
    with pytest.raises(MalformedMessage, match=words) as caught:
        batches.check(batch([member(0.0), member(**{"reward": 1.0, **values})]))
    assert "group 100, member 1" in str(caught.value)
