"""Each rule of a completion, on its own."""

from typing import Any

import pytest

from echo_coordinator.state.fault_quota import FAULTS
from echo_coordinator.state.intake_rules import Demand, judge, work_digest
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.trajectory import BehaviourPolicy, FinishReason, Reason, Trajectory

ARTIFACT = {5: frozenset({b"a" * 32, b"g" * 32}), 4: frozenset({b"b" * 32})}


def demand(**changes: Any) -> Demand:
    fields: dict[str, Any] = dict(
        trains=True,
        trained_version=5,
        published_version=5,
        artifacts=ARTIFACT,
        max_staleness=1,
        min_version=4,
        max_version=None,
        temperature=1.0,
        max_tokens=4,
        prompt_digest=b"p" * 32,
        vocabulary_size=200_018,
        end_token_ids=(2, 3),
    )
    return Demand(**{**fields, **changes})


def trajectory(**changes: Any) -> Trajectory:
    policy: dict[str, Any] = dict(
        oldest_version=5,
        newest_version=5,
        artifact_digest=b"a" * 32,
        backend="torch",
        build="2",
        precision="float32",
    )
    policy.update({key: changes.pop(key) for key in list(changes) if key in policy})
    fields: dict[str, Any] = dict(
        lease_id=b"l" * 16,
        group_id=1,
        member=0,
        prompt_digest=b"p" * 32,
        policy=BehaviourPolicy(**policy),
        temperature=1.0,
        seed=7,
        finish_reason=FinishReason.STOP,
        token_ids=pack_u32([10, 11, 2]),
        logprobs=pack_f32([-0.5, -3.0, 0.0]),
    )
    return Trajectory(**{**fields, **changes})


GREEDY = demand(temperature=0.0, trains=False, min_version=5, max_version=5)
LENGTH = FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({}, demand(), Reason.ACCEPTED),
        ({"oldest_version": 4}, demand(), Reason.ACCEPTED),
        ({"artifact_digest": b"g" * 32}, demand(), Reason.ACCEPTED),
        ({"newest_version": 6}, demand(), Reason.FUTURE_VERSION),
        ({"oldest_version": 5, "newest_version": 4, "artifact_digest": b"b" * 32}, demand(), Reason.UNKNOWN_POLICY),
        ({"artifact_digest": b"b" * 32}, demand(), Reason.UNKNOWN_POLICY),
        ({"artifact_digest": b"x" * 32}, demand(), Reason.UNKNOWN_POLICY),
        ({"oldest_version": 3}, demand(), Reason.STALE),
        ({"oldest_version": 4}, demand(trained_version=6), Reason.STALE),
        ({"oldest_version": 4}, demand(min_version=5), Reason.WRONG_SAMPLING),
        ({}, demand(min_version=4, max_version=4), Reason.WRONG_SAMPLING),
        ({"temperature": 0.7}, demand(), Reason.WRONG_SAMPLING),
        ({"seed": 8}, demand(), Reason.WRONG_SAMPLING),
        ({"prompt_digest": b"q" * 32}, demand(), Reason.WRONG_PROMPT),
        ({"token_ids": b"", "logprobs": b""}, demand(), Reason.BAD_LENGTH),
        ({"token_ids": b"\0" * 5, "logprobs": b"\0" * 5}, demand(), Reason.BAD_LENGTH),
        ({"logprobs": pack_f32([-1.0])}, demand(), Reason.BAD_LENGTH),
        ({"token_ids": pack_u32([9] * 4 + [2]), "logprobs": pack_f32([-1.0] * 5)}, demand(), Reason.BAD_LENGTH),
        ({"token_ids": pack_u32([200_017, 1, 2])}, demand(), Reason.ACCEPTED),
        ({"token_ids": pack_u32([200_018, 1, 2])}, demand(), Reason.OUT_OF_VOCABULARY),
        ({"token_ids": pack_u32([200_476, 1, 2])}, demand(), Reason.OUT_OF_VOCABULARY),
        ({"token_ids": b"\xff" * 4 + pack_u32([1, 2])}, demand(), Reason.OUT_OF_VOCABULARY),
        ({"logprobs": pack_f32([-1.0, float("nan"), -1.0])}, demand(), Reason.BAD_LOGPROB),
        ({"logprobs": pack_f32([-1.0, float("inf"), -1.0])}, demand(), Reason.BAD_LOGPROB),
        ({"logprobs": pack_f32([-1.0, float("-inf"), -1.0])}, demand(), Reason.BAD_LOGPROB),
        ({"logprobs": pack_f32([-1.0, 0.01, -1.0])}, demand(), Reason.BAD_LOGPROB),
        ({"logprobs": pack_f32([-1.0, 1e-6, -1.0])}, demand(), Reason.ACCEPTED),
        ({"token_ids": pack_u32([10, 2, 11])}, demand(), Reason.BAD_FINISH),
        ({"token_ids": pack_u32([10, 2, 2])}, demand(), Reason.BAD_FINISH),
        ({"finish_reason": LENGTH}, demand(), Reason.BAD_FINISH),
        ({"finish_reason": LENGTH, "token_ids": pack_u32([10, 11, 12])}, demand(), Reason.BAD_FINISH),
        ({"finish_reason": LENGTH, "token_ids": pack_u32([10, 11, 12])}, demand(max_tokens=3), Reason.ACCEPTED),
        ({"temperature": 0.0, "logprobs": pack_f32([0.0] * 3)}, GREEDY, Reason.ACCEPTED),
        ({"temperature": 0.0}, GREEDY, Reason.BAD_LOGPROB),
        (
            {"temperature": 0.0, "logprobs": pack_f32([0.0] * 3)},
            demand(temperature=0.0, trains=False, min_version=5, max_version=5, trained_version=99),
            Reason.ACCEPTED,
        ),
    ],
)
def test_the_first_broken_rule_is_the_reason(changes: dict[str, Any], asked: Demand, reason: Reason):
    assert judge(trajectory(**changes), asked, seed=7).reason is reason


MANY = {version: frozenset({b"a" * 32}) for version in range(100) if version != 90}


@pytest.mark.parametrize(
    ("oldest", "newest", "reason"),
    [
        (92, 99, Reason.ACCEPTED),
        (91, 99, Reason.UNKNOWN_POLICY),
        (0, 99, Reason.UNKNOWN_POLICY),
        (84, 91, Reason.UNKNOWN_POLICY),
        (90, 91, Reason.UNKNOWN_POLICY),
        (91, 92, Reason.ACCEPTED),
    ],
)
def test_what_names_more_versions_than_an_audit_recomputes_or_one_that_never_was_is_refused(
    oldest: int, newest: int, reason: Reason
):
    asked = demand(artifacts=MANY, trained_version=99, published_version=99, max_staleness=99, min_version=0)
    assert judge(trajectory(oldest_version=oldest, newest_version=newest), asked, seed=7).reason is reason
    assert reason is Reason.ACCEPTED or reason in FAULTS


def test_the_digest_of_a_completion_changes_with_all_that_matters_and_nothing_else():
    base = work_digest(trajectory())
    assert work_digest(trajectory(lease_id=b"m" * 16)) == base
    for changes in ({"seed": 8}, {"token_ids": pack_u32([10, 12, 2])}, {"backend": "vllm"}, {"oldest_version": 4}):
        assert work_digest(trajectory(**changes)) != base
