"""The health of a run, as the coordinator reports it and every command line shows it.

`RunStatus.model_dump(mode="json")` is what `--json` prints. Readers ignore fields they do not know, so that an older
node can show a newer coordinator's status.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class NodeStatus(_Part):
    """One peer, once, however often it restarted."""

    peer_id: str
    role: str
    live: bool
    """Heard from within three beats."""
    last_seen_s: float
    """Seconds since it was last heard from."""
    backend: str = ""
    build: str = ""
    precision: str = ""
    device: str = ""
    batch: int = 0
    held_version: int | None = None
    """In its own words."""
    confirmed_version: int | None = None
    """That a probe last singled out as the one it computes with."""
    probe: str = ""
    """What its last probe showed, a word of ProbeVerdict; empty before the first."""
    gap: float | None = None
    """Mean |log p of its backend - log p of the trainer| over the tokens of its last probe, nats."""
    set_aside: bool = False
    """It gets no work until a probe fits."""
    standing: str = ""
    """By its audits: `new`, `proven`, `probation` (one completion at a time) or `suspended` (no work); or `banned`."""
    standing_detail: str = ""
    """What its last failed audit showed, a word of AuditVerdict first; empty if none failed. Of a ban, the reason."""
    suspended_s: float = 0.0
    """Until it may have work again."""
    audits_clean: int = 0
    """In a row."""
    state: str = ""
    """In its own words: what it does or waits for."""
    in_flight: int = 0
    """Completions leased to it now."""
    accepted: int = 0
    rejected: dict[str, int] = Field(default_factory=dict[str, int])
    """By reason code."""
    tokens_per_s: float = 0.0
    bytes_served: int = 0
    """Pieces it uploaded to other nodes."""
    bytes_fetched_peers: int = 0
    """Pieces it downloaded from other nodes."""
    outbound_only: bool = True


class Activity(_Part):
    """What the trainer does or waits for, and since when."""

    state: str
    """`training`, `publishing`, or the reason of the wait."""
    detail: str = ""
    since_s: float = 0.0
    normal: bool = True
    """False when a person should look."""


class BufferStatus(_Part):
    """How full the replay buffer is, in groups."""

    in_flight: int = 0
    """Begun: waiting for a node, being sampled, or being scored."""
    ready: int = 0
    capacity: int = 0
    """(max_staleness + 1) × groups per update: in flight, ready and being trained together never exceed it."""
    training: int = 0
    bytes: int = 0


class UpdateStatus(_Part):
    """One update, in short; the whole metrics are in the run's database and metrics.jsonl."""

    policy_version: int
    reward_mean: float | None = None
    no_signal_share: float | None = None
    gradient_norm: float | None = None
    ratio_min: float | None = None
    ratio_mean: float | None = None
    ratio_max: float | None = None
    clipped_share: float | None = None
    seconds: float | None = None


class EvaluationStatus(_Part):
    """Held-out evaluation of one version under greedy leases."""

    policy_version: int
    accuracy: float
    """Mean reward over the prompts."""
    prompts: int


class AuditStatus(_Part):
    """What the trainer recomputed of what peers claimed. An audit is of one peer's completions of one prompt."""

    clean: int = 0
    failed: int = 0
    not_made: int = 0
    """By the training side's own fault."""
    missed: int = 0
    """Drawn, and trained on before there was time."""
    taken_back: int = 0
    """Completions of peers that failed."""
    trainer_share: float = 0.0
    """Of all time since the coordinator started, in which audits kept a batch waiting."""
    free_s: float = 0.0
    """Seconds of audits while the trainer had nothing else to do."""


class ClassStatus(_Part):
    """What probes measured of the peers with one backend and precision. Gaps are nats a token, to the trainer."""

    backend: str
    precision: str
    peers: int = 0
    """Live."""
    measured: int = 0
    """Of these, at the newest process that answered."""
    set_aside: int = 0
    probes: int = 0
    """Answers that fitted, ever."""
    version: int | None = None
    """Newest version measured; the next three are of it."""
    gap_mean: float | None = None
    gap_max: float | None = None
    """Of a single token."""
    gap_bias: float | None = None
    """Mean of node - trainer, with its sign."""
    trend: list[tuple[int, float]] = Field(default_factory=list[tuple[int, float]])
    """(version, mean gap) of the last versions measured, oldest first."""
    trained_gap: float | None = None
    """The same mean over the tokens of the newest update that were sampled with the version it started from."""


