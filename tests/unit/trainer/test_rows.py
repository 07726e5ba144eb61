"""What enters the loss, and how it is cut up."""

import pytest

from echo_coordinator.trainer.advantage import Signal
from echo_coordinator.trainer.rows import micro_batches, minibatches, plan
from echo_coordinator.trainer.settings import ObjectiveSettings, OptimizerSettings


def test_an_aged_member_counts_in_the_baseline_and_in_no_loss_term(batch, member):
    group = [member(1.0, trained=False), member(0.0), member(0.0), member(0.0)]
    rows = plan(batch(group), ObjectiveSettings(normalise_std=False)).rows
    assert [row.advantage for row in rows] == [-0.25] * 3


def test_truncated_members_are_left_out_only_when_masked(batch, member):
    groups = batch([member(1.0, finish_reason="length"), member(0.0)])
    assert len(plan(groups, ObjectiveSettings()).rows) == 2
    assert [row.advantage for row in plan(groups, ObjectiveSettings(mask_truncated=True)).rows] == [-1.0]


def test_a_group_with_too_few_members_is_left_out_and_one_without_signal_stays(batch, member):
    planned = plan(batch([member(1.0), member(None)], [member(1.0), member(1.0)]), ObjectiveSettings())
    assert planned.signals == (Signal.TOO_FEW, Signal.NONE)
    assert [row.advantage for row in planned.rows] == [0.0, 0.0]


def test_advantages_never_mix_prompts(batch, member):
    planned = plan(batch([member(1.0), member(0.0)], [member(9.0), member(5.0)]), ObjectiveSettings())
    assert [row.advantage for row in planned.rows] == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("limits", "sizes"), [({"micro_batch_size": 2}, [2, 2, 1]), ({"micro_batch_tokens": 20}, [1, 2, 2])]
)
def test_micro_batches_keep_both_limits_and_a_long_row_goes_alone(batch, member, limits, sizes):
    group = [member(float(index == 0), length=length) for index, length in enumerate((2, 30, 5, 6, 3))]
    rows = plan(batch(group), ObjectiveSettings()).rows
    pieces = micro_batches(rows, OptimizerSettings.model_validate(limits))
    assert [len(piece) for piece in pieces] == sizes
    assert [row.length for piece in pieces for row in piece] == [30, 6, 5, 3, 2]


def test_ranks_share_all_rows_between_them_even_when_there_are_too_few(batch, member):
    rows = plan(batch([member(1.0), member(0.0), member(0.0)]), ObjectiveSettings()).rows
    shares = [micro_batches(rows, OptimizerSettings(), rank=rank, world=4) for rank in range(4)]
    assert sorted(row.index for share in shares for piece in share for row in piece) == [0, 1, 2]
    assert shares[3] == []


def test_the_order_of_minibatches_follows_from_seed_update_and_epoch(batch, member):
    rows = plan(batch([member(1.0)] + [member(0.0)] * 7), ObjectiveSettings()).rows
    settings = OptimizerSettings(epochs=2, minibatches=3, seed=4)

    def order(update: int) -> list[list[int]]:
        return [[row.index for row in step] for step in minibatches(rows, settings, update=update)]

    assert order(1) == order(1) != order(2)
    assert len(order(1)) == 6
    for epoch in (order(1)[:3], order(1)[3:]):
        assert sorted(index for step in epoch for index in step) == list(range(8))
    assert len(minibatches(rows[:2], settings, update=1)) == 4
    assert minibatches([], settings, update=1) == []
