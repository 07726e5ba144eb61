"""Settings that cannot work are refused with what to change."""

from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.errors import SettingsError


@pytest.mark.parametrize("values", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}])
def test_truncated_sampling_is_refused(values: dict[str, Any]):
    with pytest.raises(SettingsError, match=next(iter(values))):
        WorkSettings(**values)


def test_neutral_truncation_is_accepted():
    WorkSettings(top_p=1.0, top_k=0, min_p=0.0)


def test_staleness_0_is_exactly_the_sequential_mode():
    assert WorkSettings(mode="sequential").max_staleness == 0
    with pytest.raises(SettingsError, match="max_staleness"):
        WorkSettings(mode="async", max_staleness=0)
    with pytest.raises(SettingsError, match="max_staleness"):
        WorkSettings(mode="sequential", max_staleness=1)


def test_a_buffer_that_cannot_hold_one_update_is_refused_with_both_figures():
    with pytest.raises(SettingsError, match=r"1000 cannot hold one update, which may take \d+ bytes"):
        WorkSettings(buffer_bytes=1000)


def test_more_members_needed_than_there_are_is_refused():
    with pytest.raises(SettingsError, match="min_group_members"):
        WorkSettings(group_size=4, min_group_members=5)


@pytest.mark.parametrize(("size", "needed"), [(2, 2), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_half_of_a_group_is_needed_but_at_least_two(size: int, needed: int):
    assert WorkSettings(group_size=size).members_needed == needed


def test_a_settings_file_in_another_encoding_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "run.toml").write_bytes('[run]\nname = "größer"\n'.encode("latin-1"))
    with pytest.raises(SettingsError, match=r"run\.toml is not valid TOML: 'utf-8' codec"):
        load_settings(RunFolder(tmp_path))
