"""What is wrong with a setting, in one plain sentence: which value was given, and what is allowed."""

import difflib
import re
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

NO_SUCH = "there is no such setting"
SHOWN_CHARACTERS = 60
"""Of a value that was given."""

_BOUNDS = {
    "greater_than_equal": "it must be {ge} or more",
    "greater_than": "it must be more than {gt}",
    "less_than_equal": "it must be {le} or less",
    "less_than": "it must be less than {lt}",
    "too_short": "at least {min_length} are needed",
    "too_long": "at most {max_length} are allowed",
    "string_too_short": "at least {min_length} characters are needed",
    "string_too_long": "at most {max_length} characters are allowed",
    "literal_error": "choose {expected}",
    "enum": "choose {expected}",
    "finite_number": "it must be a finite number",
    "int_from_float": "it must be a whole number",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (in quotes, in a file)",
    "path": "a path",
    "tuple": "a list, in square brackets",
    "list": "a list, in square brackets",
    "dict": "a section of its own",
    "model": "a section of its own",
    "model_attributes": "a section of its own",
}
_PATTERNS = {r"^[0-9a-f]{32}$": "32 hexadecimal digits", r"^[!-~]+$": "visible ASCII characters without a space"}


def problems(error: ValidationError) -> list[tuple[str, str]]:
    """Return (dotted name, what is wrong) of each setting that pydantic refused."""
    found = [(".".join(map(str, e["loc"])), _said(e)) for e in error.errors(include_url=False)]
    # A value that fits no part of a union is told once for each part; once is enough.
    return list(dict(reversed(found)).items())[::-1]


def no_such(name: str, known: Collection[str]) -> str:
    """Return that there is no setting `name`, what may have been meant, and what there is."""
    close = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"there is no setting {name!r}; {meant}There are: {', '.join(known)}"


def _said(e: ErrorDetails) -> str:
    kind, given = e["type"], e.get("input")
    context: dict[str, Any] = {name: _whole(value) for name, value in e.get("ctx", {}).items()}
    if kind == "missing":
        return "it is missing"
    if kind == "value_error":
        return str(context.get("error", e["msg"])).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return NO_SUCH
    if kind == "string_pattern_mismatch":
        pattern = str(context.get("pattern", ""))
        allowed = f"it must be {_PATTERNS.get(pattern, f'of the form {pattern}')}"
    elif kind in _BOUNDS:
        allowed = _BOUNDS[kind].format_map(context)
    else:
        wanted = _KINDS.get(re.sub(r"_(type|parsing|parsing_size)$", "", kind))
        allowed = f"it must be {wanted}" if wanted else e["msg"]
    return f"{_shown(given)} is not allowed, {allowed}"


def _whole(bound: Any) -> Any:
    """Return 1.0 as 1."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _shown(given: Any) -> str:
    text = str(given).lower() if isinstance(given, bool) else repr(given)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
