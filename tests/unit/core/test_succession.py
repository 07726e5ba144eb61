"""Which chains of successions are followed, and what the keys before then still count for."""

import itertools

import pytest

from echo_swarm.envelope import seal
from echo_swarm.errors import BadSignature, EchoError, MalformedMessage, Untrusted
from echo_swarm.identity import Identity
from echo_swarm.succession import (
    MAX_KEPT,
    MAX_SUCCESSIONS,
    KeyChain,
    Rival,
    RunKeys,
    Succession,
    SuccessionLink,
    kept_of,
    make_link,
    read_chain,
)

RUN = "ab" * 16
KEYS = [Identity.from_seed(bytes([n]) * 32) for n in range(MAX_SUCCESSIONS + 3)]


def succession(number: int, old: Identity, new: Identity, **changes: object) -> Succession:
    fields: dict[str, object] = {
        "run_id": RUN,
        "sequence": number,
        "old_key": old.public_key,
        "new_key": new.public_key,
        "epoch": number,
        "made_at": 1_700_000_000.0 + number,
        "kept": (bytes([number]) * 32,),
        **changes,
    }
    return Succession.model_validate(fields)


def link(number: int, old: Identity, new: Identity, **changes: object) -> SuccessionLink:
    return make_link(old, new, succession(number, old, new, **changes))


def chain(*keys: Identity) -> KeyChain:
    pairs = itertools.pairwise(keys)
    return KeyChain(links=tuple(link(number, old, new) for number, (old, new) in enumerate(pairs, start=1)))


def following(pinned: Identity, known: KeyChain | None = None) -> RunKeys:
    keys = RunKeys(RUN, pinned.public_key)
    if known is not None:
        checked = keys.judge(known)
        assert checked is not None
        keys.adopt(checked)
    return keys


def test_a_chain_leads_from_the_key_in_the_invite_to_the_newest() -> None:
    keys = following(KEYS[0])
    assert keys.coordinator == KEYS[0].peer_id and keys.last is None
    checked = keys.judge(read_chain(chain(*KEYS[:4]).raw))
    assert checked is not None and keys.key == KEYS[0].public_key, "judging follows nothing"
    keys.adopt(checked)
    assert keys.key == KEYS[3].public_key and keys.coordinator == KEYS[3].peer_id
    assert keys.last is not None and keys.last.sequence == 3
    assert keys.judge(chain(*KEYS[:4])) is None
    assert keys.judge(chain(*KEYS[:3])) is None, "an earlier one changes nothing"
    assert keys.judge(KeyChain(links=())) is None
    assert keys.judge(chain(*KEYS[:6])) is not None


def test_an_invite_with_a_later_key_finds_its_place_in_the_chain() -> None:
    keys = following(KEYS[2], chain(*KEYS[:4]))
    assert keys.key == KEYS[3].public_key
    assert keys.accepts(KEYS[0].public_key, bytes([1]) * 32), "the third key signed what came before it, too"
    with pytest.raises(Untrusted, match="without the key in the invite"):
        following(KEYS[5]).judge(chain(*KEYS[:4]))


def test_a_rival_is_refused_and_both_are_named() -> None:
    keys = following(KEYS[0], chain(*KEYS[:2]))
    thief = KEYS[9]
    with pytest.raises(Rival, match=f"(?s){thief.peer_id}.*{KEYS[1].peer_id}.*fresh invite"):
        keys.judge(chain(KEYS[0], thief, KEYS[8]))
    assert keys.key == KEYS[1].public_key
    again = KeyChain(links=(link(1, KEYS[0], KEYS[1], made_at=1.0),))
    with pytest.raises(Rival):
        keys.judge(again)


def forged_half() -> KeyChain:
    of = succession(1, KEYS[0], KEYS[1])
    return KeyChain(links=(SuccessionLink(by_old=seal(KEYS[0], of), by_new=seal(KEYS[5], of)),))


def two_halves() -> KeyChain:
    one, other = succession(1, KEYS[0], KEYS[1]), succession(1, KEYS[0], KEYS[1], epoch=9)
    return KeyChain(links=(SuccessionLink(by_old=seal(KEYS[0], one), by_new=seal(KEYS[1], other)),))


