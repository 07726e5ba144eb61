"""The order of epochs, and what falls to one."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm.envelope import seal
from echo_swarm.epoch import MAX_EPOCH_BYTES, NO_EPOCH, Epoch, HighestEpoch, open_epoch, rank_of
from echo_swarm.errors import BadSignature, MalformedMessage, Untrusted
from echo_swarm.identity import Identity

RUN = "0123456789abcdef" * 2
KEY = Identity.from_seed(bytes(32))
BASE = bytes([7]) * 32


def epoch(number: int, nonce: int = 0, base: int | None = 12) -> Epoch:
    return Epoch(
        run_id=RUN,
        number=number,
        nonce=nonce.to_bytes(16, "big"),
        started_at=1.0,
        base_version=base,
        base_digest=None if base is None else BASE,
    )


def test_the_number_decides_and_of_equal_numbers_the_nonce_whatever_the_order_of_arrival() -> None:
    told = [seal(KEY, epoch(number, nonce)) for number, nonce in ((3, 9), (4, 1), (4, 2))]
    for order in permutations(told):
        highest = HighestEpoch(run_id=RUN, run_key=KEY.public_key)
        raised = [highest.hear(raw) for raw in order]
        assert highest.rank == (4, (2).to_bytes(16, "big"))
        assert raised[0] and raised.count(True) <= 3
        assert not any(highest.hear(raw) for raw in told)


@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 5), st.integers(0, 3))
def test_of_two_epochs_exactly_one_is_higher_unless_they_are_the_same(a: int, x: int, b: int, y: int) -> None:
    one, other = epoch(a, x).rank, epoch(b, y).rank
    assert (one < other) + (other < one) == (one != other)
    assert one > NO_EPOCH


@pytest.mark.parametrize(
    ("rank", "version", "digest", "falls"),
    [
        (NO_EPOCH, 12, BASE, False),
        ((4, bytes(16)), 11, bytes(32), False),
        ((4, bytes(16)), 12, BASE, False),
        ((4, bytes(16)), 12, bytes(32), True),
        ((4, bytes(16)), 13, BASE, True),
        (NO_EPOCH, 13, bytes(32), True),
        ((5, bytes(16)), 13, bytes(32), False),
        ((5, (1).to_bytes(16, "big")), 13, bytes(32), False),
        ((6, bytes(16)), 12, bytes(32), False),
    ],
)
def test_what_a_lower_epoch_published_after_the_base_falls(
    rank: tuple[int, bytes], version: int, digest: bytes, falls: bool
) -> None:
    assert epoch(5).refuses(rank, version, digest) is falls


def test_an_epoch_that_began_before_version_0_leaves_nothing_of_lower_ones() -> None:
    assert epoch(5, base=None).refuses((4, bytes(16)), 0, BASE)


def test_only_the_runs_key_makes_epochs_of_this_run() -> None:
    good = seal(KEY, epoch(1))
    assert open_epoch(good, run_id=RUN, run_key=KEY.public_key).message.number == 1
    assert rank_of(None, run_id=RUN, run_key=KEY.public_key) == NO_EPOCH
    with pytest.raises(Untrusted, match="another key"):
        open_epoch(seal(Identity.generate(), epoch(1)), run_id=RUN, run_key=KEY.public_key)
    with pytest.raises(Untrusted, match="of run"):
        open_epoch(good, run_id="f" * 32, run_key=KEY.public_key)
    with pytest.raises(BadSignature):
        open_epoch(good.replace(BASE, bytes(32)), run_id=RUN, run_key=KEY.public_key)
    with pytest.raises(MalformedMessage):
        open_epoch(bytes(1000), run_id=RUN, run_key=KEY.public_key)


def test_a_base_has_a_version_and_a_digest() -> None:
    with pytest.raises(MalformedMessage, match="base"):
        Epoch.from_wire(epoch(1).to_wire() | {"base_digest": None})


def test_the_largest_epoch_fits_where_it_travels() -> None:
    largest = epoch(2**32 - 1, 2**128 - 1, 2**63 - 1).model_copy(update={"started_at": 4e9})
    assert len(seal(KEY, largest)) <= MAX_EPOCH_BYTES


def test_a_damaged_epoch_on_disk_counts_for_nothing() -> None:
    highest = HighestEpoch(run_id=RUN, run_key=KEY.public_key, persisted=(b"damaged", seal(KEY, epoch(2))))
    assert highest.rank[0] == 2
