"""One GGUF model and one llama.cpp context with many sequences, as ids in and logits out.

    LlamaModel.open(file) ─► LlamaContext(model, shape) ─► decode(ids, positions, sequences, wanted) ─► logits [n, rows]
                                                          copy · trim · clear      the sequences' memory

Each sequence has memory of its own (`kv_unified` off): attention then reads only what belongs to it, and a copy of one
sequence to another copies numbers, at the next `decode`. Nothing here ever shifts a context: positions are given by the
caller, who never gives one at or beyond `tokens_per_sequence`.

llama.cpp computes sequences together only where their numbers are consecutive, so `decode` wants them ascending, and
its caller keeps them without holes.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from echo_node.backends.base import LoadRefused, OutOfMemory
from echo_node.backends.llama_library import complaints, ftype_name, library
from echo_swarm.errors import BackendFailed

PASS_TOKENS = 512
"""Tokens of one pass through the model; bounds the memory of activations."""
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
"""ggml's number for each type that the key-value memory may have."""
_MAGIC = b"GGUF"
_DISABLED, _ENABLED = 0, 1
_PAGE_TOKENS = 256
"""llama.cpp rounds a sequence's memory up to this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShape:
    """What a context is made for."""

    sequences: int
    tokens_per_sequence: int
    """Prompt and completion together."""
    batch_tokens: int
    """Most tokens of one `decode`."""
    threads: int
    kv: str
    """A key of KV_TYPES."""
    offload: bool
    """Keep the key-value memory on the device that has the layers."""


class LlamaModel:
    """Weights. Closed by `close`, after every context made from it."""

    def __init__(self, handle: Any) -> None:
        """Use `open` instead."""
        lib = library()
        self.handle = handle
        self.vocabulary: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(handle))
        self.trained_tokens: int = lib.llama_model_n_ctx_train(handle)
        self.precision = ftype_name(lib.llama_model_ftype(handle))
        self.recurrent = bool(lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle))
        self.window: int = lib.llama_model_n_swa(handle)

    @classmethod
    def open(cls, path: Path, *, gpu_layers: int) -> Self:
        """Read a GGUF file.

        Raises:
            LoadRefused: it cannot be read, is no GGUF file, or llama.cpp refuses it; with llama.cpp's own words.

        """
        try:
            with path.open("rb") as file:
                magic = file.read(len(_MAGIC))
        except OSError as e:
            raise LoadRefused(f"cannot read {path.name}: {e.strerror}") from e
        if magic != _MAGIC:
            raise LoadRefused(f"{path.name} is no GGUF file")
        lib = library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        complaints()
        handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise LoadRefused(f"llama.cpp cannot load {path.name}: {complaints()}")
        return cls(handle)

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self.handle:
            library().llama_model_free(self.handle)
            self.handle = None


class LlamaAdapter:
    """A LoRA adapter over one model. Closed by `close`, after every context that uses it and before the model."""

    def __init__(self, model: LlamaModel, path: Path) -> None:
        """Raises LoadRefused when the file cannot be read, or is no adapter of this model; in llama.cpp's words."""
        complaints()
        self.handle = library().llama_adapter_lora_init(model.handle, str(path).encode())
        if not self.handle:
            raise LoadRefused(f"llama.cpp cannot load {path.name}: {complaints()}")

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self.handle:
            library().llama_adapter_lora_free(self.handle)
            self.handle = None


