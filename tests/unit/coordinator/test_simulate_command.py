"""`echo-coordinator simulate`: flags and settings in, a report or a file that replays a failure out."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.commands.simulate import make_scenario, read_scenario, read_settings, run_simulation
from echo_coordinator.state import intake_rules
from echo_swarm.errors import EchoError, SettingsError, UsageError

FLAGS: dict[str, Any] = dict(
    nodes=4,
    speed="50-100",
    places=2,
    tokens=20,
    step_time=3,
    publish_time=0.5,
    fetch_time=1,
    max_staleness=None,
    hours=0.02,
    seed=1,
    faults="none",
)
TABLES: dict[str, Any] = {
    "run": {"name": "left alone"},
    "work": {"group_size": 4, "groups_per_update": 2, "max_tokens": 64, "max_staleness": 3},
    "evaluation": {"every": 5, "prompts": 7},
}


def test_settings_come_from_the_run_and_flags_beside_them(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[work]\ngroup_size = 4\nmax_staleness = 3\n[evaluation]\nevery = 5\n")
    settings = read_settings(tmp_path, None)
    scenario = make_scenario(settings, **FLAGS)
    assert (scenario.work.group_size, scenario.work.max_staleness, scenario.eval_every) == (4, 3, 5)
    assert scenario.swarm.speed == (50, 100) and scenario.duration_s == 72
    assert read_settings(None, tmp_path / "run.toml") == settings and read_settings(None, None) == {}
    sequential = make_scenario(settings, **{**FLAGS, "max_staleness": 0})
    assert sequential.work.mode == "sequential"


def test_wrong_settings_and_flags_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        read_settings(tmp_path, tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        read_settings(tmp_path / "none", None)
    (tmp_path / "bad.toml").write_text("[work")
    with pytest.raises(SettingsError, match=r"bad\.toml is not valid TOML"):
        read_settings(None, tmp_path / "bad.toml")
    with pytest.raises(SettingsError, match=r"\[work\]: grup_size"):
        make_scenario({"work": {"grup_size": 3}}, **FLAGS)
    for speed in ("fast", "20-10", "0", "-3", "1e99"):
        with pytest.raises(UsageError, match="--speed"):
            make_scenario({}, **{**FLAGS, "speed": speed})
    for hours in (0, -1, float("nan"), 1e9):
        with pytest.raises(UsageError, match="--hours"):
            make_scenario({}, **{**FLAGS, "hours": hours})


def test_the_report_is_a_table_or_json() -> None:
    scenario = make_scenario(TABLES, **FLAGS)
    shown = run_simulation(scenario, json_wanted=False)
    assert "trainer busy" in shown and all(len(line) <= 80 for line in shown.splitlines())
    found = json.loads(run_simulation(scenario, json_wanted=True))
    assert found["failure"] is None and found["figures"]["updates"] > 3 and found["advice"]
    assert found["scenario"]["seed"] == 1


def test_a_failure_leaves_a_file_that_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(intake_rules, "_sampling", lambda trajectory, demand, seed: None)
    scenario = make_scenario(TABLES, **{**FLAGS, "faults": "hostile", "nodes": 12})
    with pytest.raises(EchoError, match=r"invariant 'no_lies' broke at .* with . nodes and seed 1") as failed:
        run_simulation(scenario, json_wanted=False)
    assert failed.value.exit_code == 1
    kept = read_scenario(tmp_path / "simulation-no_lies-1.json")
    with pytest.raises(EchoError, match="no_lies"):
        run_simulation(kept, json_wanted=False)
    with pytest.raises(UsageError, match="holds no scenario"):
        (tmp_path / "other.json").write_text("{}x")
        read_scenario(tmp_path / "other.json")
