"""A whole LoRA run with a vLLM node, its child in vLLM's own environment."""

from pathlib import Path

from echo_swarm.manifest import ArtifactKind
from tests.backends import lora_run

LARGEST = 1e-3


def test_a_vllm_node_carries_a_lora_run_and_samples_each_version_as_the_trainer_has_it(
    vllm_python: str, tmp_path: Path
) -> None:
    swarm = lora_run.make_run(tmp_path)
    status = lora_run.train_with(swarm, "vllm:threads=1,batch=8", python=vllm_python)
    lora_run.check_trajectories(swarm, status, kind=ArtifactKind.LORA, largest=LARGEST)
    lora_run.check_mismatch(swarm, status, backend="vllm", precision="float32", largest=LARGEST)
    lora_run.check_traffic(swarm, ArtifactKind.SAFETENSORS, ArtifactKind.LORA)
