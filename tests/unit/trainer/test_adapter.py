"""LoRA runs of the trainer on a real (tiny) model: what is trained, kept, continued and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from echo_coordinator.trainer.adapter import BASE_FILE, adapter_tensors
from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.settings import LoraSettings
from echo_swarm.checkpoint.adapter_file import read_adapter
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.errors import BackendFailed, SettingsError

LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def lora(config):
    """Builds a configuration of a LoRA run."""
    return lambda **values: config(**{"lora": LORA, **values})


@pytest.fixture
def group(member):
    return [member(float(index % 2), length=2 + index, start=index, logprob=-3.3) for index in range(8)]


def adapter(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(trainer.model).items()}


def frozen(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_only_the_adapter_is_trained_and_only_it_and_its_moments_are_kept(lora, batch, group):
    trainer = Trainer(lora())
    before, base = adapter(trainer), frozen(trainer)
    metrics = trainer.train(batch(group))
    checkpoint = trainer.save()
    assert metrics["optimizer_steps"] == 1 and not same(before, adapter(trainer)) and same(base, frozen(trainer))
    assert sorted(path.name for path in checkpoint.folder.iterdir()) == [
        "adapter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert checkpoint.weights_path.name == "adapter.safetensors"
    described = read_adapter(checkpoint.weights_path)
    assert (described.rank, described.scale, len(described.layers)) == (4, 2.0, 6)
    assert trainer.parameters == sum(tensor.numel() for tensor in before.values())
    base_file = trainer.config.checkpoint_folder / BASE_FILE
    assert checkpoint.state.base_digest == file_digest(base_file).hex()
    assert {name.split("/")[0] for name in load_file(checkpoint.folder / "optimizer.safetensors")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }


def test_after_a_resume_the_next_updates_are_bit_identical(lora, batch, group):
    settings = {"optimizer": {"minibatches": 2, "epochs": 2, "weight_decay": 0.1}, "publish_precision": "bfloat16"}

    def steps(trainer: Trainer, first: int, last: int) -> Trainer:
        for update in range(first, last + 1):
            trainer.train(batch(group, update=update))
            trainer.save()
        return trainer

    straight = steps(Trainer(lora(folder="straight", **settings)), 1, 6)
    steps(Trainer(lora(folder="broken", **settings)), 1, 3)
    resumed = steps(Trainer(lora(folder="broken", **settings)), 4, 6)
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        left, right = (trainer.checkpoint.folder / name for trainer in (straight, resumed))
        assert left.read_bytes() == right.read_bytes()


def test_the_trainer_computes_with_the_numbers_of_the_published_base(lora):
    trainer = Trainer(lora(publish_precision="bfloat16"))
    base = load_file(trainer.config.checkpoint_folder / BASE_FILE)
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}
    held = frozen(trainer)["model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert torch.equal(held, base["model.layers.0.self_attn.q_proj.weight"].float())


def test_version_0_is_the_base_and_the_kl_term_measures_from_there(lora, batch, member):
    trainer = Trainer(lora(objective={"kl_coefficient": 0.5}))
    assert all(not tensor.any() for name, tensor in adapter(trainer).items() if "lora_B" in name)
    first = trainer.train(batch([member(1.0), member(0.0, start=9)]))
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    for update in range(2, 5):
        last = trainer.train(batch([member(1.0), member(0.0, start=9)], update=update))
    assert last["kl"] > 1e-9


def test_gradient_checkpointing_does_not_change_the_result(lora, batch, group):
    plain, frugal = Trainer(lora(folder="plain")), Trainer(lora(folder="f", optimizer={"gradient_checkpointing": True}))
    for trainer in (plain, frugal):
        trainer.train(batch(group))
    left, right = adapter(plain), adapter(frugal)
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-5


@pytest.mark.parametrize("changed", [{"rank": 8}, {"alpha": 4}, {"targets": ["q_proj"]}])
def test_a_run_keeps_to_the_adapter_it_began_with(lora, changed):
    Trainer(lora())
    with pytest.raises(BackendFailed, match=r"\[lora\] was changed after the run began"):
        Trainer(lora(lora={**LORA, **changed}))


def test_a_run_does_not_turn_into_one_of_the_other_kind(lora, config):
    Trainer(lora(folder="adapter")), Trainer(config(folder="whole"))
    for build, folder in ((config, "adapter"), (lora, "whole")):
        with pytest.raises(BackendFailed, match=r"with another \[lora\]"):
            build_one = build(folder=folder)
            Trainer(build_one)


def test_a_base_that_was_replaced_is_noticed(lora):
    trainer = Trainer(lora())
    base = trainer.config.checkpoint_folder / BASE_FILE
    data = bytearray(base.read_bytes())
    data[-1] ^= 1
    base.write_bytes(data)
    with pytest.raises(BackendFailed, match="trained over another model"):
        Trainer(lora())


@pytest.mark.parametrize("target", ["query", "embed_tokens", "lm_head", "norm"])
def test_a_target_that_is_no_layer_is_refused_with_those_there_are(lora, target):
    with pytest.raises(SettingsError, match=rf"'{target}' is no linear layer .* down_proj, gate_proj, k_proj"):
        Trainer(lora(lora={**LORA, "targets": ["q_proj", target]}))


def test_what_no_adapter_can_carry_is_refused_with_a_reason():
    with pytest.raises(ValueError, match=r"modules_to_save = \['lm_head'\]: modules that are trained whole travel"):
        LoraSettings(modules_to_save=("lm_head",))
    with pytest.raises(ValueError, match=r"dropout = 0\.1: the trainer would judge completions under another policy"):
        LoraSettings(dropout=0.1)


def test_peft_reads_the_file(lora, batch, group, tmp_path, model_folder):
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    from echo_coordinator.trainer.model import load_model

    trainer = Trainer(lora())
    trainer.train(batch(group))
    path = trainer.save().weights_path
    model = load_model(model_folder, device=torch.device("cpu"), seed=0)
    inject_adapter_in_model(LoraConfig(**read_adapter(path).config), model)
    set_peft_model_state_dict(model, {n.removeprefix("base_model.model."): t for n, t in load_file(path).items()})
    ids = torch.tensor([[1, 2, 3, 4]])
    assert json.dumps(read_adapter(path).config)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
