"""llama.cpp computes what transformers does from every file that is written: names, order of rows, rotation, biases."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo_coordinator.publisher.gguf.write import write_gguf
from echo_node.backends.llama_library import library
from tests.unit.publisher import gguf_models as models

TOKENS = 120
"""Beyond Llama 3's original context in these models, so that each band of its rotation is at work."""
LARGEST = {"f32": 1e-3, "f16": 0.05, "bf16": 0.5}


def llama_logprobs(path: Path, ids: list[int]) -> torch.Tensor:
    """Return log-probabilities [token, vocabulary], key-value memory and attention in float32."""
    lib = library()
    model_options = lib.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), model_options)
    assert model
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 256, len(ids), len(ids)
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0
    options.flash_attn_type = 0
    context = lib.llama_init_from_model(model, options)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert lib.llama_decode(context, batch) == 0
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        logits = np.ctypeslib.as_array(lib.llama_get_logits(context), shape=(len(ids), vocabulary)).copy()
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        lib.llama_model_free(model)
    return torch.log_softmax(torch.from_numpy(logits).double(), -1)


@pytest.mark.parametrize("precision", LARGEST)
@pytest.mark.parametrize("name", models.MODELS)
def test_log_probabilities_are_those_of_transformers(name: str, precision: str, tmp_path: Path) -> None:
    model = models.save_model(name, tmp_path)
    ids = torch.randint(0, models.SIZES["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
    target = tmp_path / "model.gguf"
    write_gguf(tmp_path / "model.safetensors", (tmp_path / "config.json").read_text(), target, precision)
    difference = (llama_logprobs(target, ids.tolist()) - expected).abs().max().item()
    print(f"{name}, {precision}: largest difference of any log-probability {difference:.1e}")
    assert difference <= LARGEST[precision]
