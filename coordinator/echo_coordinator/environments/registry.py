"""Environments by name: `reasoning_gym:<task>`, `jsonl:<path>`, or `<plug-in>[:<argument>]`.

A plug-in is a callable in the entry point group GROUP of any installed distribution, called with what follows the
colon (or an empty string) and the settings of run.toml; it returns an Environment and raises SettingsError for settings
that cannot work. Only what the person running the coordinator has installed is ever loaded.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from echo_coordinator.environments.base import Environment
from echo_coordinator.environments.settings import near
from echo_swarm.errors import SettingsError
from echo_swarm.extras import install_command

GROUP = "echo_swarm.environments"
Factory = Callable[[str, dict[str, Any]], Environment]
_BUILT_IN = ("reasoning_gym", "jsonl")


def open_environment(name: str, settings: dict[str, Any]) -> Environment:
    """Return the environment of that name. Heavy: imports the task's libraries.

    Raises:
        SettingsError: no such environment (naming those that are similar), or its settings are wrong.

    """
    kind, _, argument = name.partition(":")
    if kind == "reasoning_gym":
        return _reasoning_gym(argument, settings)
    if kind == "jsonl":
        return _jsonl(argument, settings)
    plug_in = _plug_in(kind)
    try:
        factory = cast(Factory, plug_in.load())
    except (ImportError, AttributeError) as e:
        raise SettingsError(f"environment {kind!r} ({plug_in.value}) cannot be loaded: {e}") from e
    return factory(argument, settings)


def check_environment(name: str) -> None:
    """Raise SettingsError unless there is an environment of that name, with data of the right form; no settings."""
    kind, _, argument = name.partition(":")
    if kind == "reasoning_gym":
        _known_task(argument)
    elif kind == "jsonl":
        file = _file(argument)
        _jsonl_module().check_file(file)
    else:
        _plug_in(kind)


def _reasoning_gym(task: str, settings: dict[str, Any]) -> Environment:
    _known_task(task)
    from echo_coordinator.environments.reasoning_gym import ReasoningGymEnvironment

    return ReasoningGymEnvironment(task, settings)


def _known_task(task: str) -> None:
    try:
        from echo_coordinator.environments.reasoning_gym import task_names

        names = task_names()
    except ImportError as e:
        raise SettingsError(f"reasoning-gym is not installed; run: {install_command('coordinator')}") from e
    if task not in names:
        raise SettingsError(f"reasoning-gym has no task {task!r}{near(task, names) or f'; it has {len(names)} others'}")


def _jsonl(path: str, settings: dict[str, Any]) -> Environment:
    return _jsonl_module().JsonlEnvironment(_file(path), settings)


def _jsonl_module() -> ModuleType:
    try:
        from echo_coordinator.environments import jsonl
    except ImportError as e:
        raise SettingsError(f"math-verify is not installed; run: {install_command('coordinator')}") from e
    return jsonl


def _file(path: str) -> Path:
    file = Path(path).expanduser()
    if not path or not file.is_file():
        raise SettingsError(f"environment jsonl: there is no file {path!r}; write jsonl:<path of the file>")
    return file


def _plug_in(kind: str) -> EntryPoint:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in found:
        known = [*(f"{name}:…" for name in _BUILT_IN), *sorted(found)]
        similar = near(kind, [*_BUILT_IN, *found])
        raise SettingsError(f"there is no environment {kind!r}{similar}; known: {', '.join(known)}")
    return found[kind]
