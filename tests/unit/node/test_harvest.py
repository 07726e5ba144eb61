"""How finished trajectories become submissions."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from echo_node.backends.base import Completion
from echo_node.harvest import MAX_PER_SUBMISSION, Harvest, batches
from echo_node.outbox import Outbox
from echo_swarm.codec import pack_u32, unpack_f32, unpack_u32
from echo_swarm.envelope import unseal
from echo_swarm.errors import StorageFull
from echo_swarm.identity import Identity
from echo_swarm.trajectory import SUBMISSION_LIMITS, FinishReason, Submission, prompt_digest
from echo_swarm.work import BackendReport, Lease, LeaseMember, Sampling

REPORT = BackendReport(backend="scripted", build="test 1", precision="float32", device="none", batch=4)
RUN = "a" * 32


def lease(*, pinned: int | None = None) -> Lease:
    return Lease(
        lease_id=b"L" * 16,
        group_id=9,
        prompt_ids=pack_u32([5, 6]),
        members=(LeaseMember(member=0, seed=77),),
        sampling=Sampling(temperature=0.5, max_tokens=8),
        min_version=0,
        max_version=pinned,
        expires_in_s=10,
    )


def completion(version: int, *, length: int = 3) -> Completion:
    return Completion(
        request_id=0,
        token_ids=array("I", range(length)),
        logprobs=array("f", [-0.5] * length),
        finish_reason=FinishReason.LENGTH,
        oldest_version=version,
        newest_version=version,
        artifact_digest=bytes(32),
    )


def harvest_into(outbox: Outbox) -> Harvest:
    return Harvest(identity=Identity.generate(), run_id=RUN, outbox=outbox, stored=lambda: None)


@pytest.mark.anyio
async def test_a_trajectory_names_lease_policy_sampling_and_carries_packed_arrays(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    harvest = harvest_into(outbox)
    harvest.add(lease(), LeaseMember(member=0, seed=77), completion(4), REPORT)
    await harvest.flush()
    entry = outbox.oldest()
    assert entry is not None and (entry.oldest_version, entry.tokens, len(harvest)) == (4, 3, 0)
    (trajectory,) = unseal(entry.envelope, Submission, SUBMISSION_LIMITS).message.trajectories
    assert trajectory.prompt_digest == prompt_digest(pack_u32([5, 6]))
    assert (trajectory.seed, trajectory.temperature, trajectory.policy.build) == (77, 0.5, "test 1")
    assert list(unpack_u32(trajectory.token_ids)) == [0, 1, 2]
    assert list(unpack_f32(trajectory.logprobs)) == [-0.5] * 3
    outbox.close()


def test_submissions_hold_one_version_and_a_bounded_number(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    harvest = harvest_into(outbox)
    for version in [1] * (MAX_PER_SUBMISSION + 1) + [2]:
        harvest.add(lease(), LeaseMember(member=0, seed=1), completion(version), REPORT)
    harvest.add(lease(pinned=1), LeaseMember(member=0, seed=1), completion(1), REPORT)
    made = [(version, len(batch)) for version, batch in batches(harvest._ripe)]
    assert made == [(1, MAX_PER_SUBMISSION), (1, 1), (2, 1), (None, 1)]


def test_the_longest_completions_of_the_protocol_fit_into_submissions(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    harvest = harvest_into(outbox)
    for _ in range(6):
        harvest.add(lease(), LeaseMember(member=0, seed=1), completion(1, length=1 << 17), REPORT)
    harvest._store(harvest._ripe)
    while (entry := outbox.oldest()) is not None:
        assert unseal(entry.envelope, Submission, SUBMISSION_LIMITS).message.trajectories
        outbox.settle(entry.id, {})


class NarrowOutbox(Outbox):
    """An outbox on a disk that has room for so many more submissions."""

    room = 1

    def put(self, envelope: bytes, **facts: Any) -> bool:
        if not self.room:
            raise StorageFull("the outbox cannot be written; free some disk space")
        self.room -= 1
        return super().put(envelope, **facts)


@pytest.mark.anyio
async def test_what_a_full_disk_does_not_take_is_kept_and_stored_once_there_is_room(tmp_path: Path):
    outbox = NarrowOutbox(tmp_path / "outbox.sqlite")
    harvest = harvest_into(outbox)
    for version in (4, 4, 5):
        harvest.add(lease(), LeaseMember(member=len(harvest), seed=77), completion(version), REPORT)
    with pytest.raises(StorageFull):
        await harvest.flush()
    assert (outbox.pending(), harvest.unstored) == (2, 1)
    reasons: list[str] = []

    def told(reason: str) -> None:
        reasons.append(reason)
        outbox.room = 8

    harvest.add(lease(), LeaseMember(member=3, seed=77), completion(5), REPORT)
    await harvest.flush_patiently(told)
    assert reasons == ["the outbox cannot be written; free some disk space"]
    assert (outbox.pending(), harvest.unstored) == (4, 0)
    outbox.close()
