"""An environment that somebody else installed: found through its entry point, rewards that vary with sampling."""

import os
from pathlib import Path

NAME = "even_digits"

_MODULE = '''
from echo_coordinator.environments.base import Prompt, Split


class EvenDigits:
    """Worth the share of even digits in the answer."""

    def size(self, split):
        return None if split is Split.TRAIN else 8

    def prompt(self, split, index):
        return Prompt(text=f"{index % 10}+{index // 10 % 10} =")

    def reward(self, split, index, completion):
        return sum(c in "02468" for c in completion) / max(1, len(completion))


def open_environment(argument, settings):
    return EvenDigits()
'''


def install(folder: Path) -> dict[str, str]:
    """Write the distribution to `folder`; return the variables under which processes find it."""
    info = folder / "even_digits-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: even-digits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[echo_swarm.environments]\n{NAME} = even_digits:open_environment\n")
    (folder / "even_digits.py").write_text(_MODULE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}
