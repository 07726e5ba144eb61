"""The string that a person copies: it survives chat windows, and any real damage is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm.errors import InviteError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite, parse

RUN_KEY = Identity.from_seed(bytes(range(32)))
INVITE = Invite(
    run="0123456789abcdef" * 2,
    key=RUN_KEY.public_key,
    boot=(f"/ip4/203.0.113.7/tcp/31000/p2p/{RUN_KEY.peer_id}", f"/dns/run.example/tcp/443/p2p/{RUN_KEY.peer_id}"),
)
TEXT = str(INVITE)


def test_an_invite_survives_a_round_trip_and_names_the_coordinator() -> None:
    assert parse(TEXT) == INVITE
    assert parse(TEXT).coordinator == RUN_KEY.peer_id


def test_an_invite_is_one_word_of_harmless_characters() -> None:
    assert TEXT.startswith("echo1-")
    assert set(TEXT) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.parametrize(
    "text",
    [
        f"  {TEXT}\n",
        "\n".join(TEXT[i : i + 40] for i in range(0, len(TEXT), 40)),
        "\r\n    ".join(TEXT[i : i + 72] for i in range(0, len(TEXT), 72)),
        f'"{TEXT}"',
        f"'{TEXT}'",
        f"`{TEXT}`",
        f"<{TEXT}>",
        f"\u00a0{TEXT}\u2003",
    ],
)
def test_what_chat_windows_and_shells_add_does_not_matter(text: str) -> None:
    assert parse(text) == INVITE


def test_an_invite_cut_anywhere_is_refused() -> None:
    for length in range(len(TEXT)):
        with pytest.raises(InviteError):
            parse(TEXT[:length])


def test_a_changed_character_anywhere_is_refused() -> None:
    for position in range(len(TEXT)):
        changed = "x" if TEXT[position] != "x" else "y"
        with pytest.raises(InviteError):
            parse(TEXT[:position] + changed + TEXT[position + 1 :])


@pytest.mark.parametrize(
    "text", ["", "echo1-", "echo1--", "echo2-" + TEXT[6:], "hello", "echo1-" + "A" * 30_000, "echo1-é-0"]
)
def test_what_is_no_invite_is_refused_with_advice(text: str) -> None:
    with pytest.raises(InviteError, match="copy"):
        parse(text)


@given(st.text(max_size=100))
def test_no_text_gives_any_other_error(text: str) -> None:
    for candidate in (text, f"echo1-{text}", f"{TEXT}{text}"):
        try:
            parsed = parse(candidate)
        except InviteError as e:
            assert len(str(e)) < 600
        else:
            assert parsed == INVITE


def test_the_largest_invite_can_be_parsed() -> None:
    largest = Invite(run="f" * 32, key=bytes(32), boot=tuple(f"{i:03}" + "x" * 509 for i in range(16)))
    assert parse(str(largest)) == largest


@pytest.mark.parametrize("boot", [(), ("",), ("x" * 513,), ("a",) * 17, ("é",), ("a b",), ("a\n",), ("\x1b[2J",)])
def test_addresses_are_bounded(boot: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="boot"):
        Invite(run="0" * 32, key=bytes(32), boot=boot)
