"""The trainer's own values for probes and audits: the same forward pass, precision and temperature as in training.

Completions that are missing are sampled first, once for a run: what version 0 says itself is likely enough that
rounding does not drown in improbable tokens.
"""

from array import array
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from echo_coordinator.trainer.objective.logprobs import token_spread
from echo_coordinator.trainer.packing import Packed
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues
from echo_swarm.codec import pack_u32, unpack_u32
from echo_swarm.errors import MalformedMessage


@torch.no_grad()
def score_probes(
    model: Any, job: ProbeJob, *, temperature: float, autocast: bool, device: torch.device
) -> tuple[ProbeValues, ...]:
    """Return what `model` gives to each text of a job.

    Raises:
        MalformedMessage: an empty prompt, or an id that the model does not have.

    """
    rows = int(model.get_input_embeddings().num_embeddings)
    found: list[ProbeValues] = []
    for place, text in enumerate(job.texts):
        prompt, completion = unpack_u32(text.prompt_ids).tolist(), unpack_u32(text.completion_ids).tolist()
        if not prompt or max([*prompt, *completion]) >= rows:
            raise MalformedMessage(f"probe {place}: no prompt, or an id outside the vocabulary of {rows}")
        if not completion:
            completion = _sample(model, prompt, job, place, temperature, device)
        packed = _pack(prompt, completion, device)
        spread = token_spread(model, packed, temperature, autocast=autocast)
        values = ProbeValues(completion_ids=pack_u32(completion), logprobs=_array(spread.logprobs))
        if job.spread:
            values = replace(values, expected=_array(spread.expected), variance=_array(spread.variance))
            values = replace(values, below=_array(spread.below))
        found.append(values)
    return tuple(found)


def _array(values: torch.Tensor) -> "array[float]":
    return array("f", values.tolist())


def _pack(prompt: list[int], completion: list[int], device: torch.device) -> Packed:
    count = len(completion)
    # The logits at position t predict the token at t + 1; those of the last token predict nothing that is asked.
    predicts = torch.tensor([[True] * count + [False]], device=device)
    zeros = torch.zeros(count, device=device)
    return Packed(
        input_ids=torch.tensor([prompt + completion], device=device),
        kept=count + 1,
        predicts=predicts,
        targets=torch.tensor(completion, device=device),
        behaviour=zeros,
        advantage=zeros,
        lengths=[count],
    )


def _sample(
    model: Any, prompt: list[int], job: ProbeJob, place: int, temperature: float, device: torch.device
) -> list[int]:
    rows = int(model.get_input_embeddings().num_embeddings)
    config = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=job.tokens,
        eos_token_id=list(job.end_token_ids),
        pad_token_id=job.end_token_ids[0],
        suppress_tokens=list(range(job.vocabulary, rows)) or None,
    )
    ids = torch.tensor([prompt], device=device)
    # The library draws from the process's own generator; training must not notice.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(job.seed + place)
        drawn: Any = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in drawn[0, len(prompt) :].tolist()]
