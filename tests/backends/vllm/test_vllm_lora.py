"""LoRA on vLLM: log-probabilities of PEFT's model, and no version's adapter answers for another's, cache included."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo_coordinator.trainer.adapter import adapter_tensors, add_adapter, save_adapter
from echo_coordinator.trainer.settings import LoraSettings
from echo_node.backends.base import LoadRefused, PolicyFiles
from echo_node.backends.child import ChildBackend
from echo_swarm.manifest import sha256
from tests.backends.vllm.support import VOCABULARY, complete, reference_model, request, write_policy

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patiently")]

LORA = LoraSettings(rank=12, alpha=24)
"""A rank between two of vLLM's sizes, on all layers."""
PROMPT = (9, 8, 2, 6) * 20
"""Two and a half blocks of the CPU's cache: what one version left there would be found by the next."""


class Versions:
    """Adapters over one model, and what PEFT computes with each."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.whole = write_policy(folder / kind, kind)
        self.model = deepcopy(reference_model(kind, 1))
        add_adapter(self.model, LORA, 0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapter_tensors(self.model).values():
                tensor.normal_(0, 0.1, generator=generator)

    def version(self, seed: int) -> PolicyFiles:
        self.draw(seed)
        path = self.whole.artifact.parent / f"{seed}.safetensors"
        save_adapter(self.model, LORA, path)
        return replace(
            self.whole,
            policy_version=seed,
            artifact=path,
            artifact_digest=sha256(path.read_bytes()),
            base=self.whole.artifact,
            base_digest=self.whole.artifact_digest,
        )

    def expected(self, ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([[*PROMPT, *ids]])
        with torch.no_grad():
            logits = self.model(input_ids=tokens).logits[0, len(PROMPT) - 1 : -1, :VOCABULARY]
        return torch.log_softmax(logits, -1).gather(1, tokens[0, len(PROMPT) :, None]).squeeze(1)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_each_version_answers_with_its_own_adapter_after_every_swap(
    backend: ChildBackend, folder: Path, kind: str
) -> None:
    """Field case 75: the same prompt, so that a block kept of the old adapter would be found."""
    versions = Versions(folder / "lora", kind)
    worst, far = 0.0, []
    for seed in (1, 2, 1):
        policy = versions.version(seed)
        await backend.load(policy)
        done = await complete(backend, [request(i, prompt_ids=PROMPT, max_tokens=8) for i in range(6)])
        for completion in done.values():
            given, ids = torch.tensor(completion.logprobs.tolist()), completion.token_ids.tolist()
            versions.draw(seed)
            worst = max(worst, float((given - versions.expected(ids)).abs().max()))
            versions.draw(3 - seed)
            far.append(float((given - versions.expected(ids)).abs().max()))
            assert (completion.newest_version, completion.artifact_digest) == (seed, policy.artifact_digest)
    print(f"{kind}: largest difference {worst:.1e}, to the other version's adapter at least {min(far):.1e}")
    assert worst <= 1e-3 and min(far) > 1e-2


async def test_an_adapter_that_does_not_fit_is_refused_and_the_whole_model_is_itself_again(
    backend: ChildBackend, folder: Path
) -> None:
    versions = Versions(folder / "fits", "qwen3")
    good = versions.version(1)
    await backend.load(good)
    wrong = folder / "wrong.safetensors"
    wrong.write_bytes(good.artifact.read_bytes().replace(b"layers.1.", b"layers.8."))
    with pytest.raises(LoadRefused, match="which the model does not have"):
        await backend.load(replace(good, artifact=wrong))
    await backend.load(versions.whole)
    done = await complete(backend, [request(0, prompt_ids=PROMPT, max_tokens=8)])
    with torch.no_grad():
        for name, tensor in adapter_tensors(versions.model).items():
            if "lora_B" in name:
                tensor.zero_()
    expected = versions.expected(done[0].token_ids.tolist())
    assert float((torch.tensor(done[0].logprobs.tolist()) - expected).abs().max()) <= 1e-3
