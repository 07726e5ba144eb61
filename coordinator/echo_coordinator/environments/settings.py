"""Checking the settings that run.toml hands to an environment, and saying clearly what is wrong with them."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_swarm.errors import SettingsError
from echo_swarm.plain_errors import NO_SUCH, problems

S = TypeVar("S", bound="EnvironmentSettings")


class EnvironmentSettings(BaseModel):
    """Base of an environment's settings: unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def check_settings(kind: type[S], settings: dict[str, Any], environment: str) -> S:
    """Return typed settings. Raises SettingsError naming every setting that is wrong."""
    try:
        return kind.model_validate(settings)
    except ValidationError as e:
        listed = [
            f"{name or 'settings'}: {said}{near(name, kind.model_fields) if said == NO_SUCH else ''}"
            for name, said in problems(e)
        ]
        raise SettingsError(f"environment.settings of {environment}: " + "; ".join(listed)) from e


def near(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)`, or nothing when no known name is similar."""
    found = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(found)}?)" if found else ""
