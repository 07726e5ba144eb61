import pytest

from echo_coordinator.scoring.worker import checked_reward


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (1, 1), (0.25, 0.25), (True, 1), (1 + 1e-9, 1), (-1e-9, 0)])
def test_rewards_in_range_are_kept_and_rounding_errors_clipped(given: float, kept: float) -> None:
    assert checked_reward(given) == (kept, None)


@pytest.mark.parametrize("given", [1e9, -0.5, 1.1, float("nan"), float("inf"), None, "1"])
def test_anything_else_is_a_failure_of_the_verifier_and_no_reward(given: object) -> None:
    reward, failure = checked_reward(given)
    assert reward is None
    assert failure is not None
