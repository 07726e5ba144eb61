"""Makes the demo's model: a Qwen3 of 0.3 million parameters over characters, warmed up by supervised learning.

Hidden matrices are trained by Muon (Keller Jordan 2024), which needs about half the steps that AdamW does here; the
rest by AdamW. The first part of the steps shows careful answers only, so that they are well learned; then mostly hasty
ones are mixed in, so that these become what the model says of its own accord (`answers` has both).
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from echo_coordinator.demo.answers import careful, hasty
from echo_coordinator.demo.recipe import ENVIRONMENT, ENVIRONMENT_SETTINGS, WARM_UP, WarmUp
from echo_coordinator.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, save_tokenizer
from echo_coordinator.environments.base import PromptSkipped, Split
from echo_coordinator.environments.registry import open_environment

FIRST_INDEX = 1 << 22
"""Warm-up prompts come from the training split, far behind what a demo run trains on."""
IGNORED = -100
Progress = Callable[[str], None]


def make_model(folder: Path, *, seed: int, progress: Progress, warm_up: WarmUp = WARM_UP) -> None:
    """Make, warm up and save the model to `folder`, which transformers' Auto classes load. Same seed, same weights."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config())
    optimizers = _optimizers(model, warm_up)
    batches = _batches(seed, warm_up)
    for step in range(warm_up.steps):
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * _schedule(step, warm_up.steps)
        loss = _loss(model, *next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        model.zero_grad()
        if (step + 1) % 50 == 0:
            progress(f"warm-up step {step + 1} of {warm_up.steps}, loss {loss.item():.3f}")
    _save(model, folder)


def _config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def _optimizers(model: torch.nn.Module, warm_up: WarmUp) -> list[tuple[torch.optim.Optimizer, float]]:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(hidden, lr=warm_up.muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=warm_up.adamw_rate, betas=(0.9, 0.98), weight_decay=0.01)
    return [(muon, warm_up.muon_rate), (adamw, warm_up.adamw_rate)]


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
    )


def _batches(seed: int, warm_up: WarmUp) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, targets) for each step, both int64 [batch, length], right-padded."""
    choose = random.Random(seed)
    prompts = _prompts(seed)
    for step in range(warm_up.steps):
        share = 1.0 if step < warm_up.careful_steps else warm_up.careful_share
        rows: list[tuple[list[int], list[int]]] = []
        for prompt in itertools.islice(prompts, warm_up.batch):
            answer = careful(prompt) if choose.random() < share else hasty(prompt)
            rows.append(([BOS_ID, *_ids(prompt)], [*_ids(answer), EOS_ID]))
        yield _padded(rows)


def _padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), length), PAD_ID)
    targets = torch.full((len(rows), length), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, targets


def _prompts(seed: int) -> Iterator[str]:
    environment = open_environment(ENVIRONMENT, ENVIRONMENT_SETTINGS)
    index = FIRST_INDEX * (1 + seed % 8)
    while True:
        try:
            text = environment.prompt(Split.TRAIN, index).text
            assert text is not None
            yield text
        except PromptSkipped:
            # Held out for evaluation: the warm-up must not see it either.
            pass
        index += 1


def _ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def _save(model: Qwen3ForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    save_tokenizer(folder)
