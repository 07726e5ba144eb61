"""Field case 38: one chat prompt, tokenised once, is the same ids for the trainer, torch, llama.cpp and vLLM."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_coordinator.demo.tokenizer import BOS_ID, EOS_ID, VOCABULARY
from echo_coordinator.environments.base import ChatMessage, Prompt
from echo_coordinator.publisher.gguf.write import write_gguf
from echo_coordinator.scoring.tokenizer import PromptTokenizer
from echo_coordinator.trainer.model import load_model
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeText
from echo_coordinator.trainer.probing import score_probes
from echo_node.backends.base import Backend, PolicyFiles, ScoreRequest
from echo_node.backends.child import ChildBackend
from echo_node.backends.inline import InlineBackend
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions, TorchOptions
from echo_node.backends.torch_engine import TorchEngine
from echo_swarm.codec import pack_u32
from echo_swarm.manifest import sha256
from tests.backends.vllm.support import complete, request
from tests.e2e.support.models import write_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patiently")]

CHAT = Prompt(messages=(ChatMessage(role="system", content="0123 "), ChatMessage(role="user", content="47+38")))
TURNS = "{% for message in messages %}{{ message.content }}={% endfor %}{% if add_generation_prompt %}-{% endif %}"
TOKENS = 16
CPU = torch.device("cpu")


def write_chat_model(folder: Path, *, template: str, bos: bool) -> None:
    """Write a model whose tokenizer puts a beginning token before text; with `bos` off, neither model has one."""
    write_model(folder, hidden_size=64, head_dim=32, initializer_range=0.3)
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    if not bos:
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "post_processor": None}))


def policy(folder: Path, artifact: Path) -> PolicyFiles:
    return PolicyFiles(
        policy_version=0,
        artifact=artifact,
        artifact_digest=sha256(artifact.read_bytes()),
        model_config_json=(folder / "config.json").read_text(),
        end_token_ids=(EOS_ID,),
        vocabulary_size=len(VOCABULARY),
        max_prompt_tokens=32,
        max_completion_tokens=TOKENS,
    )


def logprobs_of(model: Any, prompt: list[int], completion: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1)


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    ids = list(prompt)
    while len(ids) < len(prompt) + TOKENS and ids[-1] != EOS_ID:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


async def continued_and_scored(
    backend: Backend, files: PolicyFiles, prompt: list[int], completion: tuple[int, ...]
) -> tuple[tuple[int, ...], "array[float]"]:
    await backend.load(files)
    done = await complete(backend, [request(0, prompt_ids=tuple(prompt), temperature=0.0, max_tokens=TOKENS)])
    scores = await backend.score(ScoreRequest(items=((tuple(prompt), completion),), temperature=1.0))
    return tuple(done[0].token_ids), scores.logprobs[0]


@pytest.mark.parametrize(
    ("template", "bos"),
    [("{{ bos_token }}" + TURNS, True), (TURNS, True), (TURNS, False)],
    ids=["both write a beginning token", "the tokenizer writes one", "there is none"],
)
async def test_every_backend_continues_the_ids_it_was_given_and_no_others(
    backend: ChildBackend, tmp_path: Path, template: str, bos: bool
) -> None:
    write_chat_model(tmp_path / "model", template=template, bos=bos)
    weights, gguf = tmp_path / "model" / "model.safetensors", tmp_path / "model.gguf"
    write_gguf(weights, (tmp_path / "model" / "config.json").read_text(), gguf, "f32")
    prompt = PromptTokenizer(tmp_path / "model", [EOS_ID]).encode(CHAT)
    assert prompt == [BOS_ID] * bos + [VOCABULARY[c] for c in "0123 =47+38=-"]

    model = load_model(tmp_path / "model", device=CPU, seed=0)
    continuation = greedy(model, prompt)
    expected = logprobs_of(model, prompt, continuation)
    # One beginning token more or less would show.
    for other in ([BOS_ID, *prompt], prompt[1:]):
        assert (logprobs_of(model, other, continuation) - expected).abs().max() > 0.05
    text = ProbeText(prompt_ids=pack_u32(prompt), completion_ids=pack_u32(continuation))
    job = ProbeJob(texts=(text,), tokens=TOKENS, seed=0, end_token_ids=(EOS_ID,), vocabulary=len(VOCABULARY))
    (trainers,) = score_probes(model, job, temperature=1.0, autocast=False, device=CPU)
    found = {"trainer": (continuation, trainers.logprobs)}

    llama = LlamaCppEngine(LlamaCppOptions(batch=2, threads=1))
    for name, one, artifact in (
        ("torch", InlineBackend(TorchEngine(TorchOptions(batch=2, threads=1, device="cpu"))), weights),
        ("llama_cpp", InlineBackend(llama), gguf),
        ("vllm", backend, weights),
    ):
        files = policy(tmp_path / "model", artifact)
        found[name] = await continued_and_scored(one, files, prompt, continuation)
    llama.close()
    for name, (ids, logprobs) in found.items():
        assert ids == continuation, name
        assert (torch.tensor(logprobs) - expected).abs().max() <= 1e-3, name
