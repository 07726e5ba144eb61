"""The outbox: durable before the push, counters exact over crashes."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from echo_node.outbox import Dropped, Outbox
from echo_swarm.errors import LocalFault, UsageError


def put(outbox: Outbox, name: str, *, trajectories: int = 2, version: int = 5, size: int = 100) -> bool:
    envelope = name.encode().ljust(size, b".")
    return outbox.put(
        envelope, trajectories=trajectories, tokens=10 * trajectories, oldest_version=version, lease_ids=[b"L" * 16]
    )


def test_what_was_put_comes_out_oldest_first_and_only_once(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    put(outbox, "a")
    put(outbox, "b")
    put(outbox, "a")
    first = outbox.oldest()
    assert first is not None and first.envelope.startswith(b"a") and outbox.pending() == 4
    outbox.settle(first.id, {"accepted": 2})
    second = outbox.oldest()
    assert second is not None and second.envelope.startswith(b"b")


def test_settling_twice_counts_once(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    put(outbox, "a", trajectories=3)
    entry = outbox.oldest()
    assert entry is not None
    assert outbox.settle(entry.id, {"accepted": 2, "stale": 1}, tokens=20)
    assert not outbox.settle(entry.id, {"accepted": 2, "stale": 1}, tokens=20)
    assert outbox.counters() == {"accepted": 2, "stale": 1, "tokens_accepted": 20}


def test_work_and_counters_survive_a_process_that_is_killed(tmp_path: Path):
    path = tmp_path / "outbox.sqlite"
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom echo_node.outbox import Outbox\n"
        "outbox = Outbox(Path(sys.argv[1]))\n"
        "for name in (b'first', b'second'):\n"
        "    outbox.put(name, trajectories=4, tokens=40, oldest_version=1, lease_ids=[bytes(16)])\n"
        "outbox.settle(outbox.oldest().id, {'accepted': 3, 'duplicate': 1}, tokens=30)\n"
        "outbox.mark_sent(outbox.oldest().id)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert done.returncode == -9
    outbox = Outbox(path)
    entry = outbox.oldest()
    assert entry is not None and entry.envelope == b"second"
    assert outbox.counters() == {"accepted": 3, "duplicate": 1, "tokens_accepted": 30}


def test_the_leases_of_what_waits_are_known(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    for name, leases in (("x", [b"a" * 16, b"b" * 16]), ("y", [b"b" * 16])):
        outbox.put(name.encode(), trajectories=1, tokens=1, oldest_version=0, lease_ids=leases)
    assert outbox.lease_ids() == {b"a" * 16, b"b" * 16}


def test_over_stale_work_is_dropped_and_counted_unless_the_coordinator_may_know_it(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    put(outbox, "sent", trajectories=1, version=3)
    sent = outbox.oldest()
    assert sent is not None
    outbox.mark_sent(sent.id)
    put(outbox, "old", trajectories=2, version=3)
    put(outbox, "fresh", trajectories=4, version=4)
    assert outbox.drop_stale(4) == 2
    assert outbox.pending() == 5
    assert outbox.counters() == {Dropped.STALE: 2}
    assert outbox.drop_stale(4) == 0


def test_what_only_the_coordinator_can_call_stale_is_never_dropped_as_stale(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    outbox.put(b"evaluation", trajectories=1, tokens=1, oldest_version=None, lease_ids=[bytes(16)])
    assert outbox.drop_stale(1000) == 0
    entry = outbox.oldest()
    assert entry is not None and entry.oldest_version is None


def test_at_its_size_limit_the_oldest_unsent_work_goes_first(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite", max_bytes=1000)
    put(outbox, "sent", size=400)
    sent = outbox.oldest()
    assert sent is not None
    outbox.mark_sent(sent.id)
    put(outbox, "a", size=300)
    assert outbox.backlogged()
    put(outbox, "b", size=300)
    assert put(outbox, "c", size=200)
    assert outbox.pending() == 6
    assert not put(outbox, "huge", size=700)
    assert outbox.counters() == {Dropped.FULL: 4}


def test_a_damaged_outbox_is_refused_with_advice(tmp_path: Path):
    path = tmp_path / "outbox.sqlite"
    path.write_bytes(b"this is no database, however long it may be" * 100)
    with pytest.raises(UsageError, match="move it away"):
        Outbox(path)


def test_an_outbox_that_is_damaged_inside_is_named_with_advice(tmp_path: Path):
    path = tmp_path / "outbox.sqlite"
    outbox = Outbox(path)
    put(outbox, "a")
    outbox.close()
    content = bytearray(path.read_bytes())
    content[4096:] = bytes([0xFF]) * (len(content) - 4096)
    path.write_bytes(content)
    damaged = Outbox(path)
    for use in (damaged.oldest, damaged.counters, damaged.backlogged, lambda: put(damaged, "b")):
        with pytest.raises(LocalFault, match=r"outbox\.sqlite is damaged .* move it away"):
            use()
    damaged.close()


def test_an_outbox_of_another_process_can_be_read_while_it_writes(tmp_path: Path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    put(outbox, "a")
    with sqlite3.connect(tmp_path / "outbox.sqlite") as reader:
        assert reader.execute("SELECT COUNT(*) FROM submissions").fetchone() == (1,)
    reader.close()
    outbox.close()
