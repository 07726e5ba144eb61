"""Each start of a coordinator is a new epoch, and a higher one ends it."""

from pathlib import Path

import anyio
import pytest

from echo_coordinator.epochs import Fence, Noted, note, place_of, read_noted, take_epoch
from echo_coordinator.run_folder import RunFolder
from echo_swarm.clock import ManualClock
from echo_swarm.directory.base import head_topic
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.epoch import Epoch
from echo_swarm.errors import LocalFault, TakenOver, Untrusted
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord
from tests.support.small_disks import fill, small_disk

RUN = "ab" * 16
KEY = Identity.from_seed(bytes(32))

pytestmark = pytest.mark.anyio


def begin(root: Path, *, take_over: bool = False) -> Fence:
    root.mkdir(exist_ok=True)
    return take_epoch(RunFolder(root), RUN, KEY, None, ManualClock(), addresses=("/x",), take_over=take_over)


def epoch(number: int, signer: Identity = KEY) -> bytes:
    fields = Epoch(run_id=RUN, number=number, nonce=bytes(16), started_at=0.0, base_version=None, base_digest=None)
    return seal(signer, fields)


def test_each_start_is_higher_than_the_one_before_and_noted_before_it_returns(tmp_path: Path) -> None:
    ranks = []
    for number in (1, 2, 3):
        fence = begin(tmp_path / "run")
        assert fence.own.message.number == number
        folder = RunFolder(tmp_path / "run")
        assert read_noted(folder) == Noted(own=fence.raw, addresses=("/x",), place=place_of(folder))
        ranks.append(fence.own.message.rank)
    assert ranks == sorted(ranks)


def test_two_copies_of_a_folder_begin_different_epochs_of_one_number(tmp_path: Path) -> None:
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other")
    assert one.own.message.number == other.own.message.number
    first, second = sorted((one, other), key=lambda fence: fence.own.message.rank)
    first.hear(second.raw)
    second.hear(first.raw)
    assert (first.is_lost, second.is_lost) == (True, False)
    second.require()
    with pytest.raises(TakenOver, match=r"taken over, since .* \(epoch 1, before version 0"):
        first.require()


def test_a_folder_that_was_replaced_begins_again_only_when_told_to_and_above_the_other(tmp_path: Path) -> None:
    begin(tmp_path / "run").hear(epoch(7))
    with pytest.raises(TakenOver, match="--take-over"):
        begin(tmp_path / "run")
    again = begin(tmp_path / "run", take_over=True)
    assert again.own.message.number == 8
    assert begin(tmp_path / "run").own.message.number == 9


def test_what_no_other_coordinator_signed_ends_nothing(tmp_path: Path) -> None:
    fence = begin(tmp_path / "run")
    with pytest.raises(Untrusted):
        fence.hear(epoch(7, Identity.generate()))
    fence.hear(fence.raw)
    fence.hear(None)
    fence.require()
    assert begin(tmp_path / "run").own.message.number == 2


async def test_a_coordinator_that_cannot_note_its_end_ends_all_the_same_and_says_that_its_folder_forgets(
    tmp_path: Path,
):
    with small_disk(tmp_path / "disk", 1) as disk:
        fence = begin(disk / "run")
        ballast = fill(disk)
        fence.hear(epoch(7))
        assert fence.is_lost
        with pytest.raises(TakenOver, match=r"epoch 7.* folder will not remember it \(.*do not start it again"):
            fence.require()
        ballast.unlink()
        with anyio.fail_after(60), pytest.raises(TakenOver) as caught:
            await fence.watch(MemoryDirectory(DirectoryStore(), KEY, ManualClock()))
        assert "will not remember" not in str(caught.value)
        with pytest.raises(TakenOver):
            begin(disk / "run")


def test_a_damaged_note_is_named_and_not_taken_for_none(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    for damaged in (b"", b"{}", b"[]", b'{"own": "zz", "other": null, "addresses": []}'):
        folder.epoch.write_bytes(damaged)
        with pytest.raises(LocalFault, match=r"epoch\.json is damaged"):
            begin(tmp_path / "run")


def test_the_note_of_another_key_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    stranger = epoch(9, Identity.generate())
    note(RunFolder(tmp_path / "run"), Noted(own=stranger, other=None))
    assert begin(tmp_path / "run").own.message.number == 1


@pytest.mark.parametrize("forged", [True, False])
async def test_a_higher_epoch_in_the_directory_ends_the_watch(tmp_path: Path, forged: bool) -> None:
    fence, clock, store = begin(tmp_path / "run"), ManualClock(), DirectoryStore()
    signer = Identity.generate() if forged else KEY
    record = HeadRecord(run_id=RUN, policy_version=1, manifest_digest=bytes(32), issued_at=0.0, epoch=epoch(5, signer))
    await MemoryDirectory(store, signer, clock).announce(head_topic(RUN), seal(signer, record), ttl_s=60)
    directory = MemoryDirectory(store, KEY, clock)
    if forged:
        fence.hear_records(await directory.find(head_topic(RUN)))
        fence.require()
        return
    with anyio.fail_after(60), pytest.raises(TakenOver, match="epoch 5"):
        await fence.watch(directory)
