"""What an update reports."""

import json
import math

import pytest

from echo_coordinator.trainer.metrics import MAX_PEERS, Optimised, RowStats, report
from echo_coordinator.trainer.rows import plan
from echo_coordinator.trainer.settings import ObjectiveSettings


def of_ratio(ratio: float, tokens: int = 4, **values: float) -> RowStats:
    return RowStats(
        tokens=tokens,
        ratio_sum=tokens * ratio,
        ratio_min=ratio,
        ratio_max=ratio,
        log_ratio_sum=tokens * math.log(ratio),
        gap_sum=tokens * abs(math.log(ratio)),
        passes=tokens,
        **values,
    )


def done(*rows: RowStats, **values):
    return Optimised(**{"rows": rows, "gradient_norm": 1.0, "steps": 1, "skipped": None, **values})


def test_both_tails_show_by_peer_and_backend_and_staleness_is_apart(batch, member):
    low = {"peer_id": "quantised", "backend": "llama_cpp", "precision": "q4_0"}
    group = [member(1.0, version=3, **low), member(0.0, version=3), member(0.0, version=1)]
    given = batch(group, update=4)
    stats = (of_ratio(math.exp(-4)), of_ratio(math.e, clipped=3.0), of_ratio(1.5, capped=1.0))
    metrics = report(given, plan(given, ObjectiveSettings()), done(*stats), learning_rate=0.1, seconds=2.0)
    ratio = metrics["ratio"]
    assert ratio["fresh"]["min"] == pytest.approx(math.exp(-4))
    assert ratio["fresh"]["max"] == pytest.approx(math.e)
    assert ratio["fresh"]["clipped_share"] == pytest.approx(3 / 8)
    assert ratio["stale"]["min"] == ratio["stale"]["max"] == 1.5
    assert ratio["stale"]["capped_share"] == pytest.approx(0.25)
    assert ratio["by_peer"]["quantised"]["mean"] == pytest.approx(math.exp(-4))
    assert ratio["by_backend"]["llama_cpp/q4_0"]["mean_log"] == pytest.approx(-4)
    assert ratio["by_peer"]["peer-1"]["max"] == pytest.approx(math.e)
    assert metrics["logprob_gap"] == {"llama_cpp/q4_0": pytest.approx(4.0), "torch/float32": pytest.approx(1.0)}
    assert metrics["lag"] == {"0": 2, "2": 1}


def test_lengths_and_shares_are_of_what_arrived_not_of_what_was_masked(batch, member):
    given = batch([member(1.0, length=10, finish_reason="length"), member(None, length=6), member(0.0, trained=False)])
    planned = plan(given, ObjectiveSettings(mask_truncated=True))
    metrics = report(given, planned, done(steps=0, gradient_norm=None), learning_rate=0.1, seconds=1.0)
    assert metrics["completion_length"] == {"mean": pytest.approx(20 / 3), "min": 4, "max": 10}
    assert metrics["truncated_share"] == pytest.approx(1 / 3)
    assert metrics["members"] == {"count": 3, "trained": 0, "aged": 1, "without_reward": 1}
    assert metrics["reward"] == {"mean": 0.5, "std": 0.5}


def test_groups_that_all_agree_are_warned_about(batch, member):
    given = batch([member(1.0), member(1.0)], [member(None), member(1.0)])
    planned = plan(given, ObjectiveSettings())
    metrics = report(given, planned, done(of_ratio(1.0), of_ratio(1.0)), learning_rate=0.1, seconds=1.0)
    assert metrics["groups"] == {"count": 2, "no_signal": 1, "too_few": 1, "no_signal_share": 1.0}
    assert "no group carries a signal" in metrics["warnings"][0]


def test_everything_is_json_without_nan_even_when_nothing_was_there(batch):
    given = batch()
    nothing = done(steps=0, gradient_norm=math.nan)
    metrics = report(given, plan(given, ObjectiveSettings()), nothing, learning_rate=0.1, seconds=0.0)
    json.dumps(metrics, allow_nan=False)
    assert metrics["gradient_norm"] is None and metrics["loss"] == 0.0


def test_many_peers_are_listed_up_to_a_bound(batch, member):
    group = [member(float(index == 0), peer_id=f"peer-{index}") for index in range(MAX_PEERS + 5)]
    given = batch(group)
    stats = [of_ratio(1.0) for _ in group]
    metrics = report(given, plan(given, ObjectiveSettings()), done(*stats), learning_rate=0.1, seconds=1.0)
    assert len(metrics["ratio"]["by_peer"]) == MAX_PEERS + 1
    assert metrics["ratio"]["by_peer"]["others"]["tokens"] == 20
