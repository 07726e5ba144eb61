"""The learning rate as a function of the update's number alone, so that nothing of it needs to be saved."""

import math

from echo_coordinator.trainer.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """Return the learning rate of update `update` (the first is 1).

    warm-up:  lr · update / warmup_updates
    then:     lr · (f + (1 - f) · s(x)),  x = share of the remaining way done, f = final_learning_rate_share,
              s = 1 (constant), 1 - x (linear), (1 + cos πx) / 2 (cosine)
    """
    if update < settings.warmup_updates:
        return settings.learning_rate * update / settings.warmup_updates
    if settings.schedule == "constant" or settings.total_updates is None:
        return settings.learning_rate
    way = max(settings.total_updates - settings.warmup_updates, 1)
    done = min(max(update - settings.warmup_updates, 0) / way, 1.0)
    shape = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    final = settings.final_learning_rate_share
    return settings.learning_rate * (final + (1 - final) * shape)
