"""What a library alone needs to take new weights, without a node around it; run by the backend's own interpreter.

    python _swap_bare_load.py '{"backend": ..., "config": PATH, "base": PATH or null, "files": [PATH, ...], ...}'

Prints a JSON list of seconds, one a file; the first load of all, which also builds things, is not among them.

    torch       safetensors' load_file and load_state_dict into the model that is there; of an adapter PEFT's
                set_peft_model_state_dict
    llama_cpp   llama_model_load_from_file, and a context; of an adapter llama_adapter_lora_init, and a context
    vllm        reload_weights; of an adapter remove_lora and add_lora
"""

# vLLM lives in an environment of its own, where type checking does not look.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Load = Callable[[Path], None]


def torch_whole(job: dict[str, Any]) -> Load:
    from safetensors.torch import load_file

    model = _transformers_model(job)

    def load(path: Path) -> None:
        left = model.load_state_dict(load_file(path), strict=False)
        # Of a tied head there is no second copy in the file.
        assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left

    return load


def torch_adapter(job: dict[str, Any]) -> Load:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(job["files"][0], framework="pt") as file:
        config = json.loads(file.metadata()["adapter_config"])
    model = get_peft_model(_transformers_model(job), LoraConfig(**config))

    def load(path: Path) -> None:
        left = set_peft_model_state_dict(model, load_file(path))
        assert not left.unexpected_keys, left

    return load


def _transformers_model(job: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(Path(job["config"]).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    return model.requires_grad_(False)


def llama_whole(job: dict[str, Any]) -> Load:
    import llama_cpp as lib

    held: list[Any] = []

    def load(path: Path) -> None:
        if held:
            lib.llama_free(held.pop())
            lib.llama_model_free(held.pop())
        held.append(lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params()))
        held.append(_llama_context(lib, held[0], job))

    return load


def llama_adapter(job: dict[str, Any]) -> Load:
    import llama_cpp as lib

    model: Any = lib.llama_model_load_from_file(os.fsencode(job["base"]), lib.llama_model_default_params())
    held: list[Any] = []

    def load(path: Path) -> None:
        if held:
            lib.llama_free(held.pop())
            lib.llama_adapter_lora_free(held.pop())
        held.append(lib.llama_adapter_lora_init(model, os.fsencode(path)))
        held.append(_llama_context(lib, model, job))

    return load


def _llama_context(lib: Any, model: Any, job: dict[str, Any]) -> Any:
    params = lib.llama_context_default_params()
    params.n_seq_max = job["batch"]
    params.n_ctx = 256 * job["batch"]
    params.n_batch = job["batch"] + 512
    context = lib.llama_init_from_model(model, params)
    assert context, "llama.cpp made no context"
    return context


def vllm_whole(job: dict[str, Any]) -> Load:
    engine = _vllm_engine(job, Path(job["files"][0]))

    def load(path: Path) -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(_folder(job, path))})

    return load


def vllm_adapter(job: dict[str, Any]) -> Load:
    from safetensors import safe_open
    from vllm.lora.request import LoRARequest

    with safe_open(job["files"][0], framework="pt") as file:
        config = json.loads(file.metadata()["adapter_config"])
    settings = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": config["r"]}
    engine = _vllm_engine(job, Path(job["base"]), **settings)
    numbers = iter(range(1, 10_000))
    last: list[int] = []

    def load(path: Path) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "adapter_model.safetensors").symlink_to(path)
        if last:
            engine.remove_lora(last.pop())
        last.append(next(numbers))
        assert engine.add_lora(LoRARequest(str(last[0]), last[0], str(folder)))

    return load


def _vllm_engine(job: dict[str, Any], weights: Path, **settings: Any) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    from vllm import EngineArgs, LLMEngine

    arguments = EngineArgs(
        model=str(_folder(job, weights)),
        skip_tokenizer_init=True,
        load_format="safetensors",
        dtype="float32",
        max_model_len=job["tokens"],
        max_num_seqs=job["batch"],
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        **settings,
    )
    return LLMEngine.from_engine_args(arguments)


def _folder(job: dict[str, Any], weights: Path) -> Path:
    """Return a model folder with a link to the weights."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(Path(job["config"]).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "model.safetensors").symlink_to(weights)
    return folder


LOADS: dict[tuple[str, bool], Callable[[dict[str, Any]], Load]] = {
    ("torch", False): torch_whole,
    ("torch", True): torch_adapter,
    ("llama_cpp", False): llama_whole,
    ("llama_cpp", True): llama_adapter,
    ("vllm", False): vllm_whole,
    ("vllm", True): vllm_adapter,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.nice(10)
    load = LOADS[job["backend"], job["base"] is not None](job)
    load(Path(job["files"][0]))
    seconds: list[float] = []
    for name in job["files"]:
        began = time.perf_counter()
        load(Path(name))
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
