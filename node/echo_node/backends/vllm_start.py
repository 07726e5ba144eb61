"""From a policy to a running vLLM engine: what vLLM is told, how much memory it gets, how it is taken down again.

    check_artifact ─► weights_folder ─► start (fewer sequences when memory is short) ─► cut_vocabulary
                      config.json +                                                      │
                      model.safetensors                                    stop ◄────────┘

Import this module only after `prepare_environment`: vLLM reads its environment while it is imported.
"""

# vLLM lives in an environment of its own, where type checking does not look.
# pyright: reportMissingImports=false

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import EngineArgs, LLMEngine
from vllm.config.lora import MaxLoRARanks
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from echo_node.backends.base import LoadRefused, OutOfMemory, PolicyFiles
from echo_node.backends.gpu_memory import memory_share
from echo_node.backends.options import VllmOptions
from echo_node.backends.torch_lora import check_layers
from echo_node.backends.torch_model import match_tensors, model_config
from echo_node.machine import available_bytes, probe
from echo_node.model_shape import ModelShape
from echo_swarm.checkpoint.adapter_file import read_adapter
from echo_swarm.errors import BackendFailed, MalformedMessage

ADAPTER = "adapter"
"""Folder inside a model folder."""
CPU_BLOCK_TOKENS = 32
"""Tokens in one block of the CPU's cache. Only whole blocks of a prompt are shared, and vLLM's own 128 exceeds most
prompts; below 32 its kernel gets slow."""
CPU_CACHE_SHARE = 0.4
"""Of the memory that is free now, for the cache of keys and values on a CPU."""
DRAIN_STEPS = 100
"""Bounds an engine that never comes to rest before a swap."""
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where vLLM runs."""

    on_cpu: bool
    precision: str
    eager: bool


def check_artifact(policy: PolicyFiles) -> None:
    """Compare the file's tensors with the model's, by name and shape, before any weight is overwritten.

    vLLM itself only warns when a tensor is missing, and keeps the old one, or random memory, in its place. With an
    adapter, that is about its base, and the adapter's layers are compared with the model's.

    Raises:
        LoadRefused: they differ, the file cannot be read, or the config makes no model.

    """
    try:
        config = model_config(policy)
        with no_init_weights(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    except LoadRefused:
        raise
    except Exception as e:
        raise LoadRefused(f"cannot build the model from its config: {type(e).__name__}: {first_line(e)}") from e
    try:
        with safe_open(policy.base or policy.artifact, framework="pt") as file:
            match_tensors(model, file)
        if policy.base is not None:
            check_layers(model, read_adapter(policy.artifact))
    except (OSError, SafetensorError, MalformedMessage) as e:
        raise LoadRefused(f"cannot read {policy.artifact.name}: {first_line(e)}") from e
    rows, longest = model.get_input_embeddings().num_embeddings, getattr(config, "max_position_embeddings", None)
    if policy.vocabulary_size > rows:
        raise LoadRefused(f"the run's vocabulary of {policy.vocabulary_size} is larger than the model's {rows}")
    if longest is not None and context_tokens(policy) > longest:
        raise LoadRefused(f"the run allows {context_tokens(policy)} tokens, the model's context is {longest}")


def context_tokens(policy: PolicyFiles) -> int:
    """Return the longest prompt and completion together."""
    return policy.max_prompt_tokens + policy.max_completion_tokens


def write_folder(policy: PolicyFiles, folder: Path) -> None:
    """Lay out a model folder as vLLM wants it: a cleaned config, a link to the weights, and ADAPTER if there is one."""
    fields: dict[str, Any] = json.loads(policy.model_config_json)
    # Never code from a model. What the file's numbers are stored as says nothing about how we compute.
    for name in ("auto_map", "dtype", "torch_dtype"):
        fields.pop(name, None)
    fields.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields["model_type"], "")])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (folder / "model.safetensors").symlink_to((policy.base or policy.artifact).resolve())
    if policy.base is not None:
        adapter = folder / ADAPTER
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps(read_adapter(policy.artifact).config), encoding="utf-8")
        (adapter / "adapter_model.safetensors").symlink_to(policy.artifact.resolve())


def fixed_at_start(policy: PolicyFiles) -> tuple[object, ...]:
    """Return what vLLM cannot change while it runs: with an adapter also its base, and room for its rank."""
    return (
        policy.model_config_json,
        context_tokens(policy),
        policy.vocabulary_size,
        policy.base_digest,
        _rank_room(policy),
    )


def _rank_room(policy: PolicyFiles) -> int:
    """Return the smallest of vLLM's sizes that an adapter fits into; 0 without an adapter."""
    if policy.base is None:
        return 0
    rank = read_adapter(policy.artifact).rank
    return next(room for room in get_args(MaxLoRARanks) if room >= rank)


