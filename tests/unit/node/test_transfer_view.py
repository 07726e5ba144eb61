"""What people are told of a version on its way."""

import io

from rich.console import Console

from echo_node.display import transfer_bar
from echo_node.transfer_view import TransferView
from echo_swarm.checkpoint.watch import Stage

MB = 1_000_000


def test_a_fetch_tells_bytes_share_rate_time_left_peers_and_where_it_resumed():
    view = TransferView()
    watch = view.begin("version 7")
    assert view.look(0.0) is None  # Its size is not known yet.
    watch.resumed_bytes = 20 * MB
    watch.enter(Stage.FETCHING, 100 * MB, 20 * MB)
    first = view.look(10.0)
    assert str(first) == "fetching version 7: 20.0 MB of 100.0 MB (20 %), resumed at 20 %"
    watch.sources = 3
    watch.advance(40 * MB)
    assert str(view.look(14.0)) == (
        "fetching version 7: 40.0 MB of 100.0 MB (40 %), 5.0 MB/s, 12 s left, from 3 peers, resumed at 20 %"
    )
    watch.mirrors = 2
    assert "from 1 peer and 2 mirrors, resumed" in str(view.look(14.0))
    watch.mirrors = 3
    assert "from 3 mirrors, resumed" in str(view.look(14.0))


def test_the_rate_is_that_of_the_last_seconds_and_a_stand_still_has_no_end():
    view = TransferView()
    watch = view.begin("version 7")
    watch.enter(Stage.FETCHING, 100 * MB)
    for second in range(10):
        watch.advance(second * MB)
        view.look(float(second))
    looks = [view.look(float(second)) for second in range(10, 60)]
    now = looks[-1]
    assert now is not None and now.bytes_per_s == 0 and now.left_s is None
    assert str(now) == "fetching version 7: 9.0 MB of 100.0 MB (9 %), 0 B/s"


def test_changes_their_application_and_verification_are_told_apart_and_each_has_a_rate_of_its_own():
    view = TransferView()
    watch = view.begin("version 9")
    watch.change, watch.changes, watch.sources = 2, 3, 1
    watch.enter(Stage.FETCHING, 4 * MB, 1 * MB)
    assert str(view.look(0.0)) == ("fetching change 2 of 3 that make version 9: 1.0 MB of 4.0 MB (25 %), from 1 peer")
    watch.change = 0
    watch.enter(Stage.APPLYING, 100 * MB)
    assert str(view.look(1.0)) == "applying the changes that make version 9: 0 B of 100.0 MB (0 %)"
    watch.enter(Stage.VERIFYING, 100 * MB)
    watch.advance(100 * MB)
    assert str(view.look(2.0)) == "verifying version 9: 100.0 MB of 100.0 MB (100 %)"
    view.end(watch, bytes(32))
    assert view.look(3.0) is None


def test_the_bar_fits_a_terminal_of_80_columns():
    view = TransferView()
    watch = view.begin("version 7")
    watch.enter(Stage.FETCHING, 100 * MB, 50 * MB)
    now = view.look(0.0)
    assert now is not None
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with console.capture() as shown:
        console.print(transfer_bar(now))
    assert "━" in shown.get() and "50 %" in shown.get()
