"""A block follows from its base bit for bit, and a damaged encoding is refused or makes a block of the same length."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_swarm.checkpoint.delta.block import DENSE, SPARSE, VERBATIM, BlockCodec
from echo_swarm.errors import MalformedMessage

CODEC = BlockCodec()
WIDTHS = [1, 2, 4]


def changed(base: bytes, share: float, *, seed: int, width: int = 2, far: bool = False) -> bytes:
    """Move a share of the elements: by a step or two, or anywhere."""
    random = np.random.default_rng(seed)
    values = np.frombuffer(base, f"<u{width}").copy()
    chosen = random.random(len(values)) < share
    steps = random.integers(0, 1 << 8 * width, len(values)) if far else random.choice([-2, -1, 1, 2], len(values))
    values[chosen] += steps[chosen].astype(values.dtype)
    return values.tobytes()


def block(size: int = 1 << 16, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("share", "kind"), [(0.0001, SPARSE), (0.01, SPARSE), (0.3, SPARSE), (0.6, DENSE), (1, DENSE)])
def test_small_steps_are_kept_sparse_or_dense_and_come_back(width: int, share: float, kind: int) -> None:
    base = block()
    target = changed(base, share, seed=1, width=width)
    encoded = CODEC.encode(base, target, width)
    assert encoded[:2] == bytes([kind, width])
    assert len(encoded) < len(target)
    assert bytes(CODEC.decode(base, encoded)) == target


def test_equal_blocks_take_nothing() -> None:
    assert CODEC.encode(block(), block(), 2) == b""
    assert bytes(CODEC.decode(block(), b"")) == block()


def test_a_block_without_likeness_is_kept_as_it_is() -> None:
    target = block(seed=5)
    encoded = CODEC.encode(block(), target, 2)
    assert encoded[0] == VERBATIM and len(encoded) < len(target) + 64
    assert bytes(CODEC.decode(block(), encoded)) == target


def test_gaps_of_every_length_come_back() -> None:
    base = bytes(1 << 17)
    target = bytearray(base)
    for element in (0, 1, 255, 256, 510, 511, 512, 767, 1023, 40_000, 65_535):
        target[2 * element] = 1
    assert bytes(CODEC.decode(base, CODEC.encode(base, target, 2))) == bytes(target)


@given(data=st.data(), width=st.sampled_from(WIDTHS))
@settings(deadline=None, max_examples=200)
def test_whatever_the_blocks_are_the_second_follows_from_the_first(data: st.DataObject, width: int) -> None:
    base = data.draw(st.binary(min_size=1, max_size=600))
    target = data.draw(st.binary(min_size=len(base), max_size=len(base)))
    assert bytes(CODEC.decode(base, CODEC.encode(base, target, width))) == target


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7), share=st.sampled_from([0.01, 0.1, 0.7]), cut=st.booleans())
@settings(deadline=None, max_examples=400)
def test_damage_is_refused_or_makes_a_block_of_the_same_length(where: int, bit: int, share: float, cut: bool) -> None:
    base = block(4096)
    encoded = bytearray(CODEC.encode(base, changed(base, share, seed=2), 2))
    where %= len(encoded)
    if cut:
        del encoded[where:]
    else:
        encoded[where] ^= 1 << bit
    try:
        made = CODEC.decode(base, encoded)
    except MalformedMessage:
        return
    assert len(made) == len(base)


def stream(content: bytes) -> bytes:
    frame = zstandard.ZstdCompressor().compress(content)
    return struct.pack("<I", len(frame)) + frame


BOMB = zstandard.ZstdCompressor(write_content_size=False).compressobj()
UNSIZED = BOMB.compress(bytes(1 << 24)) + BOMB.flush()


@pytest.mark.parametrize(
    ("encoded", "told"),
    [
        (b"\x01", "too early"),
        (bytes([9, 2]), "kind 9"),
        (bytes([SPARSE, 3]), "elements of 3 bytes"),
        (bytes([SPARSE, 0]), "elements of 0 bytes"),
        (bytes([SPARSE, 2]) + struct.pack("<II", 2049, 0), "2049 changes"),
        (bytes([SPARSE, 2]) + struct.pack("<II", 0, 0), "0 changes"),
        (bytes([SPARSE, 2]) + struct.pack("<II", 1, 2), "2 of them far"),
        (bytes([SPARSE, 2]) + struct.pack("<II", 1, 1) + stream(b"\x07") + stream(bytes(4)), "1 far gaps for 0 marks"),
        (
            bytes([SPARSE, 2]) + struct.pack("<II", 1, 1) + stream(b"\xff") + stream(b"\xff" * 4),
            "a change at 4294967295",
        ),
        (
            bytes([SPARSE, 2]) + struct.pack("<II", 2000, 2000) + stream(b"\xff" * 2000) + stream(b"\xff" * 8000),
            "a change at",
        ),
        (bytes([DENSE, 2]) + stream(bytes(2047)), "not of 2048 bytes"),
        (bytes([DENSE, 2]) + struct.pack("<I", len(UNSIZED)) + UNSIZED, "not of 2048 bytes"),
        (bytes([DENSE, 2]) + struct.pack("<I", 1 << 31), "too early"),
        (bytes([VERBATIM, 0]) + stream(bytes(1 << 24)), "not of 4096 bytes"),
        (bytes([VERBATIM, 0]) + stream(bytes(4096)) + b"x", "1 bytes follow"),
        (bytes([VERBATIM, 0]) + struct.pack("<I", 4) + b"abcd", "delta:"),
    ],
)
def test_an_encoding_that_breaks_a_rule_is_refused(encoded: bytes, told: str) -> None:
    with pytest.raises(MalformedMessage, match=told):
        CODEC.decode(block(4096), encoded)
