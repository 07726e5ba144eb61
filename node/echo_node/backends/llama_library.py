"""The llama.cpp library: imported once, quiet, its complaints kept for the error messages of ours.

Only the low-level bindings of `llama-cpp-python` are used. They are imported here and nowhere else, by name, so that
this project is checked and tested on machines without them.
"""

import ctypes
import importlib
import importlib.metadata
import re
import sys
from collections import deque
from typing import Any

from echo_swarm.errors import BackendFailed
from echo_swarm.extras import install_command

DISTRIBUTION = "llama-cpp-python"
_ERROR = 4
"""ggml's log level for what went wrong."""
_FTYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    8: "q5_0",
    9: "q5_1",
    14: "q4_k_s",
    15: "q4_k_m",
    32: "bf16",
}
"""llama.cpp's `llama_ftype` to what trajectories and status call it."""
_GUESSED = 1024

_complaints: deque[str] = deque(maxlen=8)
_loaded: list[Any] = []


def library() -> Any:
    """Return the module of low-level bindings.

    Raises:
        BackendFailed: it is not installed or does not load, with what to do.

    """
    if not _loaded:
        try:
            module: Any = importlib.import_module("llama_cpp.llama_cpp")
        except ImportError as e:
            raise BackendFailed(
                f"llama-cpp-python cannot be imported ({e}); run: {install_command('llama-cpp')}"
            ) from e
        except (RuntimeError, OSError) as e:
            raise BackendFailed(f"the library inside llama-cpp-python does not load: {str(e)[:300]}") from e
        callback = module.llama_log_callback(_hear)
        module.llama_log_set(callback, ctypes.c_void_p(0))
        module.llama_backend_init()
        # The callback must live as long as the library may call it.
        _loaded.extend((module, callback))
    return _loaded[0]


def complaints() -> str:
    """Return and forget what llama.cpp complained about lately, on one line of at most 300 characters."""
    text = "; ".join(_complaints)
    _complaints.clear()
    return text[:300] or "llama.cpp gave no reason"


def build() -> str:
    """Return what samples, such as `llama_cpp 0.3.36 (AVX2 FMA F16C)`; at most 128 characters."""
    text = library().llama_print_system_info().decode("utf-8", "replace")
    features = re.findall(r"(\w+) = 1", text)
    return f"llama_cpp {importlib.metadata.version(DISTRIBUTION)} ({' '.join(features)[:90]})"


def has_gpu() -> bool:
    """Return whether this build can put layers on a device."""
    return bool(library().llama_supports_gpu_offload())


def ftype_name(ftype: int) -> str:
    """Return the name of a `llama_ftype`."""
    plain = ftype & ~_GUESSED
    return _FTYPES.get(plain, f"ftype_{plain}")


def _hear(level: int, text: bytes, _user_data: object) -> None:
    """Called by llama.cpp for each piece of log; must not raise."""
    line = text.decode("utf-8", "replace").strip()
    if level == _ERROR and line:
        print(line, file=sys.stderr, flush=True)
        _complaints.append(line)
