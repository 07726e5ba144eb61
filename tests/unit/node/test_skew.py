"""What a person is told of a clock that is wrong."""

from echo_node.skew import Skew

BEHIND = "warning: this machine's clock is 10800 s behind"


def test_a_wrong_clock_is_told_once_again_when_it_changed_and_when_it_is_right() -> None:
    skew = Skew()
    assert skew.news(2.0, doubt_s=0.1) == ""
    assert skew.news(-10800.0, doubt_s=0.1).startswith(BEHIND)
    assert skew.news(-10801.5, doubt_s=0.1) == ""
    assert "40 s ahead of" in skew.news(40.0, doubt_s=0.1)
    assert skew.news(0.5, doubt_s=0.1) == "this machine's clock agrees with the coordinator's again"
    assert skew.news(0.5, doubt_s=0.1) == ""


def test_what_a_slow_hello_left_in_doubt_is_no_news_when_a_quick_one_finds_it() -> None:
    """A coordinator that starts on a busy machine answers its first hello late."""
    skew = Skew()
    assert skew.news(-10808.0, doubt_s=8.0).startswith("warning: this machine's clock is 10808 s behind")
    assert skew.news(-10800.0, doubt_s=0.1) == ""
    assert skew.news(-10790.0, doubt_s=0.1) != "", "measured well by now: this is a change"


def test_doubt_hides_no_clock_that_was_set() -> None:
    skew = Skew()
    assert skew.news(20.0, doubt_s=30.0) == ""
    assert skew.news(3600.0, doubt_s=30.0) != ""
    assert skew.news(0.0, doubt_s=0.1) != ""
