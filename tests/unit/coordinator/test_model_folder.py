"""A model folder that is damaged: one error that names the file, never a traceback."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.demo.tokenizer import EOS_ID, VOCABULARY, save_tokenizer
from echo_coordinator.model_folder import MAX_CONFIG_BYTES, count_parameters, read_facts
from echo_coordinator.scoring.tokenizer import PromptTokenizer
from echo_swarm.errors import SettingsError

GOOD: dict[str, Any] = {"vocab_size": len(VOCABULARY), "eos_token_id": EOS_ID, "max_position_embeddings": 64}


def weights(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


HEADER = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    (tmp_path / "model.safetensors").write_bytes(weights(HEADER, bytes(24)))
    return tmp_path


def test_a_whole_folder_is_read(model: Path) -> None:
    assert read_facts(model).vocabulary_size == len(VOCABULARY)
    assert count_parameters(model) == 6


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not JSON",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"n": ' + b"9" * 5_000 + b"}",
        b"{" + b" " * MAX_CONFIG_BYTES + b"}",
        *[
            json.dumps({**GOOD, **change}).encode()
            for change in (
                {"text_config": ["garbage"]},
                {"text_config": "garbage"},
                {"text_config": 7},
                {"text_config": {"vocab_size": {"a": 1}}},
                {"vocab_size": True},
                {"vocab_size": "96"},
                {"vocab_size": 0},
                {"vocab_size": 1 << 40},
                {"vocab_size": None},
                {"max_position_embeddings": "64"},
                {"max_position_embeddings": -1},
                {"max_position_embeddings": True},
                {"eos_token_id": {"a": [1]}},
                {"eos_token_id": [[1]]},
                {"eos_token_id": 1 << 70},
            )
        ],
    ],
)
def test_a_damaged_config_is_named(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"config\.json|end token"):
        read_facts(model)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 50_000, b'{"eos_token_id": "x"}', b"\xff"])
def test_a_damaged_generation_config_is_named(model: Path, content: bytes) -> None:
    (model / "generation_config.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        read_facts(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        weights(HEADER, bytes(24))[:-1],
        weights(HEADER, bytes(24))[:20],
        weights(HEADER, bytes(25)),
        struct.pack("<Q", 2**63) + HEADER,
        weights(b"{" * 2_000),
        weights(b'{"a":7}'),
        weights(b"[" * 50_000),
    ],
)
def test_damaged_weights_are_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(SettingsError, match=r"model\.safetensors is damaged"):
        count_parameters(model)


def test_missing_files_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="no weights"):
        count_parameters(model)
    (model / "config.json").unlink()
    with pytest.raises(SettingsError, match=r"cannot read .*config\.json"):
        read_facts(model)
    (model / "config.json").mkdir()
    with pytest.raises(SettingsError, match=r"cannot read .*config\.json"):
        read_facts(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"[" * 50_000),
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 50_000),
        ("tokenizer_config.json", b'{"bos_token": {"text": "x"}}'),
        ("tokenizer_config.json", b'{"bos_token": 7}'),
        ("tokenizer_config.json", b'{"chat_template": "{% for %}"}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": "{{"}]}'),
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"{% if %}"),
    ],
)
def test_damaged_tokenizer_files_are_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(SettingsError, match=r"tokenizer|chat.template"):
        PromptTokenizer(model, [EOS_ID])


@pytest.mark.parametrize("value", [[7], [{}], [{"name": "other", "template": "x"}], {"a": 1}, 7])
def test_a_chat_template_of_another_kind_counts_as_none(model: Path, value: object) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))
    assert not PromptTokenizer(model, [EOS_ID]).has_chat_template
