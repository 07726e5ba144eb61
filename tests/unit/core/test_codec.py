"""The encoding: one form for each value, clean refusal of all else, memory bounded by what arrived."""

import math
import struct
import tracemalloc
from array import array

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm import codec
from echo_swarm.codec import SMALL, Limits
from echo_swarm.errors import MalformedMessage

ROOMY = Limits(max_bytes=8 << 20, max_items=65_536, max_depth=12)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20)
)


def refusal(data: bytes, limits: Limits = ROOMY, *, canonical: bool = True) -> str:
    with pytest.raises(MalformedMessage) as caught:
        codec.decode(data, limits, canonical=canonical)
    return str(caught.value)


@given(values)
def test_every_value_survives_a_round_trip(value: object) -> None:
    assert codec.decode(codec.encode(value), ROOMY) == value


@given(st.dictionaries(st.text(max_size=6), scalars, min_size=2, max_size=8), st.randoms())
def test_the_order_of_insertion_leaves_no_trace(value: dict[str, object], random) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert codec.encode(dict(items)) == codec.encode(value)


@given(values, st.data())
def test_a_shuffled_map_is_refused_as_signed_data_and_read_otherwise(value: object, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.text(max_size=6), min_size=2, max_size=6, unique=True))
    ordered = sorted(keys)
    shuffled = data.draw(st.permutations(keys).filter(lambda p: list(p) != ordered))
    raw = msgpack.packb({key: value for key in shuffled}) if not _has_maps(value) else None
    if raw is not None:
        assert "order" in refusal(raw)
        assert codec.decode(raw, ROOMY, canonical=False) == dict.fromkeys(keys, value)


def _has_maps(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_maps, value)))


@given(st.binary(max_size=200))
def test_whatever_is_accepted_is_the_only_encoding_of_its_value(data: bytes) -> None:
    try:
        value = codec.decode(data, ROOMY)
    except MalformedMessage:
        return
    assert codec.encode(value) == data


@given(values, st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_gives_another_value_or_a_refusal(value: object, where: int, byte: int) -> None:
    raw = bytearray(codec.encode(value))
    raw[where % len(raw)] = byte
    try:
        read = codec.decode(bytes(raw), ROOMY)
    except MalformedMessage:
        return
    assert codec.encode(read) == bytes(raw)


def test_keys_are_ordered_by_their_utf8_bytes() -> None:
    # U+FFFF sorts before U+10000 in UTF-8 and after it in UTF-16.
    keys = ["\U00010000", "\uffff", "b", "a", "aa", ""]
    assert list(codec.decode(codec.encode(dict.fromkeys(keys, 1)), ROOMY)) == [
        "",
        "a",
        "aa",
        "b",
        "\uffff",
        "\U00010000",
    ]


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("nine bytes that made an old build take all memory", bytes.fromhex("9ffd74f7dd74fffdbd")),
        ("a binary of 4 GiB", bytes.fromhex("c6ffffffff")),
        ("a list of 4 billion", bytes.fromhex("ddffffffff")),
        ("a map of 4 billion", bytes.fromhex("dfffffffff")),
        ("a string of 4 GiB", bytes.fromhex("dbffffffff")),
        ("100,000 nested lists", b"\x91" * 100_000 + b"\xc0"),
        ("100,000 nested maps", b"\x81\xa0" * 100_000 + b"\xc0"),
        ("13 nested lists", b"\x91" * 13 + b"\xc0"),
        ("a thousand open lists, each promising 65,535 items", b"\xdc\xff\xff" * 1000 + bytes(62_536)),
        ("a million empty lists", b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF),
        ("a million maps", b"\xdd\x00\x0f\xff\xff" + b"\x81\xa1a\xc0" * 0xFFFFF),
        ("nothing", b""),
        ("garbage after the value", b"\xc0\x00"),
        ("a second value", b"\xc0\xc0"),
        ("a list cut short", b"\x92\x01"),
        ("a string cut short", b"\xa3ab"),
        ("a length cut short", b"\xda\x01"),
        ("a byte that msgpack never uses", b"\xc1"),
        ("a fixed extension", b"\xd4\x01\x00"),
        ("an extension", b"\xc7\x01\x05\x00"),
        ("a timestamp", bytes.fromhex("d6ff00000000")),
        ("an extension of 4 GiB", bytes.fromhex("c9ffffffff05")),
        ("a key that stands twice", b"\x82\xa1a\x01\xa1a\x02"),
        ("a number as key", b"\x81\x01\x02"),
        ("a binary as key", b"\x81\xc4\x01a\x02"),
        ("a list as key", b"\x81\x90\x02"),
        ("a map as key", b"\x81\x80\x02"),
        ("a string that is no UTF-8", b"\xa1\xff"),
        ("a surrogate", b"\xa3\xed\xa0\x80"),
    ],
)
def test_hostile_input_is_refused_cleanly_and_in_little_memory(what: str, data: bytes, canonical: bool) -> None:
    tracemalloc.start()
    try:
        assert refusal(data, canonical=canonical)
        assert len(refusal(data, canonical=canonical)) < 300
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000, what
    assert codec.decode(codec.encode({"next": "good one"}), SMALL) == {"next": "good one"}