class LlamaContext:
    """Memory and scratch space for `shape.sequences` sequences, numbered from 0."""

    def __init__(self, model: LlamaModel, shape: ContextShape, adapter: LlamaAdapter | None = None) -> None:
        """Raises OutOfMemory when llama.cpp cannot make it, BackendFailed when it does not take the adapter."""
        lib = library()
        self.shape = shape
        self._rows = model.vocabulary
        complaints()
        self._handle = lib.llama_init_from_model(model.handle, _context_params(lib, shape))
        if not self._handle:
            raise OutOfMemory(
                f"no context for {shape.sequences} sequences of {shape.tokens_per_sequence} tokens: {complaints()}"
            )
        if lib.llama_n_ctx_seq(self._handle) < shape.tokens_per_sequence:
            self.close()
            raise BackendFailed(f"llama.cpp made a context shorter than {shape.tokens_per_sequence} tokens")
        if adapter is not None:
            self._use(adapter)
        self._memory = lib.llama_get_memory(self._handle)
        self._decode = lib.llama_decode
        self._get_logits = lib.llama_get_logits
        self._batch = _Batch(lib, shape)

    def _use(self, adapter: LlamaAdapter) -> None:
        lib = library()
        handles = (lib.llama_adapter_lora_p_ctypes * 1)(adapter.handle)
        # The scale beside alpha / rank, which llama.cpp takes from the file.
        if lib.llama_set_adapters_lora(self._handle, handles, 1, (ctypes.c_float * 1)(1.0)):
            self.close()
            raise BackendFailed(f"llama.cpp does not take the adapter: {complaints()}")

    def decode(
        self, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]
    ) -> NDArray[np.float32]:
        """Run tokens through the model.

        Args:
            ids: token ids, all of them below the model's vocabulary.
            positions: of each token within its sequence, ascending by 1.
            sequences: whose token it is; ascending.
            wanted: whether its logits are wanted; of at most as many tokens as there are sequences.

        Returns:
            [wanted tokens, vocabulary], in the order of `ids`. A view of llama.cpp's own memory: it holds until the
            next call.

        Raises:
            OutOfMemory: an allocation failed; the sequences' memory is in an unknown state.
            BackendFailed: anything else that llama.cpp reports.

        """
        outputs = self._batch.fill(ids, positions, sequences, wanted)
        # llama.cpp would end the process.
        assert outputs <= self.shape.sequences, "its buffers have room for one row of logits a sequence"
        code = self._decode(self._handle, self._batch.struct)
        if code == -2:
            raise OutOfMemory(f"llama_decode of {len(ids)} tokens: {complaints()}")
        if code != 0:
            raise BackendFailed(f"llama_decode of {len(ids)} tokens ended with code {code}: {complaints()}")
        if not outputs:
            return np.empty((0, self._rows), np.float32)
        # Waits for devices, and puts the rows into the order of the batch.
        return np.ctypeslib.as_array(self._get_logits(self._handle), shape=(outputs, self._rows))

    def copy(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds. The numbers are copied by the next `decode`, before it computes."""
        library().llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        if not library().llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise BackendFailed(f"llama.cpp cannot cut sequence {sequence} to {length} tokens")

    def clear(self, *, numbers: bool) -> None:
        """Forget all sequences; `numbers`: and set their memory to zero."""
        library().llama_memory_clear(self._memory, numbers)

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self._handle:
            library().llama_free(self._handle)
            self._handle = None


class _Batch:
    """The C struct `llama_batch` over numpy arrays that are filled anew for each `decode`."""

    def __init__(self, lib: Any, shape: ContextShape) -> None:
        size = shape.batch_tokens
        self._ids = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._pointers = np.zeros(size, np.uintp)
        self._wanted = np.zeros(size, np.int8)
        # Each token points to a list of one sequence number: into this array.
        self._numbers = np.arange(shape.sequences, dtype=np.int32)
        self._addresses = self._numbers.ctypes.data + 4 * np.arange(shape.sequences, dtype=np.uintp)
        number, flag = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self.struct = lib.llama_batch(
            n_tokens=0,
            token=self._ids.ctypes.data_as(number),
            embd=None,
            pos=self._positions.ctypes.data_as(number),
            n_seq_id=self._counts.ctypes.data_as(number),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(number)),
            logits=self._wanted.ctypes.data_as(flag),
        )

    def fill(
        self, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]
    ) -> int:
        """Write the tokens; returns how many logits are wanted."""
        count = len(ids)
        self._ids[:count] = ids
        self._positions[:count] = positions
        self._pointers[:count] = self._addresses[np.asarray(sequences)]
        self._wanted[:count] = wanted
        self.struct.n_tokens = count
        return int(np.count_nonzero(self._wanted[:count]))


def _context_params(lib: Any, shape: ContextShape) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = shape.sequences * -(-shape.tokens_per_sequence // _PAGE_TOKENS) * _PAGE_TOKENS
    params.n_seq_max = shape.sequences
    params.n_batch = shape.batch_tokens
    params.n_ubatch = min(PASS_TOKENS, shape.batch_tokens)
    # Only the last token of a prompt and each sequence's newest token have logits.
    params.n_outputs_max = shape.sequences
    params.n_threads = params.n_threads_batch = shape.threads
    params.type_k = params.type_v = KV_TYPES[shape.kv]
    # Its flash attention takes keys and values as 16 bits, however they are stored; a quantised memory needs it.
    params.flash_attn_type = _DISABLED if shape.kv == "f32" else _ENABLED
    params.offload_kqv = shape.offload
    params.kv_unified = False
    params.no_perf = True
    return params
