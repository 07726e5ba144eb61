"""What the coordinator's children are told of the run's settings."""

from echo_coordinator.config import RunSettings
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.scoring.items import PROMPT_DEADLINE_S
from echo_coordinator.scoring.pool import PoolSettings
from echo_coordinator.trainer.settings import TrainerConfig


def pool_settings(folder: RunFolder, settings: RunSettings) -> PoolSettings:
    """Return what the scorers need."""
    return PoolSettings(
        model_dir=folder.model,
        environment=settings.environment.name,
        environment_settings=settings.environment.settings,
        max_prompt_tokens=settings.environment.max_prompt_tokens,
        size=settings.scoring.processes,
        deadline_s=settings.scoring.deadline_s,
        prompt_deadline_s=max(PROMPT_DEADLINE_S, settings.scoring.deadline_s),
    )


def trainer_config(folder: RunFolder, settings: RunSettings) -> TrainerConfig:
    """Return what the trainer needs."""
    return TrainerConfig(
        model_folder=folder.model.absolute(),
        checkpoint_folder=folder.checkpoints.absolute(),
        temperature=settings.work.temperature,
        objective=settings.objective,
        optimizer=settings.optimizer,
        lora=settings.lora,
        publish_precision=settings.publish.precision,
        keep_checkpoints=settings.publish.keep_checkpoints,
    )
