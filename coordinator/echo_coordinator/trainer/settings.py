"""What a person can set about training. Checked at start; no torch is imported here."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from echo_swarm.errors import SettingsError
from echo_swarm.plain_errors import problems

Aggregation = Literal["token", "sequence", "constant"]
Precision = Literal["float32", "bfloat16"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Off = BeforeValidator(lambda value: None if value == "off" else value)
"""TOML has no null: "off" says it."""
_Share = Annotated[float, Field(ge=0, lt=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ObjectiveSettings(_Settings):
    """Which loss is minimised; `coordinator/echo_coordinator/trainer/objective/` has the formulas."""

    loss: Literal["grpo", "dr_grpo"] = "grpo"
    """A preset for `aggregation` and `normalise_std`: `dr_grpo` (arXiv 2503.20783) means constant and off."""
    aggregation: Aggregation = "token"
    """`token`: every token weighs the same (DAPO); `sequence`: every completion does (the GRPO paper);
    `constant`: sums are divided by completions × `constant_length` (Dr. GRPO)."""
    constant_length: Annotated[int, Field(ge=1)] | None = None
    """Needed by `constant`: the run's longest completion, in tokens."""
    normalise_std: bool = True
    """Divide the advantage by the standard deviation of the group's rewards."""
    min_group_members: Annotated[int, Field(ge=2)] = 2
    """A group with fewer usable members is dropped whole: weight 0, in no denominator."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.28
    """The ratio is clipped above 1 + clip_high (DAPO's "clip higher" when larger than clip_low)."""
    decoupled: bool = False
    """Clip around the trainer's own log-probabilities at the start of the batch instead of the worker's
    (decoupled PPO, arXiv 2110.00641), and correct for the worker with a truncated weight."""
    importance_cap: Annotated[Annotated[float, Field(ge=1, allow_inf_nan=False)] | None, _Off] = 4.0
    """Upper bound of the importance weight. "off": without `decoupled`, the ratio is not bounded where the clip leaves
    it open (negative advantages); with `decoupled`, there is no correction for the worker's policy at all."""
    kl_coefficient: _NotNegative = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference); 0 loads no reference. It acts on every trained token, also
    in groups without signal."""
    mask_truncated: bool = False
    """Leave completions that ended by length out of the loss and its denominators (DAPO's overlong filtering)."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss") == "dr_grpo":
            return {"aggregation": "constant", "normalise_std": False, **values}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.loss == "dr_grpo" and (self.normalise_std or self.aggregation != "constant"):
            raise ValueError(
                'loss = "dr_grpo" means aggregation = "constant" and normalise_std = false; '
                'use loss = "grpo" to choose them one by one'
            )
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError(
                'aggregation = "constant" needs constant_length: set it to the longest completion allowed, in tokens'
            )
        if not self.decoupled and self.importance_cap is not None and self.importance_cap < 1 + self.clip_high:
            raise ValueError(
                f"importance_cap = {self.importance_cap} lies inside the clip range (1 + clip_high = "
                f"{1 + self.clip_high}); raise it, or set decoupled = true"
            )
        return self


class OptimizerSettings(_Settings):
    """AdamW, its schedule, and how a batch is cut up."""

    learning_rate: _Positive = 1e-6
    """Peak, after the warm-up."""
    betas: tuple[_Share, _Share] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: _Positive = 1e-8
    """AdamW's."""
    weight_decay: _NotNegative = 0.0
    """Applies to matrices only (not to norms and biases)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after the warm-up."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over this many updates."""
    total_updates: Annotated[int, Field(ge=1)] | None = None
    """Where `linear` and `cosine` reach `final_learning_rate_share`."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of the peak, at the end of the schedule."""
    max_grad_norm: Annotated[_Positive | None, _Off] = 1.0
    """Longest gradient; a longer one is scaled down. "off": it is measured and not clipped."""
    epochs: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes over each batch."""
    minibatches: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer steps in each pass."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Padded tokens in one forward pass; a single longer completion goes alone."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Completions in one forward pass, at most."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""
    precision: Precision = "float32"
    """Of the arithmetic. Weights and optimizer state are always float32."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Of minibatch orders and dropout."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one rank. When not set, the cores that this machine and its cgroups give, divided by the ranks.
    Bit-exact repetition needs the same number."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes, each with the whole model and a share of the batch; one for each GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f'schedule = "{self.schedule}" needs total_updates: the length of the run in updates')
        if self.total_updates is not None and self.warmup_updates > self.total_updates:
            raise ValueError(
                f"warmup_updates = {self.warmup_updates} exceeds total_updates = {self.total_updates}; lower it"
            )
        return self


class LoraSettings(_Settings):
    """With this section, the run trains a LoRA adapter over a frozen model instead of all weights.

    A version is some megabytes then, and the model itself travels once.
    The adapter is published in float32, the model in `publish.precision`.
    """

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Of the adapter's matrices."""
    alpha: _Positive = 32.0
    """Their product is scaled by alpha / rank."""
    targets: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")], ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers of each block that get an adapter, by the last part of their name in the model."""
    dropout: float = 0.0
    """Only 0: the policy that is trained must be the one that sampled."""
    modules_to_save: tuple[str, ...] = ()
    """Only empty: whole modules are no part of an adapter that vLLM or llama.cpp can load."""

    @model_validator(mode="after")
    def _servable(self) -> Self:
        if self.modules_to_save:
            raise ValueError(
                f"modules_to_save = {list(self.modules_to_save)}: modules that are trained whole travel in no adapter "
                "that vLLM and llama.cpp can load, so nodes would sample without them. Remove the setting; to train "
                "them, remove [lora]"
            )
        if self.dropout:
            raise ValueError(
                f"dropout = {self.dropout}: the trainer would judge completions under another policy than the one "
                "that sampled them. Set it to 0"
            )
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("targets: each layer once")
        return self


class TrainerConfig(_Settings):
    """Everything the trainer process is told; the coordinator writes it to a file."""

    model_folder: Path
    """A Hugging Face folder: config.json and, unless random weights are wanted, safetensors."""
    checkpoint_folder: Path
    """Holds `v00000000/` and onwards; created if missing."""
    reference_folder: Path | None = None
    """Frozen model for the KL term. None: `model_folder`."""
    lora: LoraSettings | None = None
    """None: all weights are trained."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """At which nodes sample for training: log-probabilities are those of softmax(logits / temperature)."""
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    publish_precision: Precision = "float32"
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    """Complete checkpoints kept on disk."""
    published_version: Annotated[int, Field(ge=0)] = 0
    """Highest version ever announced. When no intact checkpoint is as new, the newest intact one is written again
    under the next number, since versions never go back."""


def correction_warnings(objective: ObjectiveSettings, max_staleness: int) -> list[str]:
    """Return what a person should know about training on another policy's samples with these settings.

    Raises:
        SettingsError: samples may be stale and nothing corrects for it. Training then collapses after some hundred
            updates while every recorded ratio looks perfect.

    """
    warnings: list[str] = []
    if objective.decoupled and objective.importance_cap is None:
        if max_staleness > 0:
            raise SettingsError(
                f"max_staleness = {max_staleness} with decoupled = true and no importance_cap: the workers' "
                "log-probabilities would be ignored and stale samples trained as if they were fresh. Set "
                "importance_cap (such as 4.0), or decoupled = false, or max_staleness = 0"
            )
        warnings.append(
            "decoupled = true without importance_cap: differences between the workers' arithmetic and the trainer's "
            "are not corrected"
        )
    if not objective.decoupled and objective.importance_cap is None and max_staleness > 0:
        warnings.append(
            f"max_staleness = {max_staleness} without importance_cap: the ratio is not bounded for negative "
            "advantages; one stale sample can dominate an update. Set importance_cap (such as 4.0)"
        )
    return warnings


def load_config(path: Path) -> TrainerConfig:
    """Read a trainer configuration. Raises SettingsError naming each field that does not fit."""
    try:
        return TrainerConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        raise SettingsError(f"{path}: {_describe(e)}") from e


def _describe(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{name or 'settings'}: {said}" for name, said in problems(error))
    return str(error)
