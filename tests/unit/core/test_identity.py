"""Keys: the peer id that libp2p gives, a file that only its owner reads, and restoring it from a copy."""

import errno
import os
import shutil
import stat
import threading
from collections import OrderedDict
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm import identity
from echo_swarm.errors import BadSignature, UsageError
from echo_swarm.identity import Identity, load, load_or_create, peer_id_of, public_key_of, verify

KNOWN_SEED = bytes(range(32))
KNOWN_PEER_ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def test_a_known_seed_gives_the_peer_id_that_libp2p_gives() -> None:
    assert Identity.from_seed(KNOWN_SEED).peer_id == KNOWN_PEER_ID


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_public_key(key: bytes) -> None:
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        KNOWN_PEER_ID[:-1],
        KNOWN_PEER_ID + "1",
        KNOWN_PEER_ID + "\n",
        "1" + KNOWN_PEER_ID,
        "0OIl" * 13,
        "Qm" + "a" * 44,
        "é" * 52,
        base58.b58encode(b"\x00\x24\x08\x02\x12\x20" + bytes(32)).decode(),
        "1" * 100_000,
    ],
)
def test_anything_but_an_ed25519_peer_id_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        public_key_of(text)
    assert len(str(caught.value)) < 200


def test_a_signature_fits_its_message_and_key_only() -> None:
    alice, mallory = Identity.from_seed(KNOWN_SEED), Identity.generate()
    signature = alice.sign(b"message")
    verify(alice.public_key, b"message", signature)
    for key, message, candidate in (
        (alice.public_key, b"massage", signature),
        (mallory.public_key, b"message", signature),
        (alice.public_key, b"message", signature[:-1]),
        (alice.public_key, b"message", b""),
        (alice.public_key[:-1], b"message", signature),
        (b"\xff" * 32, b"message", signature),
        (b"", b"message", signature),
    ):
        with pytest.raises(BadSignature):
            verify(key, message, candidate)
    verify(alice.public_key, b"message", signature)


def test_what_is_remembered_of_good_signatures_is_bounded_and_never_the_bad_or_the_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "_good", OrderedDict())
    monkeypatch.setattr(identity, "_MAX_GOOD", 8)
    alice = Identity.from_seed(KNOWN_SEED)
    with pytest.raises(BadSignature):
        verify(alice.public_key, b"never signed", bytes(64))
    long = bytes(identity._SHORT_BYTES + 1)
    verify(alice.public_key, long, alice.sign(long))
    assert not identity._good
    for number in range(20):
        message = number.to_bytes(8, "little")
        verify(alice.public_key, message, alice.sign(message))
    assert len(identity._good) == 8


def test_a_new_key_is_created_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "echo" / "identity.key"
    identity, new = load_or_create(path)
    again, new_again = load_or_create(path)
    assert (new, new_again) == (True, False)
    assert again.peer_id == identity.peer_id
    assert path.read_text() == identity.seed.hex() + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]


def test_a_key_is_made_where_the_file_system_has_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "identity.key"
    identity, new = load_or_create(path)
    assert new and load(path).peer_id == identity.peer_id and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.unlink()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        load_or_create(path)
    assert not list(tmp_path.iterdir()), "half a key would stop the next start"


def test_a_key_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_or_create(tmp_path / "identity.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600


def test_restoring_the_file_elsewhere_gives_the_same_peer(tmp_path: Path) -> None:
    identity, _ = load_or_create(tmp_path / "old" / "identity.key")
    restored = tmp_path / "new.key"
    shutil.copy(tmp_path / "old" / "identity.key", restored)
    assert load(restored).peer_id == identity.peer_id
    by_hand = tmp_path / "typed.key"
    by_hand.touch(mode=0o600)
    by_hand.write_text(f"  {identity.seed.hex().upper()}\r\n\n")
    assert load(by_hand).peer_id == identity.peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_open_to_others_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        load(path)
    path.chmod(0o600)
    load(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff\x00" * 40, b"00" * 1_000_000], ids=len
)
def test_a_damaged_key_is_refused_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    for read in (load, load_or_create):
        with pytest.raises(UsageError, match="backup"):
            read(path)
    assert path.read_bytes() == content


def test_a_missing_key_or_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.key", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            load(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="below: Not a directory"):
        load_or_create(tmp_path / "file" / "below" / "identity.key")


def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    start = threading.Barrier(8)
    results: list[tuple[str, bool]] = []

    def create() -> None:
        start.wait(timeout=10)
        identity, new = load_or_create(path)
        results.append((identity.peer_id, new))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(results) == 8
    assert len({peer_id for peer_id, _ in results}) == 1
    assert sum(new for _, new in results) == 1
