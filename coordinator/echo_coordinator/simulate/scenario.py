"""What is simulated: a run's settings, a swarm, a trainer, and what goes wrong. One JSON object replays it."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.errors import UsageError

Share = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[float, Field(ge=0, le=86_400)]
LiarKind = Literal[
    "hoarder", "replay", "stale", "future", "wrong_prompt", "wrong_seed", "wrong_model", "early", "thief", "garbage"
]

LIAR_KINDS: tuple[LiarKind, ...] = get_args(LiarKind)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Faults(_Part):
    """What goes wrong. Rates are for each hour; each is drawn from the seed."""

    delay_s: Duration = 0.0
    """Mean one-way delay between a node and the coordinator; each node has its own, and each message varies."""
    loss: Share = 0.0
    """Of calls: the request or the reply is lost, and the connection with it."""
    duplicate: Share = 0.0
    """Of requests that arrive twice."""
    partitions: float = 0.0
    """How often a part of the nodes is cut off."""
    partition_s: Duration = 60.0
    """How long that lasts, on average."""
    deaths: float = 0.0
    """How often each node dies, with what it held in memory; it comes back with its outbox."""
    absent_s: Duration = 60.0
    """How long a node stays away, on average. A tenth of them are back at once, within three beats."""
    crashes: float = 0.0
    """How often the coordinator is killed, in the middle of whatever it does."""
    down_s: Duration = 10.0
    """How long it is away, on average."""
    trainer_failures: Share = 0.0
    """Of updates that fail and have to be made again."""
    unscorable: Share = 0.0
    """Of completions for which the verifier fails."""
    skew_s: float = 0.0
    """Standard deviation of nodes' wall clocks."""
    drift: float = 0.0
    """Standard deviation of the rate of nodes' clocks."""
    disk_s: Duration = 0.0
    """Mean time of a commit of the coordinator."""
    pauses: float = 0.0
    """How often the run's owner pauses it, for `down_s` on average."""
    full_disks: float = 0.0
    """How often the coordinator's disk takes no write, for `down_s` on average. What cannot go on without ends the
    process, and it is started again."""
    liars: dict[LiarKind, int] = Field(default_factory=dict[LiarKind, int])
    """How many of the nodes lie, and how."""


class Swarm(_Part):
    """The nodes."""

    nodes: Annotated[int, Field(ge=1, le=4096)] = 20
    speed: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (50.0, 200.0)
    """Tokens a second of the slowest and the fastest, all places together; the others lie evenly between, on a
    logarithmic scale."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Of each node, instead of `speed`."""
    places: Annotated[int, Field(ge=1, le=4096)] = 8
    """Completions that a node samples at once."""
    tokens: Annotated[float, Field(gt=0)] = 200.0
    """Mean length of a completion, before the run's `max_tokens` cuts it."""
    spread: Annotated[float, Field(ge=0, le=3)] = 0.5
    """Sigma of the lognormal lengths; 0: all are equal."""
    fetch_s: Duration = 5.0
    """From hearing of a version to holding it, on average."""
    load_s: Duration = 1.0
    """To load it into the backend, once what runs is done."""


class TrainerModel(_Part):
    """The training side."""

    step_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """One update."""
    publish_s: Duration = 2.0
    """From an update to its version being fetchable."""
    reward: Share = 0.5
    """Chance that a completion has reward 1 rather than 0."""


class Scenario(_Part):
    """One simulation."""

    seed: int = 0
    duration_s: Annotated[float, Field(gt=0, le=86_400 * 30)] = 3600.0
    swarm: Swarm = Swarm()
    trainer: TrainerModel = TrainerModel()
    work: WorkSettings = WorkSettings()
    audits: AuditSettings = AuditSettings()
    standing: StandingSettings = StandingSettings()
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Versions between two evaluations; 0: none."""
    eval_prompts: Annotated[int, Field(ge=1)] = 200
    faults: Faults = Faults()


def faults_named(name: str, nodes: int) -> Faults:
    """Return a set of faults by its name.

    Raises:
        UsageError: no such set.

    """
    if name == "none":
        return Faults()
    home = Faults(
        delay_s=0.08,
        loss=0.001,
        duplicate=0.001,
        partitions=1,
        deaths=0.5,
        absent_s=120,
        skew_s=2,
        drift=1e-4,
        disk_s=0.005,
    )
    if name == "home":
        return home
    if name == "hostile":
        each = max(1, nodes // 40)
        return home.model_copy(
            update={
                "loss": 0.01,
                "duplicate": 0.01,
                "partitions": 6,
                "deaths": 2.0,
                "crashes": 1.0,
                "trainer_failures": 0.02,
                "unscorable": 0.005,
                "skew_s": 20.0,
                "drift": 0.01,
                "disk_s": 0.02,
                "liars": {kind: each for kind in LIAR_KINDS[: max(1, nodes // 2)]},
            }
        )
    raise UsageError(f"there are no faults named {name!r}; choose none, home or hostile")
