"""A whole LoRA run with a llama.cpp node: real coordinator, real trainer, real node, real streams."""

from pathlib import Path

from echo_swarm.manifest import ArtifactKind
from tests.backends import lora_run

LARGEST = 1e-3


def test_a_llama_cpp_node_carries_a_lora_run_and_samples_each_version_as_the_trainer_has_it(tmp_path: Path) -> None:
    swarm = lora_run.make_run(tmp_path)
    status = lora_run.train_with(swarm, "llama_cpp:threads=1,batch=4")
    lora_run.check_trajectories(swarm, status, kind=ArtifactKind.LORA_GGUF, largest=LARGEST)
    lora_run.check_mismatch(swarm, status, backend="llama_cpp", precision="f32", largest=LARGEST)
    lora_run.check_traffic(swarm, ArtifactKind.GGUF, ArtifactKind.LORA_GGUF)
