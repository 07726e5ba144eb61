"""`echo-coordinator simulate`: what settings would do, before a GPU hour is spent."""

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.simulate.report import as_json, lines
from echo_coordinator.simulate.scenario import Scenario, Swarm, TrainerModel, faults_named
from echo_coordinator.simulate.shrink import shrink
from echo_coordinator.simulate.world import Outcome, simulate
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.errors import EchoError, SettingsError, UsageError
from echo_swarm.plain_errors import problems

M = TypeVar("M", bound=BaseModel)


def run_simulation(scenario: Scenario, *, json_wanted: bool) -> str:
    """Simulate and return what to print.

    Raises:
        EchoError: an invariant broke; the message names the file that replays it.

    """
    outcome = simulate(scenario, every_step=False)
    if outcome.failure is not None:
        raise EchoError(_kept(shrink(outcome)))
    return json.dumps(as_json(outcome), indent=2) if json_wanted else "\n".join(lines(outcome))


def make_scenario(
    settings: dict[str, Any],
    *,
    nodes: int,
    speed: str,
    places: int,
    tokens: float,
    step_time: float,
    publish_time: float,
    fetch_time: float,
    max_staleness: int | None,
    hours: float,
    seed: int,
    faults: str,
) -> Scenario:
    """Return the scenario that flags and settings describe. Raises UsageError, SettingsError."""
    work = dict(settings.get("work", {}))
    if max_staleness is not None:
        work |= {"max_staleness": max_staleness, "mode": "async" if max_staleness else "sequential"}
    evaluation = settings.get("evaluation", {})
    return Scenario(
        seed=seed,
        duration_s=_checked(hours, "--hours", 24 * 30) * 3600,
        swarm=_made(
            Swarm,
            {"nodes": nodes, "speed": _range(speed), "places": places, "tokens": tokens, "fetch_s": fetch_time},
            "flags",
        ),
        trainer=_made(TrainerModel, {"step_s": step_time, "publish_s": publish_time}, "flags"),
        work=_made(WorkSettings, work, "[work]"),
        audits=_made(AuditSettings, settings.get("audits", {}), "[audits]"),
        standing=_made(StandingSettings, settings.get("standing", {}), "[standing]"),
        eval_every=evaluation.get("every", 10) if evaluation else 0,
        eval_prompts=evaluation.get("prompts", 200),
        faults=faults_named(faults, nodes),
    )


def read_settings(run: Path | None, file: Path | None) -> dict[str, Any]:
    """Return the tables of a run's run.toml, or of a file in its form; none of them is needed.

    Raises:
        UsageError: both are given, or the file cannot be read.
        SettingsError: it is no TOML.

    """
    if run is not None and file is not None:
        raise UsageError("give a run or --settings, not both")
    path = file if run is None else RunFolder(run).settings
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"{path} is not valid TOML: {e}") from e


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a file that a failed simulation left. Raises UsageError."""
    try:
        return Scenario.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    except (ValidationError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} holds no scenario: {e}") from e


def _kept(outcome: Outcome) -> str:
    assert outcome.failure is not None
    failure, scenario = outcome.failure, outcome.scenario
    path = Path(f"simulation-{failure.invariant}-{scenario.seed}.json")
    path.write_text(scenario.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return (
        f"a fault of this program: the invariant '{failure.invariant}' broke at {failure.at_s:.1f} s with "
        f"{scenario.swarm.nodes} nodes and seed {scenario.seed}: {failure.detail}; please report it with {path}, which "
        f"replays it: echo-coordinator simulate --replay {path}"
    )


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        bounds = (float(low), float(high or low))
    except ValueError as e:
        raise UsageError(f"--speed {text!r} is neither a number of tokens a second nor two, such as 20-200") from e
    if not 0 < bounds[0] <= bounds[1] < 1e9:
        raise UsageError(f"--speed {text!r}: the slowest node comes first, and both are above 0")
    return bounds


def _checked(value: float, flag: str, most: float) -> float:
    if not 0 < value <= most:
        raise UsageError(f"{flag} {value:g} is not above 0 and at most {most:g}")
    return value


def _made(kind: type[M], values: dict[str, Any], where: str) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        said = "; ".join(f"{name}: {text}" if name else text for name, text in problems(e))
        raise (UsageError if where == "flags" else SettingsError)(f"{where}: {said}") from e
