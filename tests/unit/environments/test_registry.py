from pathlib import Path

import pytest

from echo_coordinator.environments.base import Split
from echo_coordinator.environments.registry import check_environment, open_environment
from echo_swarm.errors import SettingsError

PLUG_IN = """
from echo_coordinator.environments.base import Prompt

class Echo:
    def __init__(self, argument, settings):
        self.argument, self.settings = argument, settings
    def size(self, split):
        return 3
    def prompt(self, split, index):
        return Prompt(text=f"{self.argument} {index}")
    def reward(self, split, index, completion):
        return self.settings["reward"]
"""


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("reasoning_gym:chain_sun", "did you mean chain_sum"),
        ("reasoning_gym:", "no task"),
        ("reasoning-gym:chain_sum", "did you mean reasoning_gym"),
        ("jsonl:/does/not/exist", "no file"),
        ("nothing", "known: reasoning_gym"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_that_are_near(name: str, complaint: str) -> None:
    for use in (check_environment, lambda name: open_environment(name, {})):
        with pytest.raises(SettingsError, match=complaint):
            use(name)


def test_an_installed_plug_in_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_plug_in.py").write_text(PLUG_IN)
    info = tmp_path / "echo_plug_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-plug-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[echo_swarm.environments]\necho = echo_plug_in:Echo\ngone = nowhere:x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_environment("echo:hello")
    environment = open_environment("echo:hello", {"reward": 0.5})
    assert environment.prompt(Split.TRAIN, 2).text == "hello 2"
    assert environment.reward(Split.TRAIN, 2, "") == 0.5
    with pytest.raises(SettingsError, match="cannot be loaded"):
        open_environment("gone", {})
