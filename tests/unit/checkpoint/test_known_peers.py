"""Addresses of peers that were met."""

import json
from pathlib import Path

import pytest

from echo_swarm.checkpoint.known_peers import MAX_KNOWN, read_known, remember
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.identity import Identity

PEERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(1, 60)]


def at(peer: int, ip: str = "203.0.113.7", port: int = 1000) -> str:
    return f"/ip4/{ip}/tcp/{port}/p2p/{PEERS[peer]}"


PUBLIC = "8.8.8.8"


def test_those_met_last_come_first_and_are_bounded_in_all_and_for_each_peer(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    assert read_known(path) == ()
    own = [at(58, PUBLIC)]
    remember(path, [[at(0, PUBLIC)], [at(1, PUBLIC)]], own, Reach.GLOBAL)
    remember(path, [[at(1, PUBLIC), at(1, PUBLIC, 2)]], own, Reach.GLOBAL)
    assert read_known(path) == (at(1, PUBLIC), at(1, PUBLIC, 2), at(0, PUBLIC))
    remember(path, [[at(2, PUBLIC, port) for port in range(1, 20)]], own, Reach.GLOBAL)
    assert len(read_known(path)) == 3 + 4
    remember(path, [[at(number, PUBLIC)] for number in range(3, 58)], own, Reach.GLOBAL)
    assert len(read_known(path)) == MAX_KNOWN


@pytest.mark.parametrize(
    ("near", "kept"),
    [
        (Reach.GLOBAL, [PUBLIC]),
        (Reach.PRIVATE, [PUBLIC, "192.168.1.9"]),
        (Reach.LOOPBACK, [PUBLIC, "192.168.1.9", "127.0.0.1"]),
    ],
)
def test_nobody_can_have_nearer_doors_than_the_runs_knocked_at(tmp_path: Path, near: Reach, kept: list[str]) -> None:
    path = tmp_path / "peers.json"
    # Behind a router, all of our own addresses are private, whatever the run is.
    remember(path, [[at(0, ip)] for ip in (PUBLIC, "192.168.1.9", "127.0.0.1")], [at(58, "192.168.1.2")], near)
    assert read_known(path) == tuple(at(0, ip) for ip in kept)


def test_what_is_no_address_of_a_peer_and_our_own_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    wrong = ["/ip4/8.8.8.8/tcp/1", "/ip4/8.8.8.8/tcp/1/p2p/nobody", at(0, PUBLIC) + "\n", "x" * 600 + at(0, PUBLIC)]
    remember(path, [wrong, [at(58, PUBLIC, 5)]], [at(58, PUBLIC)], Reach.GLOBAL)
    assert not path.exists()


@pytest.mark.parametrize("damaged", [b"", b"{}", b"[1, null]", b"[" * 5000, b"\xff", json.dumps("x" * 70_000).encode()])
def test_a_damaged_file_counts_for_nothing_and_is_written_anew(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(damaged)
    assert read_known(path) == ()
    remember(path, [[at(0, PUBLIC)]], [at(58, PUBLIC)], Reach.GLOBAL)
    assert read_known(path) == (at(0, PUBLIC),)
