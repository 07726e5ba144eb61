"""A Hugging Face model folder as the coordinator sees it: files and facts, without importing torch or transformers."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from echo_swarm.checkpoint.safetensors_file import read_header
from echo_swarm.errors import MalformedMessage, SettingsError, UsageError

_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Never *.bin, *.pt or *.py: nothing that runs code is taken from a model."""
MAX_CONFIG_BYTES = 65_536
"""Of config.json, which travels to every node inside the RunManifest; real ones have some thousand."""
MAX_JSON_BYTES = 16 << 20
"""Of the other JSON files that are read here; tokenizer_config.json can list some thousand added tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a run needs to know about its model."""

    config_json: str
    """Text of config.json."""
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    context_tokens: int | None
    """Longest sequence the model was made for, if it says so."""


def read_facts(folder: Path) -> ModelFacts:
    """Read a model folder. Raises SettingsError naming the file that is missing or wrong."""
    path = folder / "config.json"
    config = read_json_object(path, MAX_CONFIG_BYTES)
    text_config = config.get("text_config")
    if text_config is None:
        text_config = config
    if not isinstance(text_config, dict):
        raise SettingsError(f"{path}: text_config is no JSON object")
    text_config = cast("dict[str, Any]", text_config)
    vocabulary: object = text_config.get("vocab_size")
    if not _is_whole(vocabulary) or not 1 <= vocabulary <= 1 << 31:
        raise SettingsError(f"{path} names no usable vocab_size")
    context: object = text_config.get("max_position_embeddings")
    if context is not None and (not _is_whole(context) or context < 1):
        raise SettingsError(f"{path}: max_position_embeddings is no number of tokens")
    return ModelFacts(
        config_json=path.read_text(encoding="utf-8"),
        vocabulary_size=vocabulary,
        end_token_ids=_end_tokens(folder, text_config, vocabulary),
        context_tokens=context,
    )


def count_parameters(folder: Path) -> int:
    """Return the number of stored weights, from the headers of the safetensors files; tied ones count once.

    Raises:
        SettingsError: there are no weights, or a file is damaged; names it.

    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SettingsError(f"{folder} has no weights (*.safetensors); copy the model's files there again")
    return sum(_parameters(path) for path in paths)


def _parameters(path: Path) -> int:
    try:
        return sum(math.prod(tensor.shape) for tensor in read_header(path).tensors)
    except OSError as e:
        raise SettingsError(f"cannot read {path}: {e.strerror}") from e
    except MalformedMessage as e:
        raise SettingsError(f"{path} is damaged or cut short ({e}); copy the model's file there again") from e


def _end_tokens(folder: Path, config: dict[str, Any], vocabulary: int) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    # The generation config lists every id that ends an answer (field case: a second end id such as <|im_end|>).
    value = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    listed = cast("list[Any]", value if isinstance(value, list) else [value])
    ids = [i for i in listed if _is_whole(i) and 0 <= i < vocabulary]
    if not ids:
        raise SettingsError(
            f"{folder} names no end token inside the vocabulary (eos_token_id in generation_config.json)"
        )
    return tuple(dict.fromkeys(ids))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def find_model(model: str) -> Path:
    """Return the folder of a local model, or of a hub id, downloaded.

    Raises:
        UsageError: it is neither, or lacks weights in safetensors or a fast tokenizer.

    """
    source = Path(model).expanduser()
    if not source.is_dir():
        source = _download(model)
    names = {path.name for path in _wanted(source)}
    for needed, why in (("config.json", "no model"), ("tokenizer.json", "no fast tokenizer")):
        if needed not in names:
            raise UsageError(f"{source} has {why} ({needed} is missing)")
    if not any(name.endswith(".safetensors") for name in names):
        raise UsageError(f"{source} has no weights in safetensors format; other formats can run code and are not read")
    return source


def copy_model(source: Path, target: Path) -> None:
    """Copy what is wanted of a model folder into the new folder `target`."""
    target.mkdir(parents=True)
    for path in _wanted(source):
        shutil.copyfile(path, target / path.name)


def _wanted(folder: Path) -> list[Path]:
    return sorted({path for pattern in _WANTED for path in folder.glob(pattern)})


def _download(model: str) -> Path:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UsageError(f"{model} is no folder and no hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UsageError(f"{model} is no local folder, and the hub did not give it: {reason}") from e


def read_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises SettingsError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise SettingsError(f"{path} has more than {most_bytes} bytes, which no real model's file has")
        value: Any = json.loads(raw.decode("utf-8"))
    except OSError as e:
        raise SettingsError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise SettingsError(f"{path} is no JSON: {e}") from e
    except RecursionError as e:
        raise SettingsError(f"{path} is no JSON that can be read: nested too deeply") from e
    if not isinstance(value, dict):
        raise SettingsError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", value)
