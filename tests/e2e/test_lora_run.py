"""A LoRA run with a real trainer and a torch node: exact, the base travels once, and what is exported is the policy."""

import json
import stat
from pathlib import Path

import pytest

from echo_coordinator.commands.export import export_version
from echo_coordinator.demo.run_file import to_toml
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.trainer.settings import LoraSettings, TrainerConfig
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.errors import UsageError
from echo_swarm.manifest import ArtifactKind
from tests.e2e import test_sequential_exact as exact

UPDATES = 4
LORA = LoraSettings(rank=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"))
CHOSEN = exact.settings(updates=UPDATES, lora=LORA.model_dump())
run = exact.run


def train_alone(run: RunFolder, checkpoints: Path) -> Path:
    """Sample and train in this process."""
    from dataclasses import replace

    from echo_coordinator.trainer.engine import Trainer
    from echo_node.backends.torch_engine import TorchEngine

    trainer = Trainer(
        TrainerConfig(model_folder=run.model, checkpoint_folder=checkpoints, optimizer=exact.OPTIMIZER, lora=LORA)
    )
    engine, base = TorchEngine(exact.TORCH), checkpoints / "base" / "model.safetensors"
    for update in range(UPDATES):
        files = exact.policy_files(run, trainer.checkpoint.weights_path, update)
        engine.load(replace(files, base=base, base_digest=file_digest(base)))
        trainer.train(exact.sample(engine, update))
        trainer.checkpoint = trainer.save()
    return trainer.checkpoint.weights_path


def logits_of(folder: Path, adapter: Path | None = None):
    import torch
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        inject_adapter_in_model(LoraConfig(**json.loads((adapter / "adapter_config.json").read_text())), model)
        tensors = load_file(adapter / "adapter_model.safetensors")
        set_peft_model_state_dict(model, {n.removeprefix("base_model.model."): t for n, t in tensors.items()})
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 12).unsqueeze(0)).logits


@pytest.mark.anyio
async def test_a_lora_run_is_exact_fetches_its_base_once_and_exports_its_policy(run: RunFolder, tmp_path: Path) -> None:
    lags = await exact.train_with_swarm(run, tmp_path / "node", CHOSEN)
    assert lags == {0: UPDATES * exact.GROUPS * exact.MEMBERS}
    checkpoint = run.checkpoints / f"v{UPDATES:08d}"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "adapter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    alone = train_alone(run, tmp_path / "alone")
    assert (checkpoint / "adapter.safetensors").read_bytes() == alone.read_bytes()
    _check_stores(run, tmp_path / "node")
    _check_exports(run, tmp_path, alone)


def _check_stores(run: RunFolder, node_folder: Path) -> None:
    """The base lies in version 0 alone and outlives every retention; each version is an adapter that names it."""
    held = VersionStore(run.store, CHOSEN.run.id)
    base = file_digest(run.base)
    assert held.complete_versions(ArtifactKind.SAFETENSORS) == [0]
    assert held.complete_versions(ArtifactKind.LORA) == [0, UPDATES - 1, UPDATES]
    adapters = [held.manifest(version).message.artifact(ArtifactKind.LORA) for version in (UPDATES - 1, UPDATES)]
    assert {adapter.base_digest for adapter in adapters} == {base}
    (root,) = node_folder.rglob("v00000000")
    node = VersionStore(root.parent.parent, CHOSEN.run.id)
    assert node.complete_versions(ArtifactKind.SAFETENSORS) == [0]
    assert node.complete_versions(ArtifactKind.LORA)[-1] >= UPDATES - 1
    assert sum(1 for _ in node_folder.rglob("model.safetensors")) == 1


def _check_exports(run: RunFolder, folder: Path, adapter: Path) -> None:
    import torch

    run.settings.write_text(to_toml(CHOSEN.model_dump(exclude_none=True)))
    exported = export_version(run.root, folder / "adapter", version=None)
    assert (exported.version, exported.base) == (UPDATES, str(run.model))
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == exported.base
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter.read_bytes()
    assert export_version(run.root, folder / "merged", version=None, merged=True).version == UPDATES
    modes = {stat.S_IMODE(p.stat().st_mode) for name in ("adapter", "merged") for p in (folder / name).iterdir()}
    plain = folder / "plain"
    plain.touch()
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}, "as the person's umask says"
    over = logits_of(run.model, folder / "adapter")
    assert torch.allclose(logits_of(folder / "merged"), over, atol=1e-5)
    assert not torch.allclose(logits_of(run.model), over, atol=1e-3)
    with pytest.raises(UsageError, match="version 1 is not kept any more"):
        export_version(run.root, folder / "old", version=1)
