"""Trajectories, manifests, work and records: bounds, and the arithmetic of pieces."""

import hashlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm import codec
from echo_swarm.envelope import seal, unseal
from echo_swarm.errors import MalformedMessage
from echo_swarm.identity import Identity
from echo_swarm.manifest import (
    MANIFEST_LIMITS,
    MAX_ARTIFACT_BYTES,
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    Artifact,
    ArtifactKind,
    CheckpointManifest,
    RunManifest,
)
from echo_swarm.records import RECORD_LIMITS, HeadRecord, PeerRecord
from echo_swarm.trajectory import (
    MAX_TOKENS,
    MAX_TRAJECTORIES,
    SUBMISSION_LIMITS,
    BehaviourPolicy,
    FinishReason,
    Submission,
    Trajectory,
    prompt_digest,
)
from echo_swarm.transfers import MAX_FAULTS, MAX_TRANSFERS, FaultReason, SourceBytes, SourceFault, Transfer
from echo_swarm.wire import Message
from echo_swarm.work import Beat, Lease, LeaseMember, LeaseReply, Push, Role, Sampling, WaitReason

SIGNER = Identity.from_seed(bytes(32))
TOP = 2**63 - 1


def artifact(**changes: Any) -> dict[str, Any]:
    size, piece = changes.get("size_bytes", 5_000_000), changes.get("piece_bytes", 1 << 20)
    fields: dict[str, Any] = {
        "kind": "safetensors",
        "precision": "float32",
        "size_bytes": size,
        "digest": bytes(32),
        "piece_bytes": piece,
        "piece_digests": bytes(32 * math.ceil(size / piece)),
        "layout_digest": bytes(32),
        "base_digest": None,
    }
    return fields | changes


def trajectory(**changes: Any) -> dict[str, Any]:
    policy = BehaviourPolicy(
        oldest_version=TOP,
        newest_version=TOP,
        artifact_digest=bytes(32),
        backend="b" * 64,
        build="é" * 128,
        precision="p" * 64,
    )
    fields = Trajectory(
        lease_id=bytes(16),
        group_id=TOP,
        member=2**32 - 1,
        prompt_digest=bytes(32),
        policy=policy,
        temperature=1.0,
        seed=TOP,
        finish_reason=FinishReason.STOP,
        token_ids=codec.pack_u32(range(4)),
        logprobs=codec.pack_f32([-1.0] * 4),
    )
    return fields.to_wire() | changes


def lease(**changes: Any) -> dict[str, Any]:
    fields = Lease(
        lease_id=bytes(16),
        group_id=1,
        prompt_ids=codec.pack_u32([1, 2]),
        members=(LeaseMember(member=0, seed=1),),
        sampling=Sampling(temperature=1.0, max_tokens=8),
        min_version=0,
        max_version=None,
        expires_in_s=60.0,
    )
    return fields.to_wire() | changes


def refused(kind: type[Message], value: object, field: str) -> None:
    with pytest.raises(MalformedMessage, match=field):
        kind.from_wire(value)


@given(st.integers(1, 20 * MAX_PIECE_BYTES), st.integers(MIN_PIECE_BYTES, MAX_PIECE_BYTES))
def test_pieces_cover_the_file_exactly(size: int, piece: int) -> None:
    cut = Artifact.from_wire(artifact(size_bytes=size, piece_bytes=piece))
    lengths = [cut.piece_length(i) for i in range(cut.piece_count)]
    assert sum(lengths) == size
    assert all(length == piece for length in lengths[:-1])
    assert 1 <= lengths[-1] <= piece


def test_each_piece_has_its_own_digest_and_no_other_index_has_one() -> None:
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
    cut = Artifact.from_wire(artifact(piece_digests=b"".join(digests)))
    assert [cut.piece_digest(i) for i in range(5)] == digests
    for index in (-1, 5, 2**40):
        with pytest.raises(IndexError):
            cut.piece_digest(index)
        with pytest.raises(IndexError):
            cut.piece_length(index)


@pytest.mark.parametrize("digests", [b"", bytes(32 * 4), bytes(32 * 6), bytes(32 * 5 + 1), bytes(32 * 5 - 1)])
def test_the_number_of_piece_digests_must_fit(digests: bytes) -> None:
    refused(Artifact, artifact(piece_digests=digests), "piece digests")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size_bytes", 0),
        ("size_bytes", MAX_ARTIFACT_BYTES + 1),
        ("piece_bytes", 0),
        ("piece_bytes", MIN_PIECE_BYTES - 1),
        ("piece_bytes", MAX_PIECE_BYTES + 1),
        ("digest", bytes(31)),
        ("base_digest", b""),
        ("piece_digests", bytes((2 << 20) + 32)),
    ],
)
def test_an_artifact_out_of_bounds_is_refused(field: str, value: object) -> None:
    fields = artifact() | {field: value}
    refused(Artifact, fields, field)


