"""docs/protocol.md says what the code does: its tables of messages and words, its limits and its vectors."""

import hashlib
import json
import re
import types
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
import pytest
from pydantic.fields import FieldInfo

from echo_swarm import codec, envelope, invite
from echo_swarm.checkpoint import blob
from echo_swarm.directory.base import head_topic, peers_topic
from echo_swarm.epoch import EPOCH_LIMITS, MAX_EPOCH_BYTES, Epoch
from echo_swarm.identity import Identity, verify
from echo_swarm.manifest import MANIFEST_LIMITS, Artifact, ArtifactKind, CheckpointManifest, RunManifest
from echo_swarm.probe import PROBE_LIMITS, Probe, ProbeAnswer, ProbeItem, ProbeReply, ProbeRequest, ProbeVerdict
from echo_swarm.records import RECORD_LIMITS, HeadRecord, PeerRecord
from echo_swarm.succession import SUCCESSION_LIMITS, KeyChain, Succession, SuccessionLink
from echo_swarm.trajectory import (
    SUBMISSION_LIMITS,
    BehaviourPolicy,
    FinishReason,
    Reason,
    Submission,
    Trajectory,
    Verdict,
    prompt_digest,
)
from echo_swarm.transfers import FaultReason, SourceBytes, SourceFault, Transfer
from echo_swarm.transport.frames import Kind, encode_frame
from echo_swarm.wire import Message
from echo_swarm.work import (
    WORK_PROTOCOL,
    BackendReport,
    Beat,
    BeatReply,
    Hello,
    Lease,
    LeaseMember,
    LeaseReply,
    LeaseRequest,
    Push,
    PushReply,
    Release,
    Released,
    Role,
    Sampling,
    StatusReply,
    StatusRequest,
    WaitReason,
    Welcome,
)

DOCUMENT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")

MESSAGES: list[type[Message]] = [
    BehaviourPolicy, Trajectory, Submission, Verdict,
    Artifact, CheckpointManifest, RunManifest,
    HeadRecord, PeerRecord, Epoch, Succession, SuccessionLink, KeyChain,
    BackendReport, Hello, Welcome, Sampling, LeaseMember, Lease, LeaseRequest, LeaseReply,
    Push, PushReply, Beat, Transfer, SourceBytes, SourceFault, BeatReply, Release, Released, StatusRequest, StatusReply,
    ProbeItem, Probe, ProbeAnswer, ProbeRequest, ProbeReply,
    blob.RunRequest, blob.ManifestRequest, blob.EnvelopeReply, blob.HaveRequest, blob.HaveReply,
    blob.PeerHint, blob.OfferRequest, blob.OfferReply, blob.PieceRequest,
    blob.PieceReply,
    invite.Invite,
]  # fmt: skip
SHORT = {"int 0..2^63 - 1": "u63", "int 0..2^32 - 1": "u32", "int 1..1": "1", "float 0..4_000_000_000": "time"}
WORDS: list[type[StrEnum]] = [FinishReason, Reason, ArtifactKind, Role, WaitReason, ProbeVerdict, FaultReason]


