"""What a node remembers of the run's keys, and where it looks for them."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from echo_node.following import Following, read_keys
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.clock import ManualClock
from echo_swarm.errors import AnotherPeer
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.succession import RunKeys
from echo_swarm.transport.memory import MemoryNetwork
from tests.unit.core.test_succession import KEYS, RUN, chain

pytestmark = pytest.mark.anyio


def invite_of(key: Identity) -> Invite:
    return Invite(run=RUN, key=key.public_key, boot=(f"/memory/1/p2p/{key.peer_id}", "/memory/9/p2p/x"))


def test_the_chain_on_disk_counts_for_every_invite_that_has_a_place_in_it_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.bin"
    assert read_keys(path, invite_of(KEYS[0])).key == KEYS[0].public_key
    path.write_bytes(chain(*KEYS[:3]).raw)
    for key in KEYS[:3]:
        assert read_keys(path, invite_of(key)).key == KEYS[2].public_key
    assert read_keys(path, invite_of(KEYS[5])).key == KEYS[5].public_key, "an invite is the person's word"
    assert read_keys(None, invite_of(KEYS[0])).key == KEYS[0].public_key
    for damaged in (b"", b"\xff" * 10, chain(*KEYS[:3]).raw[:-1], chain(KEYS[1], KEYS[0]).raw + b"x"):
        path.write_bytes(damaged)
        assert read_keys(path, invite_of(KEYS[0])).key == KEYS[0].public_key


async def test_who_answers_in_place_of_the_coordinator_and_cannot_show_why_is_not_followed(tmp_path: Path) -> None:
    network, invite = MemoryNetwork(), invite_of(KEYS[0])
    async with network.host(Identity.generate()) as stranger, network.host(Identity.generate()) as host:
        keys = RunKeys(RUN, invite.key)
        following = Following(
            host,
            invite,
            keys,
            path=tmp_path / "run" / "keys.bin",
            say=lambda _line: None,
            near=Reach.GLOBAL,
            clock=ManualClock(),
        )
        with pytest.raises(AnotherPeer) as caught:
            await following.at(invite.boot[0])
        assert caught.value.found == stranger.peer_id
        assert keys.key == invite.key and following.invited == [invite.boot[0]]
        assert not await following.ask(stranger.peer_id)
        assert not (tmp_path / "run").exists()


async def test_a_key_that_is_followed_is_followed_by_all_parts_though_whoever_asked_gives_up(tmp_path: Path) -> None:
    network, invite = MemoryNetwork(), invite_of(KEYS[0])
    async with network.host(Identity.generate()) as host:
        keys, path = RunKeys(RUN, invite.key), tmp_path / "run" / "keys.bin"
        following = Following(
            host, invite, keys, path=path, say=lambda _line: None, near=Reach.GLOBAL, clock=ManualClock()
        )
        told: list[bytes] = []

        async def changed() -> None:
            deadline.cancel()
            await anyio.lowlevel.checkpoint()
            told.append(keys.key)

        following.changed = changed
        with anyio.CancelScope() as deadline:
            await following._take(chain(*KEYS[:2]))
    assert told == [KEYS[1].public_key] and read_keys(path, invite).key == KEYS[1].public_key