@pytest.mark.parametrize(
    "kind",
    ["bin", "pt", "pkl", "../x", "/etc/x", "NUL", "a" * 300, "model.safetensors", "SAFETENSORS", "", b"gguf", 0, None],
)
def test_only_known_kinds_of_artifact_exist(kind: object) -> None:
    refused(Artifact, artifact(kind=kind), "Artifact.kind")


def test_each_kind_has_one_fixed_plain_file_name() -> None:
    names = [kind.file_name for kind in ArtifactKind]
    assert len(set(names)) == len(names)
    assert all("/" not in name and name == name.lower() for name in names)


def test_a_manifest_names_no_file() -> None:
    refused(Artifact, artifact(file_name="x.bin"), "file_name")


def test_a_manifest_of_the_largest_size_survives() -> None:
    piece = MAX_PIECE_BYTES
    most = (2 << 20) // 32  # piece digests of one artifact
    assert piece * most < MAX_ARTIFACT_BYTES
    manifest = CheckpointManifest.from_wire(
        {
            "run_id": "0" * 32,
            "policy_version": TOP,
            "parent_digest": bytes(32),
            "issued_at": 1.0,
            "expires_at": 2.0,
            "artifacts": [artifact(size_bytes=piece * most, piece_bytes=piece)]
            + [artifact(base_digest=bytes(32))] * 15,
        }
    )
    raw = seal(SIGNER, manifest)
    assert unseal(raw, CheckpointManifest, MANIFEST_LIMITS).message == manifest
    assert manifest.artifact(ArtifactKind.SAFETENSORS) == manifest.artifacts[0]
    assert manifest.artifact(ArtifactKind.GGUF) is None


@pytest.mark.parametrize(
    ("field", "value"), [("artifacts", []), ("artifacts", [artifact()] * 17), ("issued_at", math.nan)]
)
def test_a_checkpoint_manifest_out_of_bounds_is_refused(field: str, value: object) -> None:
    fields = {
        "run_id": "0" * 32,
        "policy_version": 0,
        "parent_digest": None,
        "issued_at": 1.0,
        "expires_at": 2.0,
        "artifacts": [artifact()],
    }
    CheckpointManifest.from_wire(fields)
    refused(CheckpointManifest, fields | {field: value}, field)


RUN: dict[str, Any] = {
    "protocol": 1,
    "run_id": "0" * 32,
    "name": "n" * 64,
    "created_at": 0.0,
    "publisher_key": bytes(32),
    "mode": "async",
    "max_staleness": 4,
    "model_config_json": "{" + " " * 65_534 + "}",
    "parameters": TOP,
    "vocabulary_size": 2**31,
    "end_token_ids": [2**32 - 1] * 64,
    "max_prompt_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "environment": "e",
    "description": "d" * 1024,
}


def test_a_run_manifest_of_the_largest_size_survives() -> None:
    manifest = RunManifest.from_wire(RUN)
    assert unseal(seal(SIGNER, manifest), RunManifest, MANIFEST_LIMITS).message == manifest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 2),
        ("mode", "async "),
        ("mode", b"async"),
        ("max_staleness", -1),
        ("max_staleness", 1025),
        ("vocabulary_size", 0),
        ("vocabulary_size", 2**31 + 1),
        ("end_token_ids", []),
        ("end_token_ids", [-1]),
        ("end_token_ids", [True]),
        ("end_token_ids", [1.0]),
        ("max_prompt_tokens", 0),
        ("max_completion_tokens", MAX_TOKENS + 1),
        ("model_config_json", "x" * 65_537),
        ("name", ""),
        ("description", "x" * 1025),
    ],
)
def test_a_run_manifest_out_of_bounds_is_refused(field: str, value: object) -> None:
    refused(RunManifest, RUN | {field: value}, field)


def test_a_submission_of_the_most_trajectories_survives() -> None:
    full = Submission.from_wire({"run_id": "f" * 32, "trajectories": [trajectory()] * MAX_TRAJECTORIES})
    assert unseal(seal(SIGNER, full), Submission, SUBMISSION_LIMITS).message == full


def test_a_submission_of_the_longest_completion_survives() -> None:
    longest = trajectory(token_ids=bytes(4 * MAX_TOKENS), logprobs=bytes(4 * MAX_TOKENS))
    full = Submission.from_wire({"run_id": "f" * 32, "trajectories": [longest]})
    raw = seal(SIGNER, full)
    assert unseal(raw, Submission, SUBMISSION_LIMITS).message == full
    assert Push(envelope=raw).envelope == raw


@pytest.mark.parametrize("count", [0, MAX_TRAJECTORIES + 1])
def test_a_submission_of_no_or_too_many_trajectories_is_refused(count: int) -> None:
    refused(Submission, {"run_id": "f" * 32, "trajectories": [trajectory()] * count}, "trajectories")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_id", bytes(15)),
        ("group_id", -1),
        ("group_id", 2**63),
        ("member", 2**32),
        ("prompt_digest", bytes(33)),
        ("temperature", -0.1),
        ("temperature", 10.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("seed", 2**63),
        ("seed", -1),
        ("finish_reason", "eos"),
        ("finish_reason", b"stop"),
        ("token_ids", [1, 2]),
        ("token_ids", "text"),
        ("token_ids", bytes(4 * MAX_TOKENS + 4)),
        ("logprobs", None),
        ("logprobs", bytes(4 * MAX_TOKENS + 4)),
        ("policy", None),
        ("policy", {"oldest_version": 1}),
    ],
)
def test_a_trajectory_out_of_bounds_is_refused_by_field(field: str, value: object) -> None:
    refused(Trajectory, trajectory(**{field: value}), field)