def table(heading: str) -> list[list[str]]:
    """The cells, without the header, of the table below a heading of the document."""
    section = re.split(rf"^#+ {heading}$", DOCUMENT, flags=re.MULTILINE)
    assert len(section) == 2, f"docs/protocol.md has {len(section) - 1} sections {heading!r}"
    lines = re.split(r"^#", section[1], flags=re.MULTILINE)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def notation(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """A field's type in the words of the document."""
    if get_origin(annotation) is Annotated:
        inner, *found = get_args(annotation)
        spread = [m for item in found for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return notation(inner, (*spread, *constraints))
    if get_origin(annotation) in (Union, types.UnionType):
        one, none = get_args(annotation)
        assert none is type(None)
        return f"{notation(one, constraints)} or null"
    if get_origin(annotation) is Literal:
        return " or ".join(json.dumps(value) for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list {_length(constraints)} of {notation(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "map"
    if issubclass(annotation, (StrEnum, Message)):
        return annotation.__name__
    if annotation in (str, bytes):
        pattern = next((m.pattern for m in constraints if getattr(m, "pattern", None)), None)
        if pattern == r"^[0-9a-f]{32}$":
            return "run id"
        kind = "address" if pattern == r"^[!-~]+$" else {str: "text", bytes: "bytes"}[annotation]
        return f"{kind} {_length(constraints)}".strip()
    return SHORT.get(text := f"{annotation.__name__} {_range(constraints)}".strip(), text)


def _length(constraints: tuple[Any, ...]) -> str:
    least = next((m.min_length for m in constraints if isinstance(m, at.MinLen)), 0)
    most = next((m.max_length for m in constraints if isinstance(m, at.MaxLen)), None)
    if most is None:
        return ""
    return _number(most) if least == most else f"{least}..{_number(most)}"


def _range(constraints: tuple[Any, ...]) -> str:
    low = high = ""
    for m in constraints:
        if isinstance(m, at.Ge):
            low = _number(m.ge)
        elif isinstance(m, at.Gt):
            low = f"above {_number(m.gt)}, "
        elif isinstance(m, at.Le):
            high = _number(m.le)
        elif isinstance(m, at.Lt):
            high = f"{_number(m.lt)} - 1"
    if low.startswith("above"):
        return f"{low}at most {high}"
    return f"{low}..{high}" if low else ""


def _number(value: Any) -> str:
    exponent = int(value).bit_length() - 1
    return f"2^{exponent}" if value == 2**exponent and exponent >= 16 else f"{value:_}".replace(".0", "")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_each_message_is_documented_field_by_field(message: type[Message]) -> None:
    expected = [
        [f"`{name}`", notation(field.annotation, tuple(field.metadata))] for name, field in message.model_fields.items()
    ]
    documented = table(message.__name__)
    assert [row[:2] for row in documented] == expected
    assert all(row[2] for row in documented)


def test_the_fields_with_a_default_are_named_and_no_others() -> None:
    text = DOCUMENT[DOCUMENT.index("Fields with a default:") : DOCUMENT.index("A sender of this version writes them")]
    named = set(re.findall(r"`(\w+\.\w+)`", text))
    fields = {(m.__name__, name) for m in MESSAGES for name, f in m.model_fields.items() if not f.is_required()}
    assert "each `epoch`" in text
    assert named == {f"{message}.{name}" for message, name in fields if name != "epoch"}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.__name__)
def test_each_word_is_documented(words: type[StrEnum]) -> None:
    documented = table(words.__name__)
    assert [row[0] for row in documented] == [f"`{word.value}`" for word in words]
    assert all(row[1] for row in documented)


def test_the_kinds_of_frames_and_artifact_files_are_documented() -> None:
    assert [row[:2] for row in table("Kinds of frames")] == [[str(int(k)), k.name.lower()] for k in Kind]
    assert [row[2] for row in table("ArtifactKind")] == [f"`{kind.file_name}`" for kind in ArtifactKind]


def test_the_limits_are_documented() -> None:
    def row(limits: codec.Limits) -> list[str]:
        return [f"{limits.max_bytes:,}", f"{limits.max_items:,}", str(limits.max_depth)]

    documented = {cells[0]: cells[1:] for cells in table("1. Encoding")}
    assert documented["payload of HeadRecord, PeerRecord"] == row(RECORD_LIMITS)
    assert documented["payload of CheckpointManifest, RunManifest"] == row(MANIFEST_LIMITS)
    assert documented["payload of Epoch"] == row(EPOCH_LIMITS)
    assert documented["payload of Succession"] == row(SUCCESSION_LIMITS)
    assert f"bytes 0..{MAX_EPOCH_BYTES} or null" in DOCUMENT
    assert documented["payload of Submission"] == row(SUBMISSION_LIMITS)
    assert documented["payload of ProbeAnswer"] == row(PROBE_LIMITS)
    assert documented["invite"] == row(invite.LIMITS)
    assert documented["frame"][1] == f"{codec.Limits(max_bytes=1).max_items:,}"
    assert f"{blob.MAX_REPLY_BYTES:,}" in DOCUMENT
    assert f"{blob.MAX_REQUEST_BYTES:,} bytes" in DOCUMENT
    assert (WORK_PROTOCOL in DOCUMENT, blob.BLOB_PROTOCOL in DOCUMENT) == (True, True)


def vectors() -> dict[str, str]:
    """Name → value of the lines `name = value` in the document's vector blocks; long values go over several lines."""
    found: dict[str, str] = {}
    for block in re.findall(r"^```vector\n(.*?)^```", DOCUMENT, flags=re.MULTILINE | re.DOTALL):
        for entry in re.split(r"\n(?! )", block.strip()):
            name, _, value = entry.partition("=")
            found[name.strip()] = "".join(value.split())
    return found


def expected_vectors() -> dict[str, str]:
    """The document's vectors, made by the code."""
    signer = Identity.from_seed(bytes(range(32)))
    value = {"b": [1, -1, 300], "a": None, "é": 1.5, "aa": b"\x00\x01", "c": {"t": True}}
    head = HeadRecord(
        run_id="0123456789abcdef" * 2, policy_version=7, manifest_digest=bytes(32), issued_at=1_700_000_000.5
    )
    raw = envelope.seal(signer, head)
    fields = codec.decode(raw, codec.SMALL)
    kind, payload = fields["type"].encode(), fields["payload"]
    signed = b"echo-swarm/1" + len(kind).to_bytes(4, "little") + kind + len(payload).to_bytes(8, "little") + payload
    verify(signer.public_key, signed, fields["sig"])
    address = f"/ip4/203.0.113.7/tcp/31337/p2p/{signer.peer_id}"
    joined = invite.Invite(run=head.run_id, key=signer.public_key, boot=(address,))
    frame = b"".join(encode_frame(Kind.CALL, 1, "status", StatusRequest(run_id=head.run_id).to_wire()))
    ids = codec.pack_u32([1, 258, 4_294_967_295])
    return {
        "value": codec.encode(value).hex(),
        "seed": signer.seed.hex(),
        "public_key": signer.public_key.hex(),
        "peer_id": signer.peer_id,
        "payload": payload.hex(),
        "signed": signed.hex(),
        "signature": fields["sig"].hex(),
        "envelope": raw.hex(),
        "digest": hashlib.sha256(payload).hexdigest(),
        "boot": address,
        "invite": str(joined),
        "frame": (len(frame).to_bytes(4, "little") + frame).hex(),
        "ids": ids.hex(),
        "logprobs": codec.pack_f32([-0.5, 0.0]).hex(),
        "prompt_digest": prompt_digest(ids).hex(),
        "head_topic": head_topic(head.run_id),
        "peers_topic": peers_topic(head.run_id),
    }


def test_the_vectors_are_what_the_code_makes() -> None:
    assert vectors() == expected_vectors()


def test_the_vectors_are_read_back() -> None:
    found = vectors()
    assert envelope.unseal(bytes.fromhex(found["envelope"]), HeadRecord, codec.SMALL).peer_id == found["peer_id"]
    assert invite.parse(found["invite"]).boot == (found["boot"],)
