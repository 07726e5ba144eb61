"""One update: passes over the rows, gradients, optimizer steps.

for each optimizer step (epochs × minibatches):
    weights from all its rows ──► for each micro-batch: forward, loss, backward ──► sum over ranks
    ──► norm, clip ──► step, or skip when not finite
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echo_coordinator.trainer.metrics import Optimised
from echo_coordinator.trainer.objective.aggregation import row_weights
from echo_coordinator.trainer.objective.kl import kl_term
from echo_coordinator.trainer.objective.logprobs import TokenLogprobs, token_logprobs
from echo_coordinator.trainer.objective.policy import policy_term
from echo_coordinator.trainer.packing import Packed, pack, per_token
from echo_coordinator.trainer.ranks import Ranks
from echo_coordinator.trainer.rows import Row, micro_batches, minibatches
from echo_coordinator.trainer.settings import TrainerConfig
from echo_coordinator.trainer.stats import RowTable


def make_optimizer(model: torch.nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW over the model's trainable parameters; weight decay on matrices only."""
    settings = config.optimizer
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    others = [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )


class Optimiser:
    """Applies batches to a model. Holds no state of its own beside model and optimizer."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, config: TrainerConfig, ranks: Ranks, reference: Any = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._reference = reference
        self._settings = config.optimizer
        self._objective = config.objective
        self._temperature = config.temperature
        self._ranks = ranks
        self._parameters: list[torch.nn.Parameter] = [p for p in model.parameters() if p.requires_grad]

    def run(self, rows: Sequence[Row], *, update: int, learning_rate: float) -> Optimised:
        """Train on `rows`. Without any signal (and no KL term) only the figures are taken and the weights stay."""
        if not rows:
            return Optimised(rows=(), gradient_norm=None, steps=0, skipped="nothing_to_train")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        table = RowTable(len(rows))
        steps = minibatches(rows, self._settings, update=update)
        learns = self._objective.kl_coefficient > 0 or any(row.advantage for row in rows)
        if not learns:
            self._measure(rows, table)
            return Optimised(rows=table.merged(self._ranks), gradient_norm=None, steps=0, skipped="no_signal")
        # With one step, the weights at the start of the batch are those of the only pass.
        start = self._measure(rows, table) if len(steps) > 1 else None
        norms = [self._step(step, start, table) for step in steps]
        finite = [norm for norm in norms if math.isfinite(norm)]
        return Optimised(
            rows=table.merged(self._ranks),
            gradient_norm=math.fsum(finite) / len(finite) if finite else None,
            steps=len(finite),
            skipped=None if len(finite) == len(norms) else "non_finite",
        )

    @torch.no_grad()
    def _measure(self, rows: Sequence[Row], table: RowTable) -> dict[int, Tensor]:
        """Return every row's log-probabilities before anything is changed, by row index; note the figures.

        Each rank computes its share and all get the whole: in each step, a row may fall to another rank.
        """
        flat = torch.zeros(sum(row.length for row in rows), device=self._ranks.device)
        start = dict(zip((row.index for row in rows), flat.split([row.length for row in rows]), strict=True))
        for piece in micro_batches(rows, self._settings, rank=self._ranks.rank, world=self._ranks.world):
            packed, current = self._forward(self._model, piece)
            for row, values in zip(piece, current.logprobs.split(packed.lengths), strict=True):
                start[row.index].copy_(values)
            table.record_start(piece, packed, current)
        self._ranks.sum(flat)
        return start

    def _step(self, rows: Sequence[Row], start: dict[int, Tensor] | None, table: RowTable) -> float:
        """Take one optimizer step over `rows`; return the gradient's norm (not finite: skipped)."""
        weights = row_weights(
            [row.length for row in rows], self._objective.aggregation, self._objective.constant_length
        )
        weight_of = {row.index: weight for row, weight in zip(rows, weights, strict=True)}
        self._optimizer.zero_grad(set_to_none=True)
        for piece in micro_batches(rows, self._settings, rank=self._ranks.rank, world=self._ranks.world):
            self._backward(piece, [weight_of[row.index] for row in piece], start, table)
        self._ranks.sum_gradients(self._parameters)
        limit = self._settings.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _backward(
        self, piece: list[Row], weights: list[float], start: dict[int, Tensor] | None, table: RowTable
    ) -> None:
        packed, current = self._forward(self._model, piece)
        if start is None:
            table.record_start(piece, packed, current)
            proximal = current.logprobs.detach()
        else:
            proximal = torch.cat([start[row.index] for row in piece])
        term = policy_term(
            current.logprobs,
            behaviour=packed.behaviour,
            proximal=proximal,
            advantage=packed.advantage,
            settings=self._objective,
        )
        kl = self._kl(piece, current.logprobs)
        loss = per_token(weights, packed.lengths, packed.behaviour.device) * (
            term.loss + self._objective.kl_coefficient * kl
        )
        table.record_pass(piece, packed, clipped=term.clipped, capped=term.capped, kl_sum=kl, loss=loss)
        loss.sum().backward()

    def _kl(self, piece: list[Row], logprobs: Tensor) -> Tensor:
        if self._reference is None:
            return torch.zeros_like(logprobs)
        with torch.no_grad():
            _, reference = self._forward(self._reference, piece)
        return kl_term(logprobs, reference.logprobs)

    def _forward(self, model: Any, piece: list[Row]) -> tuple[Packed, TokenLogprobs]:
        packed = pack(piece, self._ranks.device)
        autocast = self._settings.precision == "bfloat16"
        return packed, token_logprobs(model, packed, self._temperature, autocast=autocast)
