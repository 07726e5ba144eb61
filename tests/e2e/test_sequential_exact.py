"""Sequential pull is exact: the swarm's weights equal, bit for bit, those of one process that samples and trains.

The swarm: the coordinator's wiring, the trainer in its child and a node with its torch backend in a child, on
in-memory streams. The plain loop: the same engine and the same trainer, called one after the other. Prompts and
rewards come from a function, so that every update has a signal.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from echo_coordinator.config import RunSettings
from echo_coordinator.coordinator import Children, real_children, run_coordinator
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.scoring.pool import Prompt, Scored, ScoreRequest
from echo_coordinator.state.seeds import member_seed
from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.settings import OptimizerSettings, TrainerConfig
from echo_node.backends.base import GenerationRequest, PolicyFiles
from echo_node.backends.child import start_backend
from echo_node.backends.options import TorchOptions
from echo_node.config import NodeConfig
from echo_node.node import Node, NodeSeams, Outcome
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.clock import SystemClock
from echo_swarm.codec import pack_f32, pack_u32, unpack_u32
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.identity import Identity
from echo_swarm.transport.memory import MemoryNetwork

UPDATES = 20
GROUPS = 4
MEMBERS = 4
TOKENS = 8
END = 1
VOCABULARY = 16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": END,
}
OPTIMIZER = OptimizerSettings(learning_rate=3e-3, threads=1, device="cpu", seed=3)
TORCH = TorchOptions(batch=64, threads=1, device="cpu", precision="float32")
"""Room for several updates at once, so that a whole update is always asked for in one go."""


def prompt_of(index: int) -> bytes:
    """Four ids that depend on the index."""
    return pack_u32([2 + (index * 7 + position * 3) % (VOCABULARY - 2) for position in range(4)])


def reward_of(token_ids: bytes) -> float:
    """The share of even ids: something that sampling varies and training can raise."""
    ids = unpack_u32(token_ids)
    return sum(token % 2 == 0 for token in ids) / len(ids)


class FunctionScorers:
    async def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        return [Prompt(index=i, prompt_ids=prompt_of(i), text="") for i in range(start, start + count)]

    def why_skipped(self) -> str:
        return ""

    def held_up(self) -> str:
        return ""

    async def score(self, items: Sequence[ScoreRequest]) -> list[Scored]:
        return [Scored(reward=reward_of(item.token_ids), failure=None, text="") for item in items]


@asynccontextmanager
async def function_scorers() -> AsyncGenerator[FunctionScorers]:
    yield FunctionScorers()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run around a small random model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder = RunFolder(tmp_path / "run")
    folder.model.mkdir(parents=True)
    (folder.model / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder.model / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings(*, updates: int = UPDATES, **sections: dict[str, object]) -> RunSettings:
    return RunSettings.model_validate(
        {
            "run": {"id": "5" * 32, "name": "exact", "updates": updates},
            "environment": {"name": "function", "max_prompt_tokens": 8},
            "work": {
                "mode": "sequential",
                "group_size": MEMBERS,
                "groups_per_update": GROUPS,
                "max_tokens": TOKENS,
                "seed": 11,
                "no_signal": "keep",
                "beat_s": 0.5,
            },
            "optimizer": OPTIMIZER.model_dump(),
            "evaluation": {"every": 0},
            **sections,
        }
    )


async def train_with_swarm(run: RunFolder, node_folder: Path, chosen: RunSettings) -> dict[int, int]:
    """Run to the end; return how many completions were trained by staleness."""
    publisher, volunteer = Identity.generate(), Identity.generate()
    network, store, clock = MemoryNetwork(seed=1), DirectoryStore(), SystemClock()
    real = real_children(run, chosen)
    children = Children(open_trainer=real.open_trainer, open_scorers=function_scorers)
    async with network.host(publisher) as host, network.host(volunteer) as node_host:
        directory = MemoryDirectory(store, publisher, clock)
        async with run_coordinator(run, chosen, publisher, host, directory, children) as coordinator:
            node = Node(
                NodeConfig(state_dir=node_folder),
                coordinator.invite,
                NodeSeams(
                    host=node_host,
                    directory=MemoryDirectory(store, volunteer, clock),
                    identity=volunteer,
                    clock=clock,
                    open_backend=lambda: start_backend(TORCH, log_path=node_folder / "backend.log"),
                    wanted_files=TORCH.wanted(),
                    emit=lambda line: None,
                ),
            )
            with anyio.fail_after(240):
                assert await node.run() is Outcome.FINISHED
                await coordinator.ended.wait()
            assert coordinator.state.updates.count == chosen.run.updates
            return coordinator.state.updates.lags()


def train_alone(run: RunFolder, checkpoints: Path) -> Path:
    """Sample and train in this process."""
    from echo_coordinator.trainer.engine import Trainer
    from echo_node.backends.torch_engine import TorchEngine

    trainer = Trainer(
        TrainerConfig(
            model_folder=run.model,
            checkpoint_folder=checkpoints,
            temperature=1.0,
            optimizer=OPTIMIZER,
        )
    )
    engine = TorchEngine(TORCH)
    for update in range(UPDATES):
        engine.load(policy_files(run, trainer.checkpoint.weights_path, update))
        trainer.train(sample(engine, update))
        trainer.checkpoint = trainer.save()
    return trainer.checkpoint.weights_path


def policy_files(run: RunFolder, weights: Path, version: int) -> PolicyFiles:
    return PolicyFiles(
        policy_version=version,
        artifact=weights,
        artifact_digest=file_digest(weights),
        model_config_json=(run.model / "config.json").read_text(),
        end_token_ids=(END,),
        vocabulary_size=VOCABULARY,
        max_prompt_tokens=8,
        max_completion_tokens=TOKENS,
    )


def sample(engine, update: int) -> TrainingBatch:
    """One update's completions, all submitted at once in the order of groups and members."""
    groups = range(update * GROUPS, (update + 1) * GROUPS)
    requests = [
        GenerationRequest(
            request_id=group * MEMBERS + member,
            prompt_ids=tuple(unpack_u32(prompt_of(group))),
            max_tokens=TOKENS,
            temperature=1.0,
            seed=member_seed(11, group, member, 0),
        )
        for group in groups
        for member in range(MEMBERS)
    ]
    engine.submit(requests)
    made = {}
    while engine.pending:
        made.update({completion.request_id: completion for completion in engine.step()})
    return TrainingBatch(
        update=update + 1,
        policy_version=update,
        groups=tuple(
            Group(
                group_id=group,
                members=tuple(member_of(group, made[group * MEMBERS + m], update) for m in range(MEMBERS)),
            )
            for group in groups
        ),
    )


def member_of(group: int, completion, version: int) -> Member:
    token_ids = pack_u32(completion.token_ids)
    return Member(
        prompt_ids=prompt_of(group),
        token_ids=token_ids,
        logprobs=pack_f32(completion.logprobs),
        reward=reward_of(token_ids),
        oldest_version=version,
        newest_version=version,
        backend="torch",
        precision="float32",
        peer_id="alone",
        finish_reason=completion.finish_reason.value,
    )


@pytest.mark.anyio
async def test_sequential_swarm_and_one_process_train_bit_identical_weights(run: RunFolder, tmp_path: Path) -> None:
    lags = await train_with_swarm(run, tmp_path / "node", settings())
    swarm = run.checkpoints / f"v{UPDATES:08d}" / "model.safetensors"
    alone = train_alone(run, tmp_path / "alone")
    assert lags == {0: UPDATES * GROUPS * MEMBERS}
    assert swarm.read_bytes() == alone.read_bytes()
    assert swarm.read_bytes() != (run.model / "model.safetensors").read_bytes()
