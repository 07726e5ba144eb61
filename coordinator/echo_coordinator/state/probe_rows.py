"""Rows of probes: what is asked, what the trainer says to it, what peers answered."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from echo_coordinator.state.probe_rules import Gap
from echo_swarm.codec import pack_f32, unpack_f32
from echo_swarm.identity import PeerId
from echo_swarm.probe import ProbeItem, ProbeVerdict

KEPT_ANSWERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """One answer and its verdict."""

    at: float
    """Seconds since 1970."""
    peer: PeerId
    backend: str
    precision: str
    version: int
    """That the peer names."""
    verdict: ProbeVerdict
    detail: str
    gap: Gap | None
    confirmed: bool
    logprobs: bytes
    """`codec.pack_f32`."""


def insert_items(db: Connection, items: Sequence[ProbeItem]) -> None:
    """Write what is asked, in place of what was."""
    db.execute("DELETE FROM probe_items")
    db.execute("DELETE FROM probe_references")
    db.executemany(
        "INSERT INTO probe_items VALUES (?, ?, ?)",
        [(place, item.prompt_ids, item.completion_ids) for place, item in enumerate(items)],
    )


def load_items(db: Connection) -> tuple[ProbeItem, ...]:
    """Return what is asked; empty before it was chosen."""
    rows = db.execute("SELECT prompt_ids, completion_ids FROM probe_items ORDER BY place")
    return tuple(ProbeItem(prompt_ids=prompt, completion_ids=completion) for prompt, completion in rows)


def insert_reference(db: Connection, version: int, logprobs: "array[float]", gone: Iterable[int]) -> None:
    """Write the trainer's values at a version and delete those of versions that are `gone`."""
    db.execute("INSERT OR REPLACE INTO probe_references VALUES (?, ?)", (version, pack_f32(logprobs)))
    db.executemany("DELETE FROM probe_references WHERE version = ?", [(old,) for old in gone])


def load_references(db: Connection) -> Mapping[int, "array[float]"]:
    """Return the trainer's values by version, the lowest first."""
    rows = db.execute("SELECT version, logprobs FROM probe_references ORDER BY version")
    return {version: unpack_f32(values) for version, values in rows}


def insert_answer(db: Connection, answer: StoredAnswer) -> None:
    """Write an answer and forget the oldest beyond KEPT_ANSWERS."""
    gap = answer.gap
    cursor = db.execute(
        "INSERT INTO probe_answers (at, peer, backend, precision, version, verdict, detail, gap_mean, gap_most, "
        "gap_bias, confirmed, logprobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            answer.at,
            answer.peer,
            answer.backend,
            answer.precision,
            answer.version,
            answer.verdict.value,
            answer.detail,
            gap and gap.mean,
            gap and gap.most,
            gap and gap.bias,
            answer.confirmed,
            answer.logprobs,
        ),
    )
    db.execute("DELETE FROM probe_answers WHERE answer_id <= ?", ((cursor.lastrowid or 0) - KEPT_ANSWERS,))


def load_answers(db: Connection) -> list[StoredAnswer]:
    """Return all answers kept, the oldest first."""
    rows = db.execute(
        "SELECT at, peer, backend, precision, version, verdict, detail, gap_mean, gap_most, gap_bias, confirmed, "
        "logprobs FROM probe_answers ORDER BY answer_id"
    )
    return [
        StoredAnswer(
            at=at,
            peer=PeerId(peer),
            backend=backend,
            precision=precision,
            version=version,
            verdict=ProbeVerdict(verdict),
            detail=detail,
            gap=None if mean is None else Gap(mean=mean, most=most, bias=bias),
            confirmed=bool(confirmed),
            logprobs=logprobs,
        )
        for at, peer, backend, precision, version, verdict, detail, mean, most, bias, confirmed, logprobs in rows
    ]
