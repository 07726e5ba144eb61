"""The trainer on a real (tiny) model: gradients, skipped steps, and exact continuation."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.model import tensors
from echo_coordinator.trainer.objective.logprobs import token_logprobs
from echo_coordinator.trainer.packing import pack
from echo_coordinator.trainer.rows import plan
from echo_coordinator.trainer.settings import ObjectiveSettings
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.errors import BackendFailed, MalformedMessage, SettingsError


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors(trainer.model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.fixture
def group(member):
    """Eight completions of different lengths, half of them paid."""
    return [member(float(index % 2), length=2 + index, start=index, logprob=-3.3) for index in range(8)]


@pytest.fixture
def gradient(config, batch):
    """Returns the gradient that one plain SGD-like step would see, by training with Adam switched out."""

    def measure(*groups, objective=None, **optimizer) -> dict[str, torch.Tensor]:
        trainer = Trainer(
            config(
                optimizer={"max_grad_norm": None, **optimizer},
                objective=objective or {},
                folder=f"g{len(list(Path(config().checkpoint_folder).parent.iterdir()))}",
            )
        )
        before = weights(trainer)
        trainer._optimiser._optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.train(batch(*groups))
        after = weights(trainer)
        return {name: before[name] - after[name] for name in before}

    return measure


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_splitting_a_batch_leaves_its_gradient_unchanged(gradient, group, aggregation):
    objective = {"aggregation": aggregation, "constant_length": 16}
    whole = gradient(group, objective=objective, learning_rate=1.0)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-3
    for size in (4, 2):
        split = gradient(group, objective=objective, learning_rate=1.0, micro_batch_size=size)
        assert distance(whole, split) < 2e-6


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_masked_truncated_sample_is_in_neither_numerator_nor_denominator(gradient, member, aggregation):
    cut = member(0.0, length=10, start=9, finish_reason="length")
    objective = {"aggregation": aggregation, "mask_truncated": True}
    masked = gradient([member(1.0, length=10), cut], objective=objective, learning_rate=1.0)
    # Its reward still counts in the baseline, as an aged member's does.
    aged = gradient([member(1.0, length=10), member(0.0, trained=False)], objective=objective, learning_rate=1.0)
    assert same(masked, aged)


def test_a_batch_that_is_masked_whole_has_loss_zero_and_real_lengths(config, batch, member):
    trainer = Trainer(config(objective={"mask_truncated": True}))
    before = weights(trainer)
    cut = [member(float(index), length=10, finish_reason="length") for index in range(2)]
    metrics = trainer.train(batch(cut))
    assert metrics["loss"] == 0.0 and metrics["skipped"] == "nothing_to_train"
    assert metrics["completion_length"] == {"mean": 10.0, "min": 10, "max": 10}
    assert same(before, weights(trainer))


def test_on_policy_samples_have_a_ratio_of_one_at_the_training_temperature(config, batch, member):
    trainer = Trainer(config(temperature=0.7))
    blank = [member(float(index), length=4 + index, start=index) for index in range(3)]
    rows = plan(batch(blank), ObjectiveSettings()).rows
    logprobs = []
    for row in rows:  # one by one, unpadded, as a sampler would
        with torch.no_grad():
            logits = trainer.model(torch.tensor([row.tokens.tolist()])).logits[0, row.prompt_length - 1 : -1]
        table = torch.log_softmax(logits / 0.7, -1)
        logprobs.append([float(table[i, token]) for i, token in enumerate(row.tokens[row.prompt_length :])])
    sampled = [
        member(float(index), length=4 + index, start=index, logprobs=pack_f32(values))
        for index, values in enumerate(logprobs)
    ]
    ratio = trainer.train(batch(sampled))["ratio"]["fresh"]
    assert ratio["mean_log"] == pytest.approx(0.0, abs=1e-5)
    assert (ratio["min"], ratio["max"]) == (pytest.approx(1.0, abs=1e-4), pytest.approx(1.0, abs=1e-4))


def test_padding_and_neighbours_do_not_change_a_rows_log_probabilities(config, batch, member):
    trainer = Trainer(config())
    long_prompt = member(1.0, length=9, prompt_ids=pack_u32(range(10)))
    rows = plan(batch([long_prompt, member(0.0, length=2)]), ObjectiveSettings()).rows
    with torch.no_grad():
        together = token_logprobs(trainer.model, pack(rows, torch.device("cpu")), 1.0, autocast=False).logprobs
        alone = token_logprobs(trainer.model, pack(rows[1:], torch.device("cpu")), 1.0, autocast=False).logprobs
    assert torch.allclose(together[-2:], alone, atol=1e-6)


def test_groups_without_signal_leave_the_weights_alone_and_are_counted(config, batch, member):
    trainer = Trainer(config())
    before = weights(trainer)
    metrics = trainer.train(batch([member(1.0), member(1.0)]))
    assert metrics["skipped"] == "no_signal" and metrics["optimizer_steps"] == 0
    assert metrics["groups"]["no_signal_share"] == 1.0 and metrics["warnings"]
    assert metrics["entropy"] > 0 and metrics["ratio"]["fresh"]["tokens"] == 8
    assert same(before, weights(trainer))
    assert (trainer.state.update, trainer.state.policy_version) == (1, 1)
    assert trainer.train(batch([member(0.0), member(0.0)], update=2))["skipped_total"] == {"no_signal": 2}


def test_a_kl_term_still_acts_on_groups_without_signal(config, batch, member):
    trainer = Trainer(config(objective={"kl_coefficient": 0.5}))
    first = trainer.train(batch([member(1.0), member(0.0, start=9)]))
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    moved = weights(trainer)
    second = trainer.train(batch([member(1.0), member(1.0)], update=2))
    assert second["kl"] > 0 and second["skipped"] is None
    assert not same(moved, weights(trainer))


def test_a_step_with_non_finite_gradients_is_skipped_and_counted(config, batch, group):
    trainer = Trainer(config())
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.inf
    before = weights(trainer)
    metrics = trainer.train(batch(group))
    assert metrics["skipped"] == "non_finite" and metrics["gradient_norm"] is None
    assert trainer.state.skipped == {"non_finite": 1}
    assert same(before, weights(trainer))
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"loss": "dr_grpo", "constant_length": 16},
        {"aggregation": "sequence", "decoupled": True, "importance_cap": 2.0},
        {"kl_coefficient": 0.01, "mask_truncated": True},
    ],
)
def test_every_objective_moves_probability_to_what_was_paid(config, batch, member, objective):
    trainer = Trainer(config(objective=objective, optimizer={"epochs": 2, "minibatches": 2}))
    paid, unpaid = member(1.0, start=3), member(0.0, start=20)
    rows = plan(batch([paid, unpaid]), ObjectiveSettings()).rows
    packed = pack(rows, torch.device("cpu"))

    def logprobs() -> list[float]:
        with torch.no_grad():
            both = token_logprobs(trainer.model, packed, 1.0, autocast=False).logprobs.split(packed.lengths)
        return [float(values.sum()) for values in both]

    before = logprobs()
    metrics = trainer.train(batch([paid, unpaid] * 2))
    after = logprobs()
    assert metrics["optimizer_steps"] == 4
    assert after[0] > before[0] and after[0] - after[1] > before[0] - before[1]


def test_bfloat16_trains_float32_weights_and_publishes_what_was_asked(config, batch, group):
    trainer = Trainer(config(optimizer={"precision": "bfloat16"}, publish_precision="bfloat16"))
    before = weights(trainer)
    trainer.train(batch(group))
    checkpoint = trainer.save()
    assert not same(before, weights(trainer))
    kept = load_file(checkpoint.folder / "model.safetensors")
    published = load_file(checkpoint.weights_path)
    assert checkpoint.weights_path.parent.name == "published"
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert published.keys() == kept.keys()


def test_tied_weights_are_stored_once_and_equal_weights_give_equal_files(config):
    first, second = Trainer(config(folder="one")), Trainer(config(folder="two"))
    names = load_file(first.checkpoint.weights_path).keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    digests = {hashlib.sha256(t.checkpoint.weights_path.read_bytes()).hexdigest() for t in (first, second)}
    assert len(digests) == 1


def test_gradient_checkpointing_does_not_change_the_result(config, batch, group):
    plain = Trainer(config(folder="plain"))
    plain.train(batch(group))
    frugal = Trainer(config(folder="frugal", optimizer={"gradient_checkpointing": True}))
    frugal.train(batch(group))
    assert distance(weights(plain), weights(frugal)) < 1e-5


def steps(trainer: Trainer, batch, group, first: int, last: int) -> dict:
    metrics: dict = {}
    for update in range(first, last + 1):
        metrics = trainer.train(batch(group, update=update, data_position={"index": 8 * update}))
        trainer.save()
    return metrics


def test_after_a_resume_the_next_updates_are_bit_identical(config, batch, group):
    settings = {
        "optimizer": {
            "minibatches": 2,
            "epochs": 2,
            "schedule": "cosine",
            "total_updates": 12,
            "warmup_updates": 3,
            "weight_decay": 0.1,
        }
    }
    straight = Trainer(config(folder="straight", **settings))
    last = steps(straight, batch, group, 1, 10)
    steps(Trainer(config(folder="broken", **settings)), batch, group, 1, 5)
    resumed = Trainer(config(folder="broken", **settings))
    assert resumed.state.update == 5 and resumed.state.data_position == {"index": 40}
    assert resumed.state.consumed_groups == (500,)
    again = steps(resumed, batch, group, 6, 10)
    assert same(weights(straight), weights(resumed))
    assert again["learning_rate"] == last["learning_rate"] and again["loss"] == last["loss"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = (trainer.checkpoint.folder / name for trainer in (straight, resumed))
        assert left.read_bytes() == right.read_bytes()


def test_old_checkpoints_go_and_the_newest_stay(config, batch, group):
    trainer = Trainer(config(keep_checkpoints=2))
    steps(trainer, batch, group, 1, 3)
    names = sorted(path.name for path in trainer.config.checkpoint_folder.iterdir())
    assert names == ["v00000002", "v00000003"]


def test_what_a_killed_first_write_left_behind_goes(config):
    folder = config().checkpoint_folder
    (folder / ".v00000000.1.tmp").mkdir(parents=True)
    Trainer(config())
    assert [path.name for path in folder.iterdir()] == ["v00000000"]


def test_a_lost_version_that_was_announced_is_never_issued_again_with_other_weights(config, batch, group):
    steps(Trainer(config()), batch, group, 1, 3)
    (config().checkpoint_folder / "v00000003" / "state.json").write_bytes(b"")
    trainer = Trainer(config(published_version=3))
    assert (trainer.state.update, trainer.state.policy_version) == (2, 4)
    assert len(trainer.warnings) == 2
    assert trainer.checkpoint.folder.name == "v00000004"
    trainer.train(batch(group, update=3, version=4))
    assert trainer.state.policy_version == 5


def test_a_batch_out_of_turn_or_outside_the_vocabulary_is_refused_and_changes_nothing(config, batch, member):
    trainer = Trainer(config())
    before = weights(trainer)
    with pytest.raises(MalformedMessage, match="the trainer's next is update 1 on version 0"):
        trainer.train(batch([member(1.0)], update=2))
    with pytest.raises(MalformedMessage, match="token id 32 is outside the vocabulary of 32"):
        trainer.train(batch([member(1.0, token_ids=pack_u32([32]), logprobs=pack_f32([-1.0]))]))
    assert same(before, weights(trainer)) and trainer.state.update == 0


def test_a_model_folder_that_cannot_be_used_says_why(config, tmp_path, model_folder):
    with pytest.raises(SettingsError, match=r"no config\.json"):
        Trainer(config(model_folder=tmp_path))
    partial = shutil.copytree(model_folder, tmp_path / "partial")
    save_file({"model.norm.weight": torch.ones(32)}, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"lacks \d+ of the model's tensors"):
        Trainer(config(model_folder=partial))


def test_a_real_model_folder_gives_its_weights(config, model_folder, tmp_path):
    trainer = Trainer(config())
    folder = shutil.copytree(model_folder, tmp_path / "full")
    changed = {name: tensor + 1 for name, tensor in load_file(trainer.checkpoint.weights_path).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    assert same(weights(Trainer(config(model_folder=folder, folder="other"))), changed)


def test_a_checkpoint_of_another_model_is_refused(config, model_folder, tmp_path):
    Trainer(config())
    wide = shutil.copytree(model_folder, tmp_path / "wide")
    raw = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**raw, "intermediate_size": 96}))
    with pytest.raises(BackendFailed, match="belongs to another model"):
        Trainer(config(model_folder=wide))
