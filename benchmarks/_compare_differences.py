"""What still differs between TRL's GRPOTrainer and the swarm when `compare_trl` has matched all it can."""

import math

from echo_coordinator.config import RunSettings
from echo_swarm.errors import SettingsError


def differences(settings: RunSettings, *, nodes: int) -> list[str]:
    """Return one sentence for each difference that remains under these settings.

    Raises:
        SettingsError: the recipe uses something that TRL has no counterpart for, so the comparison would be none.

    """
    work, objective, optimizer = settings.work, settings.objective, settings.optimizer
    if objective.decoupled:
        raise SettingsError("TRL has no decoupled objective; compare with objective.decoupled = false")
    if work.group_size * work.groups_per_update % optimizer.minibatches:
        raise SettingsError("TRL needs minibatches that divide group_size x groups_per_update")
    found = [
        "Random streams: the same seed gives other samples in TRL (one stream) and in the swarm (one a completion).",
        _advantage(work.group_size, normalised=objective.normalise_std),
        "Ratio: TRL divides by log-probabilities that its trainer computes (exactly 1 in the first step on a batch), "
        "the swarm by those that the node recorded while sampling (1 within rounding when fresh, a true ratio when "
        "stale).",
        "Groups: the asynchronous swarm replaces groups that grew stale by later prompts, and takes groups as they "
        "are complete; TRL and the sequential swarm train on exactly the exported prompts, batch by batch.",
        "Empty updates: when no group has any signal, the swarm leaves weights and moments alone; TRL takes the step.",
        "Passes: the swarm's trainer cuts a batch by length, which changes the gradient by rounding only; TRL runs it "
        "as one.",
        "Processors: TRL is one process, with one thread or one for each core, whichever is faster; the swarm has "
        f"{nodes} nodes with one thread each, a trainer with {optimizer.threads or 'all'}, a scorer and the "
        "coordinator, all on the same cores.",
        "Durability: after each update the swarm writes a full checkpoint, commits what it consumed, signs and "
        "publishes the weights, and nodes fetch and verify them; TRL keeps its weights in memory (writing those that "
        "are judged is taken out of its time).",
    ]
    if work.no_signal == "replace":
        found.append(
            "No signal: the swarm replaces groups whose rewards are all equal by other prompts; TRL keeps them."
        )
    if objective.aggregation == "constant" and objective.constant_length != work.max_tokens:
        found.append(f"Constant: TRL divides by {work.max_tokens} tokens, the swarm by {objective.constant_length}.")
    return found


def _advantage(group_size: int, *, normalised: bool) -> str:
    if not normalised:
        return "Advantage: none; both take the reward minus the group's mean."
    factor = math.sqrt((group_size - 1) / group_size)
    return (
        f"Advantage: TRL divides by the sample deviation plus 1e-4, the swarm by the population deviation (at least "
        f"1e-3): TRL's advantages, and so its gradients before clipping, are {factor:.3f} times as large."
    )