def use_adapter(engine: LLMEngine, folder: Path, number: int) -> LoRARequest:
    """Load the adapter of a model folder. Number and path are new, so that no cached block is mistaken for one of its.

    Raises:
        LoadRefused: vLLM does not take it.

    """
    request = LoRARequest(str(number), number, str(folder / ADAPTER))
    try:
        taken = engine.add_lora(request)
    except Exception as e:
        raise LoadRefused(f"vLLM does not take the adapter: {first_line(e)}") from e
    if not taken:
        raise LoadRefused("vLLM does not take the adapter")
    return request


def drop_adapter(engine: LLMEngine, old: LoRARequest | None) -> bool:
    """Take the old version's adapter out. False when something still ran, or it is not gone."""
    if not _at_rest(engine):
        return False
    if old is not None:
        engine.remove_lora(old.lora_int_id)
    return not engine.list_loras() and engine.reset_prefix_cache()


def start(policy: PolicyFiles, folder: Path, options: VllmOptions, device: Device, batch: int) -> tuple[LLMEngine, int]:
    """Start vLLM with up to `batch` sequences at once, with half as many as often as memory does not suffice.

    Returns:
        The engine and the number of sequences it got.

    Raises:
        LoadRefused: it does not start, or not even one sequence fits; with vLLM's reason.

    """
    while True:
        try:
            engine = LLMEngine.from_engine_args(_arguments(policy, folder, options, device, batch))
            engine.collective_rpc(cut_vocabulary, args=(policy.vocabulary_size,))
            return engine, batch
        except Exception as e:  # noqa: BLE001 - vLLM wraps what went wrong in many ways; all end here
            reason = f"{type(e).__name__}: {first_line(e)}"
            short = is_out_of_memory(e)
        # Outside the handler: the exception's frames hold what shall be freed.
        stop(None)
        if not short:
            raise LoadRefused(f"vLLM does not start: {reason}")
        if batch == 1:
            raise LoadRefused(f"not even one sequence fits into memory: {reason}")
        batch //= 2


def _arguments(policy: PolicyFiles, folder: Path, options: VllmOptions, device: Device, batch: int) -> EngineArgs:
    arguments: dict[str, Any] = {}
    if room := _rank_room(policy):
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}
    if device.on_cpu:
        arguments["block_size"] = CPU_BLOCK_TOKENS
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(policy, batch, _WIDTH[device.precision], available_bytes())
    else:
        arguments["gpu_memory_utilization"] = memory_share(options.memory, _gpu_memory(options.tensor_parallel))
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="safetensors",
        # Sampling settings come with each request, never from a file beside the weights.
        generation_config="vllm",
        dtype=device.precision,  # pyright: ignore[reportArgumentType]
        max_model_len=context_tokens(policy),
        max_num_seqs=batch,
        # Of the distribution that is sampled from, after temperature; vLLM's default is before it.
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        enable_prefix_caching=True,
        tensor_parallel_size=options.tensor_parallel,
        enforce_eager=device.eager,
        disable_log_stats=True,
        **arguments,
    )


def _gpu_memory(count: int) -> list[tuple[int, int]]:
    """Return free and total bytes of the GPUs that vLLM will use."""
    if count > 1:
        # Asked from here, torch would take some hundred MiB on each, which vLLM's workers then lack.
        return [(gpu.free_bytes, gpu.total_bytes) for gpu in probe().gpus[:count]]
    # What an engine before this one has given back, torch still keeps.
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info()]