def broken_signature() -> KeyChain:
    good = link(1, KEYS[0], KEYS[1])
    flipped = good.by_old.replace(b"sig\xc4\x40", b"sig\xc4\x40", 1)
    at = flipped.index(b"sig\xc4\x40") + 5
    broken = flipped[:at] + bytes([flipped[at] ^ 1]) + flipped[at + 1 :]
    return KeyChain(links=(SuccessionLink(by_old=broken, by_new=good.by_new),))


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (KeyChain(links=(link(1, KEYS[7], KEYS[1]),)), Untrusted, "without the key in the invite"),
        (KeyChain(links=(link(1, KEYS[0], KEYS[1], run_id="cd" * 16),)), Untrusted, "of run cdcd"),
        (KeyChain(links=(link(2, KEYS[0], KEYS[1]),)), MalformedMessage, "where 1 belongs"),
        (KeyChain(links=chain(*KEYS[:3]).links[::-1]), MalformedMessage, "where 1 belongs"),
        (KeyChain(links=chain(*KEYS[:3]).links[1:]), MalformedMessage, "where 1 belongs"),
        (KeyChain(links=(*chain(*KEYS[:2]).links, link(2, KEYS[2], KEYS[3]))), MalformedMessage, "does not begin"),
        (chain(KEYS[0], KEYS[1], KEYS[0]), MalformedMessage, "leads back"),
        (chain(KEYS[0], KEYS[0]), MalformedMessage, "leads back"),
        (forged_half(), Untrusted, "other keys than those it names"),
        (two_halves(), MalformedMessage, "two halves"),
        (broken_signature(), BadSignature, "does not fit"),
    ],
)
def test_what_is_no_chain_of_this_run_is_refused(wrong: KeyChain, error: type[EchoError], said: str) -> None:
    keys = following(KEYS[0])
    with pytest.raises(error, match=said):
        keys.judge(wrong)
    assert keys.key == KEYS[0].public_key


def test_a_chain_is_bounded() -> None:
    longest = chain(*KEYS[: MAX_SUCCESSIONS + 1])
    assert following(KEYS[0], read_chain(longest.raw)).key == KEYS[MAX_SUCCESSIONS].public_key
    wire = {"links": [one.to_wire() for one in (*longest.links, longest.links[0])]}
    with pytest.raises(MalformedMessage):
        KeyChain.from_wire(wire)
    with pytest.raises(MalformedMessage):
        read_chain(b"\x00" * 10_000_000)
    full = make_link(KEYS[0], KEYS[1], succession(1, KEYS[0], KEYS[1], kept=(bytes(32),) * MAX_KEPT))
    assert following(KEYS[0], read_chain(KeyChain(links=(full,)).raw)).key == KEYS[1].public_key


def test_of_what_an_earlier_key_signed_only_what_its_succession_names_counts() -> None:
    keys = following(KEYS[0], chain(*KEYS[:3]))
    keys.check(KEYS[2].public_key, bytes(32))
    keys.check(KEYS[1].public_key, bytes([2]) * 32)
    with pytest.raises(Untrusted, match=f"replaced on 2023-11-14 22:13 UTC .{KEYS[1].peer_id}"):
        keys.check(KEYS[1].public_key, bytes([1]) * 32)
    with pytest.raises(Untrusted, match="another key than the run's"):
        keys.check(KEYS[7].public_key, bytes([1]) * 32)


def test_addresses_of_earlier_keys_become_those_of_the_newest() -> None:
    keys = following(KEYS[1], chain(*KEYS[:3]))
    for earlier in KEYS[:3]:
        assert keys.address(f"/ip4/1.2.3.4/tcp/5/p2p/{earlier.peer_id}") == f"/ip4/1.2.3.4/tcp/5/p2p/{KEYS[2].peer_id}"
    other = f"/ip4/1.2.3.4/tcp/5/p2p/{KEYS[5].peer_id}"
    assert keys.address(other) == other and keys.address("nonsense") == "nonsense"


def test_a_succession_keeps_the_run_the_base_and_the_newest_versions() -> None:
    versions = [(version, bytes([version % 256]) * 32) for version in range(400)]
    kept = kept_of(b"r" * 32, versions)
    assert len(kept) == MAX_KEPT and kept[:3] == (b"r" * 32, bytes(32), versions[399][1])
    assert kept_of(None, versions[5:7]) == (versions[6][1], versions[5][1])
