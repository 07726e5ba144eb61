"""A GGUF file's header is read within bounds, and whatever a version's file should not hold is refused."""

import struct
from random import Random

import pytest

from echo_swarm.checkpoint.gguf_file import MAX_KEYS, check_gguf
from echo_swarm.errors import MalformedMessage
from tests.unit.checkpoint.gguf_files import gguf_bytes, key, standard_keys, tensor, text

HUGE = struct.pack("<Q", 2**63)


def checked(folder, data: bytes):
    path = folder / "x.gguf"
    path.write_bytes(data)
    return check_gguf(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_proper_file_is_described(architecture, tmp_path):
    header = checked(tmp_path, gguf_bytes(keys=standard_keys(architecture)))
    assert header.architecture == architecture and header.values[f"{architecture}.vocab_size"] == 8
    assert [(t.name, t.type, t.shape, t.begin, t.size_bytes) for t in header.tensors] == [
        ("token_embd.weight", "Q8_0", (8, 32), 0, 272),
        ("output_norm.weight", "F32", (32,), 288, 128),
    ]
    assert header.data_start % 32 == 0


def test_values_of_every_type_are_read(tmp_path):
    extra = [
        key("llama.a", 0, b"\7"),
        key("llama.b", 7, b"\1"),
        key("llama.c", 6, struct.pack("<f", 0.5)),
        key("llama.d", 11, struct.pack("<q", -3)),
        key("general.e", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")),
        key("general.f", 9, struct.pack("<IQ", 5, 2) + bytes(8)),
    ]
    values = checked(tmp_path, gguf_bytes(keys=standard_keys() + extra)).values
    assert (values["llama.a"], values["llama.b"], values["llama.c"], values["llama.d"]) == (7, True, 0.5, -3)


def with_key(*extra: bytes) -> bytes:
    return gguf_bytes(keys=[*standard_keys(), *extra])


def without(name: str) -> bytes:
    return gguf_bytes(keys=[item for item in standard_keys() if text(name) not in item])


def with_tensors(*tensors: bytes, data: bytes = bytes(128)) -> bytes:
    return gguf_bytes(tensors=tensors, data=data)


HOSTILE = {
    "empty": b"",
    "short magic": b"GG",
    "another magic": gguf_bytes(magic=b"GGML"),
    "version 2": gguf_bytes(version=2),
    "big-endian version": gguf_bytes(version=3 << 24),
    "no tensors": gguf_bytes(tensors=[], data=b""),
    "2^63 tensors": gguf_bytes(tensor_count=2**63),
    "many tensors announced": gguf_bytes(tensor_count=65_000),
    "2^63 keys": gguf_bytes(key_count=2**63),
    "too many keys": gguf_bytes(key_count=MAX_KEYS + 1),
    "keys that are not there": gguf_bytes(key_count=1000),
    "key of 2^63 bytes": with_key(HUGE),
    "key that is no text": with_key(key(b"llama.\xff", 4, bytes(4))),
    "key with a zero byte": with_key(key("llama.x\0y", 4, bytes(4))),
    "key twice": with_key(key("llama.block_count", 4, struct.pack("<I", 1))),
    "text of 2^63 bytes": with_key(key("general.name", 8, HUGE)),
    "text beyond the limit": with_key(key("general.name", 8, text("x" * 70_000))),
    "type 13": with_key(key("general.x", 13, bytes(8))),
    "bool of 2": with_key(key("general.x", 7, b"\2")),
    "not a number": with_key(key("llama.x", 6, struct.pack("<f", float("nan")))),
    "infinite": with_key(key("llama.x", 12, struct.pack("<d", float("inf")))),
    "array of 2^63 bytes": with_key(key("general.x", 9, struct.pack("<I", 0) + HUGE)),
    "array whose size wraps": with_key(key("general.x", 9, struct.pack("<IQ", 10, 2**61))),
    "array of 2^63 texts": with_key(key("general.x", 9, struct.pack("<I", 8) + HUGE)),
    "array of arrays": with_key(key("general.x", 9, struct.pack("<IQ", 9, 1) + bytes(16))),
    "split file": with_key(key("split.count", 2, struct.pack("<H", 2))),
    "vocabulary": with_key(key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1) + text("a"))),
    "chat template": with_key(key("tokenizer.chat_template", 8, text("{{ x }}"))),
    "adapter": with_key(key("adapter.type", 8, text("lora"))),
    "alignment 1": with_key(key("general.alignment", 4, struct.pack("<I", 1))),
    "alignment 0": with_key(key("general.alignment", 4, struct.pack("<I", 0))),
    "no architecture": without("general.architecture"),
    "other architecture": gguf_bytes(keys=standard_keys("mamba")),
    "no word on the vocabulary": without("tokenizer.ggml.model"),
    "no block count": without("llama.block_count"),
    "no heads": gguf_bytes(
        keys=[
            key("llama.attention.head_count", 4, bytes(4)) if text("llama.attention.head_count") in item else item
            for item in standard_keys()
        ]
    ),
    "tensor name of 64 bytes": with_tensors(tensor("x" * 64, (32,), 0, 0)),
    "tensor twice": with_tensors(tensor("x", (32,), 0, 0), tensor("x", (32,), 0, 128), data=bytes(256)),
    "no dimensions": with_tensors(tensor("x", (), 0, 0)),
    "five dimensions": with_tensors(tensor("x", (32, 1, 1, 1, 1), 0, 0)),
    "dimension 0": with_tensors(tensor("x", (32, 0), 0, 0), data=b""),
    "dimensions whose product wraps": with_tensors(tensor("x", (2**32, 2**32, 2**32), 0, 0)),
    "half a block": with_tensors(tensor("x", (48,), 8, 0)),
    "type Q4_K": with_tensors(tensor("x", (256,), 12, 0)),
    "type 2^32 - 1": with_tensors(tensor("x", (32,), 2**32 - 1, 0)),
    "starts in the middle": with_tensors(tensor("x", (32,), 0, 32)),
    "offset beyond the file": with_tensors(tensor("x", (32,), 0, 2**63)),
    "tensors overlap": with_tensors(tensor("x", (32,), 0, 0), tensor("y", (32,), 0, 0), data=bytes(256)),
    "hole between tensors": with_tensors(tensor("x", (32,), 0, 0), tensor("y", (32,), 0, 160), data=bytes(288)),
    "data missing": gguf_bytes()[:-32],
    "data one byte short": gguf_bytes()[:-1],
    "trailing bytes": gguf_bytes() + bytes(32),
    "ends with its header": gguf_bytes(data=b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_one_reason(name, tmp_path):
    with pytest.raises(MalformedMessage, match=r"^gguf: "):
        checked(tmp_path, HOSTILE[name])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = gguf_bytes()
    for length in range(len(whole)):
        with pytest.raises(MalformedMessage):
            checked(tmp_path, whole[:length])


def test_damaged_headers_are_read_or_refused_and_nothing_else_happens(tmp_path):
    whole, random = gguf_bytes(), Random(5)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(whole) - 400)] = random.randrange(256)
        try:
            checked(tmp_path, bytes(damaged))
        except MalformedMessage as e:
            assert len(str(e)) < 400