@pytest.mark.parametrize("claim", ["reward", "text", "score", "advantage"])
def test_a_trajectory_has_no_room_for_claims_or_text(claim: str) -> None:
    refused(Trajectory, trajectory(**{claim: 1.0}), claim)


def test_a_prompt_digest_is_that_of_the_packed_ids() -> None:
    assert prompt_digest(codec.pack_u32([1, 256])) == hashlib.sha256(bytes.fromhex("0100000000010000")).digest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("members", []),
        ("members", [{"member": 0, "seed": 1}] * (MAX_TRAJECTORIES + 1)),
        ("members", [{"member": 0, "seed": 2**63}]),
        ("sampling", {"temperature": 1.0, "max_tokens": 0}),
        ("sampling", {"temperature": 1.0, "max_tokens": 1, "top_p": 0.9}),
        ("min_version", None),
        ("max_version", -1),
        ("expires_in_s", 0),
        ("expires_in_s", math.nan),
        ("expires_in_s", 86_401.0),
        ("prompt_ids", bytes(4 * MAX_TOKENS + 4)),
    ],
)
def test_a_lease_out_of_bounds_is_refused_by_field(field: str, value: object) -> None:
    Lease.from_wire(lease())
    refused(Lease, lease(**{field: value}), field)


def test_a_reply_without_work_says_why() -> None:
    reply = {"leases": [], "head_version": 3, "wait_reason": "staleness_limit", "retry_after_s": 0.5}
    assert LeaseReply.from_wire(reply).wait_reason is WaitReason.STALENESS_LIMIT
    refused(LeaseReply, reply | {"leases": [lease()] * 257}, "leases")
    refused(LeaseReply, reply | {"retry_after_s": 601}, "retry_after_s")


def test_records_of_the_largest_size_survive() -> None:
    peer = PeerRecord(
        run_id="0" * 32,
        role=Role.SEEDER,
        addresses=tuple("/" + "a" * 400 for _ in range(16)),
        held_version=TOP,
        artifact_digests=(bytes(32),) * 16,
        issued_at=1.0,
    )
    head = HeadRecord(run_id="0" * 32, policy_version=TOP, manifest_digest=bytes(32), issued_at=1.0)
    assert unseal(seal(SIGNER, peer), PeerRecord, RECORD_LIMITS).message == peer
    assert unseal(seal(SIGNER, head), HeadRecord, RECORD_LIMITS).message == head
    refused(PeerRecord, peer.to_wire() | {"role": "king"}, "role")
    refused(PeerRecord, peer.to_wire() | {"addresses": ["x"] * 17}, "addresses")


BEAT = {
    "lease_ids": [],
    "held_version": 3,
    "state": "sampling",
    "tokens_per_s": 1.0,
    "bytes_served": 0,
    "bytes_fetched_peers": 0,
}


def _transfer(faults: int = 0) -> dict[str, Any]:
    return Transfer(
        policy_version=TOP,
        digest=bytes(32),
        whole=True,
        fetched=SourceBytes(coordinator=TOP, peers=TOP, mirrors=TOP),
        deltas=SourceBytes(coordinator=0, peers=0, mirrors=0),
        made_bytes=TOP,
        disk_bytes=TOP,
        seconds=4e9,
        failures=2**32 - 1,
        faults=(SourceFault(source="x\x1b[2J", reason=FaultReason.SILENT),) * faults,
    ).to_wire()


def test_the_beat_of_a_node_that_tells_nothing_of_transfers_is_valid():
    assert Beat.from_wire(BEAT).transfers == ()


def test_transfers_are_read_back_and_bounded_in_number_and_in_what_they_name():
    said = {**BEAT, "transfers": [_transfer(MAX_FAULTS)] * MAX_TRANSFERS}
    read = Beat.from_wire(codec.decode(codec.encode(said), codec.Limits(max_bytes=1 << 16)))
    assert len(read.transfers) == MAX_TRANSFERS and read.transfers[0].faults[0].source == "x?[2J"
    for wrong in ([_transfer()] * (MAX_TRANSFERS + 1), [{**_transfer(), "faults": _transfer(1)["faults"] * 9}]):
        with pytest.raises(MalformedMessage):
            Beat.from_wire({**BEAT, "transfers": wrong})
    for name, value in (("policy_version", -1), ("whole", 1), ("seconds", float("nan")), ("made_bytes", TOP + 1)):
        with pytest.raises(MalformedMessage):
            Beat.from_wire({**BEAT, "transfers": [{**_transfer(), name: value}]})