def cpu_cache_bytes(policy: PolicyFiles, batch: int, width: int, available_bytes: int) -> int:
    """Return what `batch` sequences of full length need for keys and values, one spare sequence included.

    Raises:
        OutOfMemory: that is more than `CPU_CACHE_SHARE` of what is available.

    """
    try:
        shape = ModelShape.parse(policy.model_config_json)
    except BackendFailed as e:
        raise LoadRefused(str(e)) from e
    tokens = (context_tokens(policy) // CPU_BLOCK_TOKENS + 1) * CPU_BLOCK_TOKENS
    needed = (batch + 1) * tokens * shape.cache_numbers_per_token * width
    if needed > CPU_CACHE_SHARE * available_bytes:
        raise OutOfMemory(
            f"the cache of {batch} sequences of {context_tokens(policy)} tokens takes {needed >> 20} MiB, "
            f"and {int(CPU_CACHE_SHARE * available_bytes) >> 20} MiB of memory may be used for it"
        )
    return needed


def cut_vocabulary(worker: Any, vocabulary_size: int) -> None:
    """Drop the logits of padding rows, so that no id beyond the vocabulary is sampled or has a share of the mass.

    Runs in each worker. vLLM cuts off its own padding in the same way; naming the allowed ids with each request would
    cost a pass over the vocabulary a step, and the GPU's sampler takes at most 1,024 of them.
    """
    for module in worker.get_model().modules():
        if isinstance(module, LogitsProcessor):
            module.org_vocab_size = min(module.org_vocab_size, vocabulary_size)
            # The one that counts where vLLM has put its layer for adapters around the head.
            module.vocab_size = min(module.vocab_size, vocabulary_size)


def swap(engine: LLMEngine, folder: Path) -> bool:
    """Copy a model folder's weights over the old ones, in place.

    Returns:
        False when something still ran, or anything is left of the old weights.

    """
    if not _at_rest(engine):
        return False
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    return all(engine.collective_rpc(mend_tied_heads)) and engine.reset_prefix_cache()


def _at_rest(engine: LLMEngine) -> bool:
    for _ in range(DRAIN_STEPS):
        # Succeeds only when no block of the cache is in use.
        if engine.reset_prefix_cache():
            return True
        # A step that was scheduled ahead may still hold blocks.
        engine.step()
    return False


def mend_tied_heads(worker: Any) -> bool:
    """Prepare an output head anew that shares the embedding's weights. Returns whether it shares them still.

    Runs in each worker. vLLM's reload fills the shared tensor, but the head has no entry of its own in the file and is
    passed over: where the head multiplies with a packed copy, as on CPUs, that copy would stay the old one.
    """
    modules = [m for m in worker.get_model().modules() if isinstance(m, VocabParallelEmbedding)]
    heads = [module for module in modules if isinstance(module, ParallelLMHead)]
    embeddings = {module.weight.data_ptr() for module in modules if not isinstance(module, ParallelLMHead)}
    tied = worker.model_config.hf_text_config.tie_word_embeddings
    for head in heads if tied else ():
        if head.weight.data_ptr() not in embeddings:
            return False
        head.quant_method.process_weights_after_loading(head)
    return True


def stop(engine: LLMEngine | None) -> None:
    """Free what an engine held, or one that failed half-way through its start, so that another can start."""
    if engine is not None:
        engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    gc.collect()


def is_out_of_memory(e: BaseException) -> bool:
    """Say whether fewer sequences might help. On a CPU, and before the first step, vLLM tells by text only."""
    if isinstance(e, (OutOfMemory, torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(e).lower()
    known = ("out of memory", "not enough memory", "can't allocate", "memory for the cache blocks", "available memory")
    return any(words in text for words in known)


def first_line(e: BaseException) -> str:
    """Return what an exception says, shortened; of pydantic's, which start with a count, the first problem."""
    if isinstance(e, ValidationError):
        return str(e.errors()[0]["msg"])[:300]
    return next(iter(str(e).splitlines()), type(e).__name__)[:300]
