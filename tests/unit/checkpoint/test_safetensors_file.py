"""Strict reading of safetensors headers."""

import json
import struct
import tracemalloc

import pytest

from echo_swarm.checkpoint.safetensors_file import check_layout, layout_differences, layout_digest, read_header
from echo_swarm.errors import MalformedMessage

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = bytes(32)


@pytest.fixture
def read(tmp_path, safetensors):
    def read(entries, data=DATA):
        path = tmp_path / "model.safetensors"
        path.write_bytes(entries if isinstance(entries, bytes) else safetensors(entries, data))
        return read_header(path)

    return read


def test_a_good_file_is_read(read):
    header = read({"b": B, "a": A, "__metadata__": {"format": "pt"}})
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]
    assert header.layout() == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
    assert header.metadata == {"format": "pt"}


def test_a_file_written_by_the_library_is_read(tmp_path):
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "x.safetensors"
    library.save_file(
        {"w": numpy.zeros((3, 5), "float32"), "s": numpy.zeros((), "int64"), "e": numpy.zeros((0, 4))}, path
    )
    assert read_header(path).layout() == {"w": ("F32", (3, 5)), "s": ("I64", ()), "e": ("F64", (0, 4))}


def test_half_a_file_trailing_bytes_and_an_impossible_header_length_are_refused(read, safetensors):
    whole = safetensors({"a": A, "b": B}, DATA)
    cuts = [
        whole[: len(whole) // 2],
        whole[:-1],
        whole + bytes(8),
        whole[:7],
        b"",
        struct.pack("<Q", 2**63) + whole[8:],
    ]
    tracemalloc.start()
    for raw in cuts:
        with pytest.raises(MalformedMessage):
            read(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F33"},
        {"dtype": 3},
        {"shape": [2, 4]},
        {"shape": [-2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [True, 6]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 65},
        {"shape": "23"},
        {"data_offsets": [0, 20]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [8, 32]},
        {"data_offsets": [0]},
        {"extra": 1},
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused(read, change):
    with pytest.raises(MalformedMessage):
        read({"a": A | change, "b": B})


def test_holes_overlaps_duplicates_and_bad_json_are_refused(read):
    hole = {"a": A, "b": B | {"data_offsets": [32, 40]}}
    overlap = {"a": A, "b": B | {"data_offsets": [16, 24]}}
    twice = f'{{"a":{json.dumps(A)},"a":{json.dumps(A)}}}'
    inner = '{"a":{"dtype":"F32","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    others = [
        "",
        "[]",
        ' {"a":1}',
        '{"a":NaN}',
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":1}',
        '{"\\ud800":1}',
    ]
    metadata = [{"__metadata__": {"x": 1}}, {"__metadata__": []}]
    for entries in [hole, overlap, twice, inner, *others, *metadata]:
        with pytest.raises(MalformedMessage):
            read(entries, bytes(40) if entries is hole else DATA)


def test_missing_extra_and_different_tensors_do_not_have_the_manifests_layout(read, tmp_path, safetensors):
    expected = read({"a": A, "b": B})
    digest = layout_digest(expected)
    assert layout_digest(read({"b": B, "a": A})) == digest
    assert check_layout(tmp_path / "model.safetensors", digest).layout() == expected.layout()
    others = {
        "missing: b": ({"a": A}, bytes(24)),
        "extra: c": ({"a": A, "b": B, "c": {"dtype": "U8", "shape": [1], "data_offsets": [32, 33]}}, bytes(33)),
        "different: b": ({"a": A, "b": B | {"dtype": "F16"}}, DATA),
    }
    for line, (entries, data) in others.items():
        header = read(entries, data)
        assert any(found.startswith(line) for found in layout_differences(header, expected))
        with pytest.raises(MalformedMessage, match="not the manifest's"):
            check_layout(tmp_path / "model.safetensors", digest)