LONGER_THAN_NEEDED = (
    "cc01 cd0001 ce00000001 cf0000000000000001 d001 d10001 d200000001 d30000000000000001 d0ff d1ffff ca3f800000 "
    "d90161 da000161 db0000000161 c5000100 c60000000100 dc0001c0 dd00000001c0 de0001a161c0 df00000001a161c0"
)


@pytest.mark.parametrize("text", LONGER_THAN_NEEDED.split())
def test_a_longer_form_than_needed_is_refused_as_signed_data_only(text: str) -> None:
    data = bytes.fromhex(text)
    assert refusal(data)
    codec.decode(data, ROOMY, canonical=False)


@pytest.mark.parametrize(
    "value",
    [
        *(n for power in (5, 7, 8, 15, 16, 31, 32, 63) for n in (2**power - 1, 2**power, -(2**power), -(2**power) - 1)),
        2**64 - 1,
    ],
)
def test_integers_at_the_edges_of_each_form_survive(value: int) -> None:
    if value < -(2**63):
        with pytest.raises((TypeError, OverflowError)):
            codec.encode(value)
    else:
        assert codec.decode(codec.encode(value), SMALL) == value


@pytest.mark.parametrize("length", [0, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_lengths_at_the_edges_of_each_form_survive(length: int) -> None:
    for value in ("x" * length, b"x" * length, [None] * length):
        assert codec.decode(codec.encode(value), ROOMY) == value
    named = {f"{i:05}": None for i in range(min(length, 32_768))}
    assert codec.decode(codec.encode(named), ROOMY) == named


def test_the_size_limit_is_exact() -> None:
    data = codec.encode(b"x" * 97)
    assert codec.decode(data, Limits(max_bytes=len(data))) == b"x" * 97
    assert "limit" in refusal(data, Limits(max_bytes=len(data) - 1))


def test_the_item_limit_counts_all_lists_and_maps_together() -> None:
    value = {"a": [1, 2, 3], "b": {"c": 4}}  # 2 x 2, 3 and 2 items
    assert codec.decode(codec.encode(value), Limits(max_bytes=100, max_items=9)) == value
    assert "items" in refusal(codec.encode(value), Limits(max_bytes=100, max_items=8))


@pytest.mark.parametrize("canonical", [True, False])
def test_the_depth_limit_is_exact(canonical: bool) -> None:
    data = codec.encode({"a": [{}]})
    assert codec.decode(data, Limits(max_bytes=100, max_depth=3), canonical=canonical) == {"a": [{}]}
    assert "deeper" in refusal(data, Limits(max_bytes=100, max_depth=2), canonical=canonical)


def test_a_message_full_of_the_smallest_values_stays_within_its_item_limit_in_memory() -> None:
    data = codec.encode({"k": [{"a": "bc"} for _ in range(21_000)]})
    tracemalloc.start()
    try:
        codec.decode(data, Limits(max_bytes=1 << 20))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000


def test_a_memory_view_is_read_like_bytes() -> None:
    assert codec.decode(memoryview(codec.encode([1, "a"])), SMALL) == [1, "a"]


@pytest.mark.parametrize("value", [{1: 2}, {b"a": 1}, {"a": {None: 1}}, [{"a": 1, 2: 3}], object(), {1, 2}, 2j])
def test_values_outside_the_encoding_are_not_written(value: object) -> None:
    with pytest.raises(TypeError):
        codec.encode(value)


def test_special_floats_keep_their_bits() -> None:
    for value in (0.0, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308):
        read = codec.decode(codec.encode(value), SMALL)
        assert struct.pack("<d", read) == struct.pack("<d", value)
    assert math.isnan(codec.decode(codec.encode(math.nan), SMALL))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_ids_survive_and_are_little_endian(ids: list[int]) -> None:
    packed = codec.pack_u32(ids)
    assert packed == struct.pack(f"<{len(ids)}I", *ids)
    assert list(codec.unpack_u32(packed)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_survive_and_are_little_endian(numbers: list[float]) -> None:
    packed = codec.pack_f32(numbers)
    assert packed == struct.pack(f"<{len(numbers)}f", *numbers)
    assert codec.unpack_f32(packed) == array("f", numbers)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_outside_32_bits_cannot_be_packed(token: int) -> None:
    with pytest.raises(OverflowError):
        codec.pack_u32([token])


@pytest.mark.parametrize("unpack", [codec.unpack_u32, codec.unpack_f32])
def test_a_packed_array_of_odd_length_is_refused(unpack) -> None:
    with pytest.raises(MalformedMessage):
        unpack(b"abcde")
