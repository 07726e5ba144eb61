"""Settings of leases, groups, staleness and the replay buffer, checked when the run starts."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from echo_swarm.errors import SettingsError

MEMBER_OVERHEAD_BYTES = 1024
"""What a stored completion takes beside its ids and log-probabilities (8 bytes a token)."""


class WorkSettings(BaseModel):
    """How work is cut up, handed out, judged and consumed.

    Raises:
        SettingsError: settings that do not fit together, or sampling that the trainer could not correct for.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    mode: Literal["sequential", "async"] = "async"
    """`sequential`: every completion comes from the policy being updated. `async`: nobody waits."""
    max_staleness: int = Field(default=2, ge=0, le=1024)
    """Versions; 0 exactly when the mode is sequential."""
    group_size: int = Field(default=8, ge=2, le=1024)
    """Completions of one prompt that are compared with each other."""
    groups_per_update: int = Field(default=16, ge=1, le=4096)
    """Prompts an update trains on."""
    min_group_members: int | None = Field(default=None, ge=2)
    """A group with fewer usable members is dropped; half of `group_size`, at least 2, when not set."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """How often a slot is tried before it is given up."""
    no_signal: Literal["keep", "replace"] = "replace"
    """What becomes of groups whose rewards are all equal."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """All sampling seeds derive from it. A small one can be guessed from the seed of a lease, and with it what others
    will sample: `init` draws one that cannot."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Of training completions; evaluation is greedy."""
    max_tokens: int = Field(default=512, ge=1, le=1 << 17)
    """Longest completion."""
    top_p: float = 1.0
    """Any other value is refused: it changes the distribution in a way that the trainer cannot correct for."""
    top_k: int = 0
    """As `top_p`."""
    min_p: float = 0.0
    """As `top_p`."""
    lease_s: float = Field(default=60.0, gt=0, le=86_400)
    """A lease that is not renewed by a beat ends after this."""
    lease_max_s: float = Field(default=1800.0, gt=0, le=86_400)
    """No beat keeps a lease alive for longer than this in all."""
    lease_target_s: float = Field(default=20.0, gt=0)
    """A node gets at once about as much as it says to sample in this time. Work that takes four times as long, and four
    times as long as the run's mean, counts as late: the node may hold less."""
    probe_members: int = Field(default=4, ge=1)
    """Completions that a node may hold before it has delivered any, while others could take them too. What it delivers
    raises this, what it fails to deliver lowers it."""
    beat_s: float = Field(default=3.0, gt=0, le=600)
    """Nodes report this often; one silent for three beats is gone."""
    max_in_flight_per_peer: int = Field(default=4096, ge=1)
    """Completions leased to one peer at a time."""
    buffer_bytes: int = Field(default=4 << 30, ge=1)
    """Upper bound of completions that are stored and not yet trained; admission keeps below it."""
    pending_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Pushes taken but not yet on disk; beyond this, nodes are told to come back."""
    retain_updates: int = Field(default=8, ge=1)
    """Completions are deleted this many updates after they were trained or dropped."""
    retain_leases: int = Field(default=1000, ge=1)
    """Leases are deleted this many updates after their group was trained or dropped. Until then a node that was cut off
    and pushes its work again hears how it was judged the first time; after that, that it is not known any more."""

    @model_validator(mode="before")
    @classmethod
    def _sequential_means_zero(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mode") == "sequential":
            return {"max_staleness": 0, **values}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.max_staleness == 0) != (self.mode == "sequential"):
            raise SettingsError(
                f"max_staleness = {self.max_staleness} does not go with mode = {self.mode!r}: "
                "it is 0 exactly in the sequential mode; change one of the two"
            )
        _refuse_truncated_sampling(self)
        if self.members_needed > self.group_size:
            raise SettingsError(
                f"min_group_members = {self.members_needed} can never be reached with group_size = {self.group_size}"
            )
        needed = self.groups_per_update * self.group_bytes
        if self.buffer_bytes < needed:
            raise SettingsError(
                f"buffer_bytes = {self.buffer_bytes} cannot hold one update, which may take {needed} bytes "
                f"({self.groups_per_update} groups x {self.group_size} x {self.max_tokens} tokens); raise it"
            )
        return self

    @property
    def members_needed(self) -> int:
        """Usable members without which a group is dropped."""
        return self.min_group_members or max(2, -(-self.group_size // 2))

    @property
    def group_bytes(self) -> int:
        """Most that one group can take in the buffer."""
        return self.group_size * (8 * self.max_tokens + MEMBER_OVERHEAD_BYTES)


def _refuse_truncated_sampling(settings: WorkSettings) -> None:
    """Refuse top-p, top-k and min-p.

    A sampler that cuts off the tail renormalises over the surviving mass S, the trainer over the whole vocabulary, so
    that log S would leak into every ratio.
    """
    neutral: tuple[tuple[str, float], ...] = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
    for name, value in neutral:
        given: float = getattr(settings, name)
        if given != value:
            raise SettingsError(
                f"{name} = {given} changes the distribution that is sampled from, and the trainer cannot correct for "
                f"it; remove it from the settings (or set it to {value})"
            )
