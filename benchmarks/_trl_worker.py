"""TRL's side of `compare_trl`: one run of GRPOTrainer, unchanged, in an environment of its own.

    python benchmarks/_trl_worker.py JOB.json

Reads the job (see `compare_trl`), trains, writes the weights of the asked versions and RESULT.json beside the job.
Prompts come in the job's order, rewards from our environment class, learning rate from our schedule; sampling, loss and
optimizer steps are TRL's. Time runs from the start of training; writing weights is taken out.
"""

# trl and datasets are installed in TRL's environment only.
# pyright: reportMissingImports=false

import json
import os
import sys
import time
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}
PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch", "reasoning-gym")


def main() -> None:
    """Run the job named on the command line."""
    began = time.perf_counter()
    os.environ.update(OFFLINE)
    path = Path(sys.argv[1])
    job: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    result = _train(job, path.parent, began)
    result["packages"] = {name: package_version(name) for name in PACKAGES}
    (path.parent / "result.json").write_text(json.dumps(result, indent=2), encoding="utf-8")


def _train(job: dict[str, Any], folder: Path, began: float) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = _rows(Path(job["train"]), tokenizer)
    optimizer = _optimizer(model, job["optimizer"])
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=_arguments(job, folder),
        train_dataset=Dataset.from_list([{"prompt": row["text"], "index": row["index"]} for row in rows]),
        reward_funcs=_reward(job["environment"]),
        optimizers=(optimizer, _schedule(optimizer, job)),
    )
    recorder = _recorder(job, folder)
    trainer.add_callback(recorder)
    trainer.train()
    return {"startup_s": recorder.started - began, "versions": recorder.versions}


def _rows(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the training prompts, after checking that TRL's tokenizer makes the same ids of them as ours."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        ids = tokenizer(text=row["text"])["input_ids"]
        if ids != row["prompt_ids"]:
            raise SystemExit(f"prompt {row['index']}: tokenised as {ids}, the swarm's ids are {row['prompt_ids']}")
    return rows


def _arguments(job: dict[str, Any], folder: Path) -> Any:
    from trl import GRPOConfig

    work, objective, optimizer = job["work"], job["objective"], job["optimizer"]
    samples = work["group_size"] * work["groups_per_update"]
    loss_types = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=job["seed"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        # What is sampled.
        num_generations=work["group_size"],
        generation_batch_size=samples,
        shuffle_dataset=False,
        temperature=work["temperature"],
        top_p=1.0,
        top_k=0,
        max_completion_length=work["max_tokens"],
        # One update is epochs x minibatches optimizer steps.
        per_device_train_batch_size=samples // optimizer["minibatches"],
        gradient_accumulation_steps=1,
        num_iterations=optimizer["epochs"],
        max_steps=job["updates"] * optimizer["epochs"] * optimizer["minibatches"],
        max_grad_norm=optimizer["max_grad_norm"] or 0.0,
        # The loss.
        loss_type=loss_types[objective["aggregation"]],
        scale_rewards="group" if objective["normalise_std"] else "none",
        epsilon=objective["clip_low"],
        epsilon_high=objective["clip_high"],
        delta=objective["importance_cap"],
        beta=objective["kl_coefficient"],
        use_bias_correction_kl=False,
        mask_truncated_completions=objective["mask_truncated"],
        # Nothing beside training.
        use_vllm=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def _optimizer(model: Any, settings: dict[str, Any]) -> Any:
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=settings["learning_rate"],
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
    )


def _schedule(optimizer: Any, job: dict[str, Any]) -> Any:
    from torch.optim.lr_scheduler import LambdaLR

    from echo_coordinator.trainer.schedule import learning_rate
    from echo_coordinator.trainer.settings import OptimizerSettings

    settings = OptimizerSettings.model_validate(job["optimizer"])
    steps = settings.epochs * settings.minibatches
    return LambdaLR(optimizer, lambda step: learning_rate(settings, step // steps + 1) / settings.learning_rate)


def _reward(environment: dict[str, Any]) -> Any:
    from echo_coordinator.environments.base import Split
    from echo_coordinator.environments.registry import open_environment

    scorer = open_environment(environment["name"], environment["settings"])

    def environment_reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [scorer.reward(Split.TRAIN, i, text) for i, text in zip(index, completions, strict=True)]

    return environment_reward


def _recorder(job: dict[str, Any], folder: Path) -> Any:
    """Return a callback that writes the weights of the asked versions and notes when each version was there."""
    from transformers import TrainerCallback

    from echo_coordinator.trainer.model import save_weights

    steps = job["optimizer"]["epochs"] * job["optimizer"]["minibatches"]
    samples = job["work"]["group_size"] * job["work"]["groups_per_update"]

    class Recorder(TrainerCallback):
        started = 0.0
        saving_s = 0.0

        def __init__(self) -> None:
            self.versions: dict[int, dict[str, Any]] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._note(0, kwargs["model"], 0.0)
            self.started = time.perf_counter()
            self.saving_s = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            version, rest = divmod(state.global_step, steps)
            if not rest:
                self._note(version, kwargs["model"], time.perf_counter() - self.started - self.saving_s)

        def _note(self, version: int, model: Any, seconds: float) -> None:
            entry: dict[str, Any] = {"seconds": seconds, "samples": version * samples}
            if version in job["versions"]:
                began = time.perf_counter()
                entry["weights"] = str(folder / f"v{version:08d}.safetensors")
                save_weights(model, Path(entry["weights"]))
                self.saving_s += time.perf_counter() - began
            self.versions[version] = entry

    return Recorder()


if __name__ == "__main__":
    main()
