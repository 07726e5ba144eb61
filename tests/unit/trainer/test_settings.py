"""What can be set, and what is refused with which words."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from echo_coordinator.trainer.schedule import learning_rate
from echo_coordinator.trainer.settings import (
    ObjectiveSettings,
    OptimizerSettings,
    TrainerConfig,
    correction_warnings,
    load_config,
)
from echo_swarm.errors import SettingsError


def test_dr_grpo_sets_its_own_aggregation_and_normalisation():
    settings = ObjectiveSettings.model_validate({"loss": "dr_grpo", "constant_length": 64})
    assert (settings.aggregation, settings.normalise_std) == ("constant", False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "dr_grpo", "constant_length": 9, "normalise_std": True}, "choose them one by one"),
        ({"aggregation": "constant"}, "needs constant_length"),
        ({"importance_cap": 1.1}, "inside the clip range"),
        ({"clip_low": 1.5}, "less than 1"),
        ({"clip_hi": 0.3}, "Extra inputs"),
    ],
)
def test_objective_settings_that_do_not_fit_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        ObjectiveSettings.model_validate(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule": "cosine"}, "needs total_updates"),
        ({"warmup_updates": 9, "total_updates": 3}, "lower it"),
        ({"learning_rate": float("nan")}, "greater than 0|finite"),
        ({"ranks": 0}, "greater than or equal to 1"),
    ],
)
def test_optimizer_settings_that_do_not_fit_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        OptimizerSettings.model_validate(values)


def test_stale_samples_without_importance_correction_are_refused():
    off = ObjectiveSettings(decoupled=True, importance_cap=None)
    with pytest.raises(SettingsError, match="Set importance_cap"):
        correction_warnings(off, max_staleness=1)
    assert len(correction_warnings(off, max_staleness=0)) == 1


def test_an_unbounded_ratio_on_stale_samples_is_a_warning_and_the_default_is_silent():
    assert "importance_cap" in correction_warnings(ObjectiveSettings(importance_cap=None), max_staleness=4)[0]
    assert correction_warnings(ObjectiveSettings(), max_staleness=4) == []


def test_a_configuration_survives_its_file_and_a_wrong_one_names_the_field(tmp_path: Path):
    path = tmp_path / "trainer.json"
    config = TrainerConfig(model_folder=Path("/m"), checkpoint_folder=Path("/c"), temperature=0.8)
    path.write_text(config.model_dump_json())
    assert load_config(path) == config
    path.write_text('{"model_folder": "/m", "checkpoint_folder": "/c", "temperature": 0}')
    with pytest.raises(SettingsError, match="temperature: 0 is not allowed, it must be more than 0"):
        load_config(path)


def test_the_parts_that_the_coordinator_imports_bring_no_torch():
    names = ("settings", "batch", "advantage", "rows", "metrics", "state", "client")
    imports = ", ".join(f"echo_coordinator.trainer.{name}" for name in names)
    code = f"import sys, {imports}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_the_learning_rate_warms_up_and_decays_by_the_number_of_the_update_alone():
    linear = OptimizerSettings(learning_rate=1.0, schedule="linear", warmup_updates=2, total_updates=6)
    assert [learning_rate(linear, update) for update in range(1, 8)] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = OptimizerSettings(learning_rate=2.0, schedule="cosine", total_updates=4, final_learning_rate_share=0.5)
    assert learning_rate(cosine, 2) == pytest.approx(1.5)
    assert learning_rate(cosine, 4) == pytest.approx(1.0)
    assert learning_rate(OptimizerSettings(learning_rate=3.0), 10**6) == 3.0
