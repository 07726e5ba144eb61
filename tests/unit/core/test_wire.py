"""Messages: strict types, no unknown fields, ranges, and errors that name the field and echo little."""

import math
from typing import Any

import pytest

from echo_swarm.errors import MalformedMessage
from echo_swarm.trajectory import Reason, Verdict
from echo_swarm.wire import Message
from echo_swarm.work import Beat, Hello, StatusReply, StatusRequest

BEAT: dict[str, Any] = {
    "lease_ids": [],
    "held_version": None,
    "state": "",
    "tokens_per_s": 0.0,
    "bytes_served": 0,
    "bytes_fetched_peers": 0,
}
VERDICT: dict[str, Any] = {"lease_id": bytes(16), "group_id": 1, "member": 0, "reason": "stale", "detail": ""}


def refusal(kind: type[Message], value: object) -> str:
    with pytest.raises(MalformedMessage) as caught:
        kind.from_wire(value)
    return str(caught.value)


def test_a_message_survives_a_round_trip() -> None:
    beat = Beat.from_wire(BEAT | {"lease_ids": [bytes(16)], "held_version": 2**63 - 1})
    assert beat.lease_ids == (bytes(16),)
    assert Beat.from_wire(beat.to_wire()) == beat


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("held_version", True),
        ("held_version", 1.0),
        ("held_version", "1"),
        ("held_version", -1),
        ("held_version", 2**63),
        ("tokens_per_s", True),
        ("tokens_per_s", "1"),
        ("tokens_per_s", math.nan),
        ("tokens_per_s", math.inf),
        ("tokens_per_s", -0.5),
        ("tokens_per_s", None),
        ("state", b"bytes"),
        ("state", 1),
        ("state", "x" * 129),
        ("lease_ids", None),
        ("lease_ids", {}),
        ("lease_ids", "abc"),
        ("lease_ids", b"abc"),
        ("lease_ids", [bytes(15)]),
        ("lease_ids", ["a" * 16]),
        ("lease_ids", [bytes(16)] * 4097),
        ("bytes_served", False),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    text = refusal(Beat, BEAT | {field: value})
    assert text.startswith(f"Beat.{field}")
    assert len(text) < 400


def test_a_number_with_a_fraction_may_be_sent_as_an_integer() -> None:
    assert Beat.from_wire(BEAT | {"tokens_per_s": 3}).tokens_per_s == 3.0


def test_an_unknown_field_is_refused_and_not_echoed_at_length() -> None:
    text = refusal(Beat, BEAT | {"x" * 10_000: 1})
    assert "not permitted" in text
    assert len(text) < 400


@pytest.mark.parametrize("field", BEAT)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    assert f"Beat.{field}" in refusal(Beat, {k: v for k, v in BEAT.items() if k != field})


@pytest.mark.parametrize("value", [None, [], "x", b"x", 1, True, [["run_id", "0" * 32]]])
def test_a_message_that_is_no_map_is_refused(value: object) -> None:
    assert "StatusRequest" in refusal(StatusRequest, value)


@pytest.mark.parametrize("run", ["0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", "g" * 32, bytes(32), ""])
def test_a_run_id_is_32_lowercase_hex_digits(run: object) -> None:
    refusal(StatusRequest, {"run_id": run})


@pytest.mark.parametrize("protocol", [True, 1.0, "1", 0, 2, None])
def test_a_protocol_version_is_exactly_the_integer_one(protocol: object) -> None:
    refusal(StatusReply, {"protocol": protocol, "status": {}})


@pytest.mark.parametrize("reason", list(Reason))
def test_reason_codes_travel_as_their_words(reason: Reason) -> None:
    verdict = Verdict.from_wire(VERDICT | {"reason": reason.value})
    assert verdict.reason is reason
    assert verdict.to_wire()["reason"] == reason.value


@pytest.mark.parametrize("reason", ["Stale", "", "unheard_of", b"stale", 1, True, None, ["stale"]])
def test_an_unknown_reason_code_is_refused(reason: object) -> None:
    assert len(refusal(Verdict, VERDICT | {"reason": reason})) < 400


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J\x1b[H", "a\nforged line", "\r", "\x07", "\x9b31m", "\u202e", "\u2028", "\x7f"]
)
def test_text_for_people_cannot_steer_their_terminals(hostile: str) -> None:
    state = Beat.from_wire(BEAT | {"state": f"sampling é {hostile}"}).state
    assert state.isprintable()
    assert state.startswith("sampling é ")
    assert Verdict.from_wire(VERDICT | {"detail": hostile}).detail.isprintable()


def test_a_message_cannot_be_changed() -> None:
    beat = Beat.from_wire(BEAT)
    with pytest.raises(ValueError, match="frozen"):
        beat.state = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_hostile_nested_value_is_named_by_its_place() -> None:
    hello = {
        "run_id": "0" * 32,
        "software": "x",
        "role": "inference",
        "instance": bytes(16),
        "wall_s": 0.0,
        "backend": {"backend": "torch", "build": "", "precision": "float32", "device": "", "batch": 0},
        "addresses": [],
    }
    assert "Hello.backend.batch" in refusal(Hello, hello)
    assert "Hello.addresses.1" in refusal(Hello, hello | {"backend": None, "addresses": ["a", ""]})
