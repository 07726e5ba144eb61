"""Settings of what peers may do together before they are proven: identities cost nothing."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class StandingSettings(BaseModel):
    """Limits of all peers together that have not been proven by audits yet (16 clean ones in a row)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    unproven_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Most of a batch that may come from unproven peers and was not audited; 1: no bound. What is above it waits for
    its audits. While a proven peer is here, the rest of a group is kept for proven ones for `work.lease_target_s`."""
    unproven_per_address: Annotated[int, Field(ge=1)] = 256
    """Completions that all unproven peers behind one network address (of IPv6: one /64) may hold together, while others
    could take them too. Peers behind one router share an address."""
