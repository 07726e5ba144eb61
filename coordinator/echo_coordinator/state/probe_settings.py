"""Settings of probes: how often nodes are measured against the trainer, and what follows."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo_swarm.probe import MAX_PROBE_TOKENS, MAX_PROBES


class ProbeSettings(BaseModel):
    """Probes: prompts with fixed completions whose log-probabilities nodes and trainer compute at the same version."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prompts: Annotated[int, Field(ge=0, le=MAX_PROBES)] = 4
    """Held-out prompts of a probe; 0: nobody is probed. Chosen once for a run, with completions by version 0."""
    tokens: Annotated[int, Field(ge=1, le=MAX_PROBE_TOKENS)] = 32
    """Longest completion among them."""
    every: Annotated[int, Field(ge=1)] = 5
    """A node is probed when it joins, and again when it holds a version that is this many newer than the one probed."""
    action: Literal["set_aside", "warn"] = "set_aside"
    """What happens to a node whose answer is far from its class or of another version than it says: it gets no work
    until a probe fits, or only a warning."""
    required: bool = False
    """A node gets no work before its first probe fits. Backends that cannot score then never get any."""
    tolerance: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor on the largest mean gaps allowed (docs/adr/0007-probes.md), for models with which arithmetic matters
    more."""
