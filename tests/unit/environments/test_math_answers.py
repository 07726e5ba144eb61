import pytest

from echo_coordinator.environments.math_answers import parse_gold, reward_of


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("42", r"\boxed{42}", 1.0),
        ("42", r"\fbox{42}", 1.0),
        ("0.5", r"\fbox{\frac{1}{2}}", 1.0),
        ("E", r"first \boxed{C}, no: \boxed{E}", 1.0),
        ("C", r"first \boxed{C}, no: \boxed{E}", 0.0),
        ("E", r"\boxed{\text{E}}", 1.0),
        ("E", r"\boxed{E: because it is}", 1.0),
        ("E", r"\boxed{(E)}", 1.0),
        ("4", r"\boxed{3} or rather \boxed{4}", 1.0),
        ("3", r"\boxed{3} or rather \boxed{4}", 0.0),
        ("42", r"\boxed{", 0.0),
        ("42", r"it is \boxed{42", 0.0),
        ("72", "The answer is 72.", 1.0),
        ("72", "", 0.0),
        ("72", "no idea", 0.0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
    ],
)
def test_answers_are_found_and_compared(gold: str, completion: str, reward: float) -> None:
    parsed = parse_gold(gold)
    assert parsed is not None
    assert reward_of(parsed, completion) == reward


@pytest.mark.parametrize("gold", ["", "???", "hello world", "Paris", r"\boxed{", "3 apples"])
def test_answers_that_cannot_be_compared_are_refused_as_gold(gold: str) -> None:
    assert parse_gold(gold) is None


def test_a_text_that_only_opens_boxes_is_dealt_with_at_once() -> None:
    parsed = parse_gold("1")
    assert parsed is not None
    assert reward_of(parsed, r"\boxed{" * 100_000) == 0.0
