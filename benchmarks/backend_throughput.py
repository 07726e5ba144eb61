"""Tokens a second of the torch engine against the bare model, at the same batch, on a model of the demo's size.

    bare      forward passes with transformers' own cache and nothing else: no sampling, nothing recorded
    sampling  the same with softmax, multinomial, and the chosen log-probability
    engine    TorchEngine: batching, exact log-probabilities, a seeded stream a sequence
    child     the same in a child process, frames included

All four make `--batch` sequences of `--tokens` tokens. Rounds are interleaved and medians of ratios taken, so that what
else happens on the machine hits all alike.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks._report import write_report
from echo_node.backends.base import GenerationRequest, PolicyFiles
from echo_node.backends.child import start_backend
from echo_node.backends.options import TorchOptions
from echo_node.backends.torch_engine import TorchEngine

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
PROMPT = tuple(range(1, 25))


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32).eval()


def make_policy(model: Any, folder: Path, tokens: int) -> PolicyFiles:
    path = folder / "model.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, path)
    return PolicyFiles(
        policy_version=0,
        artifact=path,
        artifact_digest=bytes(32),
        model_config_json=json.dumps(CONFIG),
        # An id that this model cannot sample, so that every sequence has the same length.
        end_token_ids=(63,),
        vocabulary_size=63,
        max_prompt_tokens=64,
        max_completion_tokens=tokens,
    )


def requests(batch: int, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=i, prompt_ids=PROMPT, max_tokens=tokens, temperature=1.0, seed=i)
        for i in range(batch)
    ]


def run_bare(model: Any, batch: int, tokens: int, *, sample: bool) -> None:
    cache = DynamicCache()
    ids = torch.tensor([PROMPT] * batch)
    for _ in range(tokens):
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = torch.zeros((batch, 1), dtype=torch.long)
        if sample:
            logp = torch.log_softmax(logits.float(), -1)
            ids = torch.multinomial(logp.exp(), 1)
            logp.gather(1, ids).tolist()


def run_engine(engine: TorchEngine, batch: int, tokens: int) -> None:
    engine.submit(requests(batch, tokens))
    while engine.pending:
        engine.step()


async def measure(batch: int, tokens: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return seconds by way and round. The event loop serves nothing else, so that blocking it is harmless."""
    model = make_model()
    options = TorchOptions(batch=batch, threads=torch.get_num_threads())
    policy = make_policy(model, folder, tokens)
    engine = TorchEngine(options)
    engine.load(policy)
    seconds: dict[str, list[float]] = {"bare": [], "sampling": [], "engine": [], "child": []}
    ways: dict[str, Callable[[], None]] = {
        "bare": lambda: run_bare(model, batch, tokens, sample=False),
        "sampling": lambda: run_bare(model, batch, tokens, sample=True),
        "engine": lambda: run_engine(engine, batch, tokens),
    }
    async with AsyncExitStack() as stack:
        child = await stack.enter_async_context(start_backend(options, log_path=folder / "child.log", nice=0))
        await child.load(policy)
        for round_number in range(rounds + 1):
            for name, way in ways.items():
                start_s = time.perf_counter()
                with torch.inference_mode():
                    way()
                seconds[name].append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            await child.submit(requests(batch, tokens))
            for _ in range(batch):
                await child.next_outcome()
            seconds["child"].append(time.perf_counter() - start_s)
            if round_number == 0:
                # The first round warms up.
                seconds = {name: [] for name in seconds}
    return seconds


def summarise(seconds: dict[str, list[float]], batch: int, tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {"batch": batch, "tokens_each": tokens, "threads": torch.get_num_threads()}
    for name, values in seconds.items():
        result[f"{name}_tokens_per_s"] = round(batch * tokens / statistics.median(values))
    for name, base in (("engine", "bare"), ("engine", "sampling"), ("child", "engine")):
        ratios = [b / a for a, b in zip(seconds[name], seconds[base], strict=True)]
        result[f"{name}_over_{base}"] = round(statistics.median(ratios), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for batch in arguments.batch:
        with tempfile.TemporaryDirectory() as folder:
            seconds = anyio.run(measure, batch, arguments.tokens, arguments.rounds, Path(folder))
        figures.append(summarise(seconds, batch, arguments.tokens))
    model = {"parameters": sum(p.numel() for p in make_model().parameters()), **CONFIG}
    write_report("backend_throughput", {"model": model, "runs": figures}, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
