"""Write docs/settings.md from the settings' own types and docstrings: `python tools/settings_doc.py`."""

import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo_coordinator.config import RunSettings
from echo_coordinator.environments.jsonl import JsonlSettings
from echo_coordinator.environments.reasoning_gym import ReasoningGymSettings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

_HEAD = """\
# Settings

A run's settings are one TOML file, `RUN/run.toml`, written by `echo-coordinator init` and read by `start`. They are
checked as a whole: a setting that is unknown, out of range, or does not fit another stops the start with one message
that names it. A node needs no settings.

This page is made from the code: `python tools/settings_doc.py`.
"""


_REASONING_GYM = """\
Every name that is not in this table is handed to the data set, such as `min_terms = 2` for `chain_sum`; its own checks
apply. Prompts are what the data set asks, unless `prompt` says otherwise."""

_JSONL = """\
A file with one JSON object a line: `{"prompt": "What is 2 + 3?", "answer": "5"}`. `prompt` may also be a list of chat
messages, `[{"role": "user", "content": "..."}]`. Answers are mathematics, compared by math-verify; a line whose answer
it cannot read is left out."""


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return "list"
    if arguments and hasattr(annotation, "__metadata__"):
        return _type_name(arguments[0])
    return {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "dict": "table"}.get(
        getattr(origin or annotation, "__name__", str(annotation)), "text"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "empty"
    if isinstance(value, tuple):
        return str(list(cast("Any", value)))
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, doc: str, model: type[BaseModel]) -> str:
    lines = [f"## {title}\n\n{doc}\n\n| setting | type | default | meaning |\n|---|---|---|---|"]
    for name, entry in model.model_fields.items():
        meaning = " ".join((entry.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type_name(entry.annotation)} | {_default(entry)} | {meaning} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """Return the document."""
    parts = [_HEAD]
    for section, field in RunSettings.model_fields.items():
        # A section that may be missing is written `Section | None`.
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        model = cast("type[BaseModel]", kinds[0] if kinds else field.annotation)
        doc = (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        parts.append(_table(f"[{section}]", doc, model))
        if section == "environment":
            parts.append(_table("[environment.settings] of reasoning_gym:NAME", _REASONING_GYM, ReasoningGymSettings))
            parts.append(_table("[environment.settings] of jsonl:PATH", _JSONL, JsonlSettings))
    return "\n".join(parts)


def main() -> int:
    """Write the document."""
    TARGET.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