class FaultStatus(_Part):
    """A source of pieces that was at fault, and how many peers say so. One peer alone may be wrong, or lie itself."""

    source: str
    """Peer id, or URL of a mirror."""
    reason: str
    """A word of FaultReason."""
    named_by: int
    lie: bool = False
    """It cannot happen to a source that does what it should."""


class VersionTransfers(_Part):
    """How one version reached those who fetch it. Bytes are verified ones, added up over what peers say."""

    policy_version: int
    is_base: bool = False
    """It also has the model to which the run's adapters apply."""
    timed: bool = False
    """It was published since the coordinator started; else the times and `bytes_served` are not known."""
    age_s: float | None = None
    """Since it was published."""
    nodes: int = 0
    """Inference nodes that were live then."""
    had: int = 0
    """Of these, those that have said that they have it."""
    half_s: float | None = None
    """From publication until the word of half of them had come; None while it has not."""
    all_s: float | None = None
    told: int = 0
    """Peers that said how it came to them, seeders and newcomers included; the rest is about these."""
    whole: int = 0
    """Of these, those to which a file of it came whole."""
    bytes_coordinator: int = 0
    bytes_peers: int = 0
    bytes_mirrors: int = 0
    bytes_deltas: int = 0
    """Of these three: of changes, not of whole files."""
    bytes_made: int = 0
    """Made of an older version and changes."""
    bytes_disk: int = 0
    """Had been on disk before."""
    bytes_served: int | None = None
    """Sent by the coordinator, by its own count, wrong and unfinished transfers of whomever included."""
    slowest_s: float = 0.0
    """That one file took, by the clock of its peer."""
    failures: int = 0
    faults: list[FaultStatus] = Field(default_factory=list[FaultStatus])
    """Sources at fault, lies first, then those whom most peers name."""
    faults_left_out: int = 0


class StreamStatus(_Part):
    """Streams of peers that one of the coordinator's services turned away or ended since it started, by cause."""

    crowded_streams: int = 0
    """Slow with what they held while the memory of all peers together was full and others waited for it."""
    evicted_streams: int = 0
    """Not in use while another peer needed the place."""
    refused_streams: int = 0
    """Beyond the number that a peer, or all together, may have."""
    malformed_streams: int = 0
    """The peer broke the protocol."""


class RunStatus(_Part):
    """Everything `status` shows."""

    run_id: str
    name: str
    mode: str
    max_staleness: int
    state: Literal["starting", "running", "paused", "stopping", "stopped", "finished"]
    policy_version: int | None = None
    version_age_s: float | None = None
    uptime_s: float = 0.0
    updates: int = 0
    updates_planned: int | None = None
    model_parameters: int = 0
    trainer: Activity
    trainer_busy_share: float = 0.0
    """Share of the time since the first batch was ready in which the trainer worked."""
    waiting_s: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds the trainer waited, by cause."""
    buffer: BufferStatus = BufferStatus()
    nodes: list[NodeStatus] = Field(default_factory=list[NodeStatus])
    classes: list[ClassStatus] = Field(default_factory=list[ClassStatus])
    """Backends and precisions, and how far each is from the trainer."""
    audits: AuditStatus = AuditStatus()
    accepted: int = 0
    rejected: dict[str, int] = Field(default_factory=dict[str, int])
    dropped_groups: dict[str, int] = Field(default_factory=dict[str, int])
    staleness: dict[int, int] = Field(default_factory=dict[int, int])
    """Trained trajectories by staleness in versions."""
    trajectories_per_s: float = 0.0
    tokens_per_s: float = 0.0
    recent_updates: list[UpdateStatus] = Field(default_factory=list[UpdateStatus])
    evaluations: list[EvaluationStatus] = Field(default_factory=list[EvaluationStatus])
    bytes_served_coordinator: int = 0
    bytes_served_peers: int = 0
    streams: dict[str, StreamStatus] = Field(default_factory=dict[str, StreamStatus])
    """By service: `work` (leases and pushes) and `pieces` (of versions)."""
    transfers: list[VersionTransfers] = Field(default_factory=list[VersionTransfers])
    """The last versions, the newest first."""
    transfers_refused: dict[str, int] = Field(default_factory=dict[str, int])
    """What peers said of transfers and cannot be, by reason."""
    key_changes: int = 0
    """How often the run's key was replaced."""
    key_changed_at: float | None = None
    """The last time, in seconds since 1970."""
    failed_conversions: int = 0
    """Files for llama.cpp that could not be made; their versions were published without them."""
    warnings: list[str] = Field(default_factory=list[str])
