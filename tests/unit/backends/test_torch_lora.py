"""LoRA on the torch engine: the trainer's numbers, one base for all versions, no adapter answers for another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_coordinator.trainer.adapter import BASE_FILE, adapter_tensors
from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.objective.logprobs import from_logits
from echo_coordinator.trainer.settings import LoraSettings, OptimizerSettings, TrainerConfig
from echo_node.backends.base import Completion, LoadRefused, PolicyFiles
from echo_node.backends.frames import pack_policy, unpack_policy
from echo_node.backends.options import TorchOptions
from echo_node.backends.torch_engine import TorchEngine
from echo_swarm.manifest import sha256
from tests.unit.backends.support import CONFIG, VOCABULARY, request, write_policy

LORA = LoraSettings(rank=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
TEMPERATURE = 0.7


@pytest.fixture
def whole(tmp_path: Path) -> PolicyFiles:
    """The model that adapters apply to, as a version of its own."""
    policy = write_policy(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Qwen3ForCausalLM"]}))
    return policy


@pytest.fixture
def trainer(whole: PolicyFiles, tmp_path: Path) -> Trainer:
    config = TrainerConfig(
        model_folder=whole.artifact.parent,
        checkpoint_folder=tmp_path / "checkpoints",
        lora=LORA,
        optimizer=OptimizerSettings(threads=1, device="cpu"),
    )
    return Trainer(config)


@pytest.fixture
def adapted(trainer: Trainer, whole: PolicyFiles, tmp_path: Path):
    """Builds the version whose adapter is drawn from a seed; the trainer holds it afterwards."""

    def build(seed: int) -> PolicyFiles:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapter_tensors(trainer.model).values():
                tensor.normal_(0, 0.2, generator=generator)
        path = tmp_path / f"adapter-{seed}.safetensors"
        path.write_bytes(trainer.save().weights_path.read_bytes())
        base = tmp_path / "checkpoints" / BASE_FILE
        return replace(
            whole,
            policy_version=seed,
            artifact=path,
            artifact_digest=sha256(path.read_bytes()),
            base=base,
            base_digest=sha256(base.read_bytes()),
        )

    return build


def sample(engine: TorchEngine) -> list[Completion]:
    engine.submit([request(i, temperature=TEMPERATURE, prompt_ids=tuple(range(1, 3 + i % 3))) for i in range(6)])
    outcomes = []
    while engine.pending:
        outcomes += engine.step()
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    return sorted(outcomes, key=lambda outcome: outcome.request_id)


def engine_with(*policies: PolicyFiles) -> TorchEngine:
    engine = TorchEngine(TorchOptions(threads=1, precision="float32"))
    for policy in policies:
        engine.load(policy)
    return engine


def ids_of(engine: TorchEngine) -> list[bytes]:
    return [completion.token_ids.tobytes() + completion.logprobs.tobytes() for completion in sample(engine)]


def test_log_probabilities_are_the_trainers(trainer: Trainer, adapted) -> None:
    worst = 0.0
    for completion in sample(engine_with(adapted(3))):
        prompt = list(range(1, 3 + completion.request_id % 3))
        ids = torch.tensor([prompt + completion.token_ids.tolist()])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
        found = from_logits(logits, ids[0, len(prompt) :], TEMPERATURE).logprobs
        worst = max(worst, float((found - torch.tensor(completion.logprobs.tolist())).abs().max()))
    print(f"largest difference {worst:.1e}")
    assert worst <= 1e-5


def test_a_swap_reads_the_adapter_alone_and_leaves_nothing_of_the_old_one(adapted, whole: PolicyFiles) -> None:
    first, second = adapted(1), adapted(2)
    alone = {policy.policy_version: ids_of(engine_with(policy)) for policy in (first, second)}
    engine = engine_with(first)
    first.base.unlink()
    for policy in (second, first, second):
        engine.load(policy)
        assert ids_of(engine) == alone[policy.policy_version]
    assert alone[1] != alone[2]
    engine.load(whole)
    assert ids_of(engine) == ids_of(engine_with(whole))
    with pytest.raises(LoadRefused, match=r"cannot read model\.safetensors"):
        engine.load(first)


def test_an_adapter_of_other_layers_or_rank_replaces_the_old_one_whole(adapted, trainer: Trainer, tmp_path: Path):
    first = adapted(1)
    stored = load_file(first.artifact)
    config = {**json.loads(_config_of(first.artifact)), "r": 2}
    narrow = {name: t[:2] if "lora_A" in name else t[:, :2] for name, t in stored.items() if "q_proj" in name}
    path = tmp_path / "narrow.safetensors"
    _write(path, narrow, config)
    other = replace(first, policy_version=9, artifact=path)
    assert ids_of(engine_with(first, other)) == ids_of(engine_with(other))
    assert ids_of(engine_with(other, first)) == ids_of(engine_with(first))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t, c: ({n.replace("layers.1", "layers.7"): v for n, v in t.items()}, c),
            "which the model does not have",
        ),
        (lambda t, c: ({n: v[:, :8] if "lora_A" in n else v for n, v in t.items()}, c), r"is \(32, 8\), the model's"),
        (lambda t, c: (t, {**c, "use_rslora": True}), "use_rslora is 'True'; only False is served"),
        (lambda t, c: (t, {**c, "modules_to_save": ["lm_head"]}), "modules_to_save is"),
        (lambda t, c: ({n: v for n, v in t.items() if "lora_A" in n}, c), r"B \(\), rank 4"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_a_reason(adapted, tmp_path: Path, change, reason: str) -> None:
    first = adapted(1)
    tensors, config = change(load_file(first.artifact), json.loads(_config_of(first.artifact)))
    path = tmp_path / "wrong.safetensors"
    _write(path, tensors, config)
    with pytest.raises(LoadRefused, match=reason):
        engine_with(first).load(replace(first, artifact=path))


def test_a_policy_crosses_the_pipe_with_and_without_a_base(adapted, whole: PolicyFiles) -> None:
    for policy in (adapted(1), whole):
        assert unpack_policy(pack_policy(policy)) == policy


def _config_of(path: Path) -> str:
    from echo_swarm.checkpoint.safetensors_file import read_header

    return read_header(path).metadata["adapter_config"]


def _write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"adapter_config": json.dumps(config)})
