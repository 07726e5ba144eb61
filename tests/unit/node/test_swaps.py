"""From the news of a version to tokens under it: the parts add up, and few lines say so."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from echo_node.backends.base import LoadTimes
from echo_node.show import show_local
from echo_node.status import LocalStatus, read_statuses, summary_lines, write_status
from echo_node.swaps import KEPT, Swap, Swaps
from echo_swarm.clock import ManualClock
from tests.unit.node.test_cli import local_status

LOAD = LoadTimes(load_s=2.0, first_token_s=0.25, rest_s=0.5)


def swap(clock: ManualClock, swaps: Swaps, version: int, *, fetch_s: float = 5.0) -> None:
    swaps.heard(version)
    clock.advance(0.5)
    swaps.fetching(version)
    clock.advance(fetch_s)
    swaps.fetched(version, size_bytes=1000, verify_s=0.5)
    swaps.usable(version)
    clock.advance(1.0 + LOAD.total_s)
    swaps.loaded(version, LOAD)


def test_the_parts_add_up_to_the_time_from_the_news_to_the_first_token():
    clock, lines = ManualClock(), list[str]()
    swaps = Swaps(clock, lines.append)
    swap(clock, swaps, 12)
    (done,) = swaps.done
    assert done == Swap(
        version=12,
        size_bytes=1000,
        total_s=8.75,
        manifest_s=0.5,
        fetch_s=4.5,
        verify_s=0.5,
        wait_s=1.0,
        load_s=2.0,
        first_token_s=0.25,
        rest_s=0.5,
    )
    assert lines == [
        "version 12: 8.8 s from its announcement to its first token: manifest 0.5 s, fetch 4.5 s, verify 0.5 s, "
        "wait for running work 1.0 s, load 2.0 s, first token 0.2 s"
    ]


def test_waiting_begins_with_the_first_news_and_tries_again_count_as_fetching():
    clock = ManualClock()
    swaps = Swaps(clock, print)
    swaps.heard(3)
    clock.advance(2)
    swaps.heard(3)
    swaps.fetching(3)
    clock.advance(10)
    swap(clock, swaps, 3)
    assert swaps.done[0].manifest_s == 2 and swaps.done[0].fetch_s == pytest.approx(15)


def test_an_adapter_and_its_base_count_together():
    clock = ManualClock()
    swaps = Swaps(clock, print)
    swaps.heard(0)
    swaps.fetching(0)
    for size_bytes in (1000, 10):
        clock.advance(1)
        swaps.fetched(0, size_bytes=size_bytes, verify_s=0.25)
    swaps.usable(0)
    swaps.loaded(0, LoadTimes())
    assert (swaps.done[0].size_bytes, swaps.done[0].fetch_s, swaps.done[0].verify_s) == (1010, 1.5, 0.5)
    assert "load" not in str(swaps.done[0])


def test_only_a_first_load_of_what_was_heard_of_counts_and_what_was_skipped_is_forgotten():
    clock = ManualClock()
    swaps = Swaps(clock, print)
    swaps.loaded(1, LOAD)
    swaps.heard(2)
    swap(clock, swaps, 3)
    swaps.loaded(3, LOAD)
    swaps.fetching(2)
    swaps.usable(2)
    swaps.loaded(2, LOAD)
    assert [done.version for done in swaps.done] == [3]


def test_what_is_remembered_is_bounded_and_a_line_is_printed_once_a_minute_at_most():
    clock, lines = ManualClock(), list[str]()
    swaps = Swaps(clock, lines.append)
    for version in range(10_000):
        swaps.heard(version)
    assert len(swaps._coming) == KEPT
    for version in range(10_000, 10_100):
        swap(clock, swaps, version, fetch_s=0.5)
    assert [done.version for done in swaps.done] == list(range(10_100 - KEPT, 10_100))
    assert len(lines) <= 1 + clock.monotonic_s() / 60


def test_the_status_file_keeps_them_and_the_end_of_a_join_sums_them_up(tmp_path: Path):
    clock = ManualClock()
    swaps = Swaps(clock, print)
    for version, fetch_s in ((1, 3.0), (2, 9.0), (3, 4.0)):
        swap(clock, swaps, version, fetch_s=fetch_s)
    path = tmp_path / "runs" / ("a" * 32) / "status.json"
    path.parent.mkdir(parents=True)
    write_status(path, local_status(swaps=swaps.done))
    assert json.loads(path.read_bytes())["swaps"][0]["verify_s"] == 0.5
    (seen,) = read_statuses(tmp_path, clock)
    assert isinstance(seen.status, LocalStatus) and seen.status.swaps == tuple(swaps.done)
    console = Console(width=200, file=io.StringIO())
    show_local(tmp_path, console, as_json=False)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "swap" in shown and "7.8 s" in shown
    last = summary_lines(seen.status)[-1]
    assert last.startswith(
        "the last 3 versions: typically 7.8 s from announcement to first token; version 2: 12.8 s from"
    )
