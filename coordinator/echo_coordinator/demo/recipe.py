"""What the demo does, in figures. Tuned so that two cores show a clear rise within about two minutes.

The task is reasoning-gym's `chain_sum` with two numbers of one or two digits. Held-out prompts are in neither the
warm-up nor training. `answers` says what the model has learned beforehand. The sections are those of run.toml.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

ENVIRONMENT = "reasoning_gym:chain_sum"
ENVIRONMENT_SETTINGS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "seed": 0,
    "eval_size": 256,
    "prompt": "{expression} =",
    "chat": False,
    "answer_start": "]",
    "full_credit_only": True,
}
MAX_PROMPT_TOKENS = 16
UPDATES = 48
WORK: dict[str, Any] = {
    "mode": "async",
    "max_staleness": 2,
    "group_size": 8,
    "groups_per_update": 16,
    "temperature": 1.0,
    # A careful answer takes at most 10, its end token included.
    "max_tokens": 12,
    "no_signal": "keep",
    "beat_s": 1.0,
}
OBJECTIVE: dict[str, Any] = {"importance_cap": 4.0}
OPTIMIZER: dict[str, Any] = {"learning_rate": 3e-4, "betas": [0.9, 0.99], "warmup_updates": 4, "threads": 1}
EVALUATION: dict[str, Any] = {"every": 12, "prompts": 256}
TORCH = ("--backend", "torch:threads=1")
"""Flags of a node that samples on one thread."""
MIXED_PUBLISH: dict[str, Any] = {"gguf": ["q8_0"]}


def mixed(vllm_python: str) -> tuple[tuple[str, ...], ...]:
    """Return the flags of a torch, a llama.cpp and a vLLM node; the last runs in another environment."""
    vllm = ("--backend", "vllm:threads=1,batch=32", "--backend-python", vllm_python)
    return (TORCH, ("--backend", "llama_cpp:threads=1"), vllm)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised learning before the run."""

    steps: int = 400
    careful_steps: int = 290
    """First steps, with careful answers only."""
    careful_share: float = 0.15
    """Of the answers after that."""
    batch: int = 64
    """Prompts a step."""
    muon_rate: float = 0.01
    adamw_rate: float = 0.004
    threads: int = 1
    """More do not help matrices as small as these, and would make the weights depend on the machine."""


WARM_UP = WarmUp()


def digest() -> str:
    """Return what names the model that this recipe makes."""
    told = json.dumps([ENVIRONMENT, ENVIRONMENT_SETTINGS, asdict(WARM_UP)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
