"""Settings of audits: how much of the trainer's time they may take, and what follows."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class AuditSettings(BaseModel):
    """Audits: the trainer recomputes the log-probabilities of completions that it chose after they were delivered."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Most of the trainer's time that audits take while a batch waits; 0: no audits at all. What is not audited in
    time is trained on unaudited, and counted. While the trainer has nothing to do, audits are free."""
    burst_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that may be spent at once, when they were not needed before; a run begins with so many."""
    action: Literal["quarantine", "warn"] = "quarantine"
    """What follows a failed audit: what the peer delivered and was not trained on is taken back and it gets no work for
    a while, or only a warning."""
    require_followed_seeds: bool = False
    """Only take nodes whose draws audits can follow from the seed (torch, llama_cpp). Others, such as vllm, could
    sample a prompt several times and deliver the best unnoticed; with this they are turned away when they join."""
    suspend_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """How long a peer gets no work after a failed audit; four times as long after each further one, a week at most."""
