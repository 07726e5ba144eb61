r"""Comparing a completion's answer with the right one, through math-verify, with the corners it leaves open closed.

Where it stands: the last complete `\boxed{…}` or `\fbox{…}`; an opened one that never closes is no answer; without any
box, what math-verify finds in the text. Letters of multiple choice (`\boxed{\text{E}}`, `\boxed{E: because}`, `(E)`)
are compared as letters. math-verify uses SIGALRM, so all of this belongs in the main thread of a child process.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from echo_coordinator.environments.base import Unscorable

SOFT_TIMEOUT_S = 5
"""For math-verify's own alarm, which some computations do not heed; the pool's deadline ends those."""
MAX_ANSWER_CHARS = 20_000
"""A completion is searched from its end; nothing sensible is longer."""

_BOXES_TRIED = 8
"""From the end; bounds the work on a text that only opens boxes."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CHOICE = re.compile(r"\s*\(?\s*([A-J])\s*(?:[).:,]|$)")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm)\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = {
    "and",
    "cos",
    "cot",
    "csc",
    "deg",
    "exp",
    "gcd",
    "inf",
    "infinity",
    "lcm",
    "log",
    "max",
    "min",
    "mod",
    "sec",
}
_FUNCTIONS |= {"sin", "sqrt", "tan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A right answer, parsed once."""

    choice: str | None
    """`A` to `J` for multiple choice."""
    parsed: list[Any]
    """What math-verify made of it; empty for multiple choice."""


def parse_gold(answer: str) -> Gold | None:
    """Return the parsed answer, or None when it is nothing that can be compared mathematically."""
    text = (_last_box(answer) or answer).strip().strip("$").strip()
    choice = _choice(text)
    if choice:
        return Gold(choice=choice, parsed=[])
    bare = _TEXT_COMMAND.sub(r" ", text)
    if any(word.lower() not in _FUNCTIONS for word in _WORD.findall(bare)):
        # math-verify reads a word as the product of its letters, and so pays for every anagram.
        return None
    try:
        parsed = _parse(f"${text}$")
    except Unscorable:
        return None
    return Gold(choice=None, parsed=parsed) if parsed else None


def reward_of(gold: Gold, completion: str) -> float:
    """Return 1.0 for the right answer, else 0.0. Raises Unscorable when the comparison itself fails."""
    completion = completion[-MAX_ANSWER_CHARS:]
    boxed = _last_box(completion)
    if boxed is None and _BOX.search(completion):
        return 0.0
    if gold.choice:
        return float(_choice(completion.strip() if boxed is None else boxed) == gold.choice)
    answer = _parse(completion if boxed is None else f"${boxed}$")
    if not answer:
        return 0.0
    try:
        return float(verify(gold.parsed, answer, timeout_seconds=SOFT_TIMEOUT_S, raise_on_error=True))
    except TimeoutException as e:
        raise Unscorable(f"comparing took longer than {SOFT_TIMEOUT_S} s") from e
    except Exception as e:
        raise Unscorable(f"math-verify: {type(e).__name__}: {e}"[:300]) from e


def _parse(text: str) -> list[Any]:
    try:
        found = cast("list[Any]", parse(text, parsing_timeout=SOFT_TIMEOUT_S, raise_on_error=True))
    except TimeoutException as e:
        raise Unscorable(f"parsing took longer than {SOFT_TIMEOUT_S} s") from e
    except Exception:  # noqa: BLE001 - whatever its grammar chokes on is text that holds no answer
        return []
    # A lone string is what is left when nothing could be parsed.
    return found if any(not isinstance(value, str) for value in found) else []


def _last_box(text: str) -> str | None:
    """Return the content of the last box if it is complete."""
    openings = list(_BOX.finditer(text))[-_BOXES_TRIED:]
    for opening in reversed(openings):
        depth = 1
        for place in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[opening.end() : place]
    return None


def _choice(text: str) -> str | None:
    found = _CHOICE.match(_TEXT_COMMAND.sub(r"\1", text.strip().strip("$")))
    return found.group(1) if found else None
