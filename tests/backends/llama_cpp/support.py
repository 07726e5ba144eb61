"""GGUF files of the tiny reference model, in each precision; and of a Llama, whose Q and K are stored permuted."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from echo_coordinator.publisher.gguf.write import write_gguf
from echo_node.backends.base import Completion, GenerationRequest, Outcome, PolicyFiles
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_swarm.manifest import sha256
from tests.unit.backends.support import CONFIG, write_policy


def full_config(config: dict[str, Any] = CONFIG) -> str:
    return AutoConfig.for_model(**config).to_json_string()


def write_gguf_policy(
    folder: Path, *, version: int = 0, seed: int = 1, precision: str = "f32", **overrides: object
) -> PolicyFiles:
    """As `write_policy`, with the weights as GGUF."""
    source = write_policy(folder, version=version, seed=seed)
    target = folder / f"model-{precision}.gguf"
    write_gguf(source.artifact, full_config(), target, precision)
    digest = sha256(target.read_bytes())
    return write_policy(
        folder, version=version, seed=seed, **{"artifact": target, "artifact_digest": digest, **overrides}
    )


def run(engine: LlamaCppEngine, requests: list[GenerationRequest]) -> dict[int, Outcome]:
    """Submit all at once and step until all are answered."""
    engine.submit(requests)
    outcomes: list[Outcome] = []
    while engine.pending:
        outcomes += engine.step()
    return {outcome.request_id: outcome for outcome in outcomes}


def complete(engine: LlamaCppEngine, requests: list[GenerationRequest]) -> dict[int, Completion]:
    done = run(engine, requests)
    assert all(isinstance(outcome, Completion) for outcome in done.values()), done
    return done  # type: ignore[return-value]


def content(completions: dict[int, Completion]) -> list[tuple[int, list[int], list[float]]]:
    return sorted((i, c.token_ids.tolist(), c.logprobs.tolist()) for i, c in completions.items())
