"""Whom a download dials at the word of others."""

import anyio
import pytest

from echo_swarm.checkpoint import hints
from echo_swarm.checkpoint.hints import MAX_PER_TELLER, Hints
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.errors import PeerUnreachable

pytestmark = pytest.mark.anyio


class Dialler:
    """A host that notes what it dials; only the addresses in `live` answer."""

    peer_id = "me"

    def __init__(self, live=(), reached_at=None) -> None:
        self.live, self.reached_at, self.dials = set(live), reached_at or {}, []

    def dialled(self, peer):
        return self.reached_at.get(peer)

    async def connect(self, address, *, timeout_s):
        self.dials.append(address)
        await anyio.lowlevel.checkpoint()
        if address not in self.live:
            raise PeerUnreachable(address)
        return address.rpartition("/p2p/")[2]


async def followed(host, *told, found=None, near=Reach.LOOPBACK) -> list[str]:
    met = []
    book = found or Hints(host, near, met.append)
    for teller, peer, addresses in told:
        async with anyio.create_task_group() as tasks:
            book.follow(teller, peer, addresses, tasks)
    return met


async def test_a_teller_uses_up_its_own_share_and_not_that_of_others():
    good = "/ip4/8.8.8.8/tcp/1/p2p/good"
    host = Dialler([good])
    lies = [("liar", f"p{n}", [f"/ip4/9.9.9.9/tcp/{n}/p2p/p{n}"]) for n in range(1, 1000)]
    assert await followed(host, *lies, ("honest", "good", [good])) == ["good"]
    assert len(host.dials) == MAX_PER_TELLER + 1


async def test_a_peer_that_was_named_with_a_wrong_address_is_dialled_at_the_right_one():
    good = "/ip4/8.8.8.8/tcp/1/p2p/good"
    host = Dialler([good])
    told = [("liar", "good", ["/ip4/9.9.9.9/tcp/1/p2p/good"]), ("honest", "good", [good]), ("other", "good", [good])]
    assert await followed(host, *told) == ["good"]
    assert len(host.dials) == 2


async def test_an_address_that_did_not_answer_is_dialled_again_after_a_rest(monkeypatch):
    address = "/ip4/8.8.8.8/tcp/1/p2p/good"
    host, met = Dialler(), []
    book = Hints(host, Reach.GLOBAL, met.append)
    await followed(host, ("ann", "good", [address]), ("bob", "good", [address]), found=book)
    assert len(host.dials) == 1
    monkeypatch.setattr(hints, "REST_S", 0.0)
    book._not_before_s[("good", address)] = 0.0
    host.live.add(address)
    await followed(host, ("bob", "good", [address]), found=book)
    assert met == ["good"]


@pytest.mark.parametrize(
    ("reached_at", "address", "dialled"),
    [
        (None, "/ip4/127.0.0.1/tcp/1/p2p/p", False),
        (None, "/ip4/10.0.0.1/tcp/1/p2p/p", False),
        (None, "/ip6/::1/tcp/1/p2p/p", False),
        (None, "/ip6/::ffff:192.168.0.1/tcp/1/p2p/p", False),
        (None, "/ip4/169.254.169.254/tcp/80/p2p/p", False),
        (None, "/ip4/0.0.0.0/tcp/80/p2p/p", False),
        (None, "/ip4/8.8.8.8/tcp/1/p2p/p", True),
        # Names may lead anywhere, and elsewhere at the next question.
        (None, "/dns4/example.org/tcp/1/p2p/p", False),
        (None, "/dns6/example.org/tcp/1/p2p/p", False),
        (None, "/dns/metadata.example.org/tcp/80/p2p/p", False),
        (None, "/dnsaddr/example.org/p2p/p", False),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/dns4/localhost/tcp/1/p2p/p", False),
        (None, "/ip6zone/eth0/ip6/fe80::1/tcp/1/p2p/p", False),
        (None, "/unix/run/x.sock/p2p/p", False),
        ("/dns4/run.example.org/tcp/1/p2p/t", "/ip4/10.0.0.1/tcp/1/p2p/p", False),
        ("/dns4/run.example.org/tcp/1/p2p/t", "/ip4/8.8.8.8/tcp/1/p2p/p", True),
        ("/ip4/8.8.8.8/tcp/1/p2p/t", "/ip4/192.168.0.1/tcp/1/p2p/p", False),
        ("/ip4/192.168.0.2/tcp/1/p2p/t", "/ip4/192.168.0.1/tcp/1/p2p/p", True),
        ("/ip4/192.168.0.2/tcp/1/p2p/t", "/ip4/127.0.0.1/tcp/1/p2p/p", False),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/ip4/127.0.0.1/tcp/2/p2p/p", True),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/ip4/10.0.0.1/tcp/2/p2p/p", True),
        ("/ip4/192.168.0.2/tcp/1/p2p/t", "/ip4/169.254.3.4/tcp/1/p2p/p", True),
        # Metadata services of clouds, and IPv4 addresses in disguise, at nobody's word.
        (None, "/ip4/168.63.129.16/tcp/80/p2p/p", False),
        (None, "/ip6/fec0::1/tcp/1/p2p/p", False),
        (None, "/ip6/64:ff9b::a00:1/tcp/1/p2p/p", False),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/ip4/169.254.169.254/tcp/80/p2p/p", False),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/ip4/100.100.100.200/tcp/80/p2p/p", False),
        ("/ip4/127.0.0.1/tcp/1/p2p/t", "/ip6/fd00:ec2::254/tcp/80/p2p/p", False),
        ("/ip6/64:ff9b::102:304/tcp/1/p2p/t", "/ip4/10.0.0.1/tcp/2/p2p/p", False),
    ],
)
async def test_inner_addresses_are_dialled_only_for_who_was_reached_at_one(reached_at, address, dialled):
    host = Dialler(reached_at={"t": reached_at} if reached_at else {})
    await followed(host, ("t", "p", [address]))
    assert bool(host.dials) == dialled


@pytest.mark.parametrize(
    ("near", "dialled"),
    [(Reach.GLOBAL, ["8.8.8.8"]), (Reach.PRIVATE, ["8.8.8.8", "10.0.0.1"]),
     (Reach.LOOPBACK, ["8.8.8.8", "10.0.0.1", "127.0.0.1"])],
)  # fmt: skip
async def test_a_run_that_is_far_away_leads_to_no_near_address_however_near_the_teller_is(near, dialled):
    host = Dialler(reached_at={"t": "/ip4/127.0.0.1/tcp/1/p2p/t"})
    told = [f"/ip4/{ip}/tcp/1/p2p/p" for ip in ("8.8.8.8", "10.0.0.1", "127.0.0.1")]
    await followed(host, ("t", "p", told), near=near)
    assert host.dials == [f"/ip4/{ip}/tcp/1/p2p/p" for ip in dialled]
