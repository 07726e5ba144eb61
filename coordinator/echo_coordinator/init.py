"""`echo-coordinator init`: a run's folder with settings, key and model."""

import json
import secrets
import shutil
import socket
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.environments.registry import check_environment
from echo_coordinator.model_folder import copy_model, read_facts
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import UsageError
from echo_swarm.identity import load_or_create

_TEMPLATE = """\
# Settings of an Echo Swarm run; docs/settings.md explains each. Stop and start the coordinator after a change.

[run]
id = "{run_id}"   # never change it: nodes know the run by it
name = {name}
# updates = 1000              # end the run after so many; without it, it runs until you stop it

[environment]
name = {environment}
max_prompt_tokens = 512       # longer prompts are skipped

[environment.settings]        # handed to the environment; for reasoning_gym: the data set's own settings

[work]
mode = "{mode}"               # "async": nobody waits; "sequential": every sample from the newest version
max_staleness = {max_staleness}             # versions a sample may be behind when trained; 0 exactly when sequential
group_size = 8                # completions of one prompt that are compared with each other
groups_per_update = 16
temperature = 1.0
max_tokens = 512              # longest completion
seed = 0

[objective]
loss = "grpo"

[optimizer]
learning_rate = 1e-6

[evaluation]
every = 10                    # versions; 0: never
prompts = 200

[network]
listen = ["/ip4/0.0.0.0/tcp/{port}"]
# announce = ["/dns4/swarm.example.org/tcp/{port}"]   # what the invite names, when it differs from `listen`
"""


def init_run(root: Path, *, model: str, environment: str, name: str, mode: str) -> None:
    """Make a run's folder. Nothing is left behind when it fails.

    Raises:
        UsageError: the folder is in use, or model, environment or mode cannot work.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"{root} exists and is not empty; choose another folder")
    if mode not in ("async", "sequential"):
        raise UsageError(f"mode {mode!r}: choose async or sequential")
    check_environment(environment)
    building = root.parent / f".{root.name}.{secrets.token_hex(4)}"
    building.mkdir(parents=True)
    try:
        folder = RunFolder(building)
        copy_model(model, building / "model")
        read_facts(building / "model")
        load_or_create(folder.key)
        folder.settings.write_text(
            _TEMPLATE.format(
                run_id=secrets.token_hex(16),
                name=json.dumps(name),
                mode=mode,
                max_staleness=0 if mode == "sequential" else 4,
                environment=json.dumps(environment),
                port=_free_port(),
            ),
            encoding="utf-8",
        )
        load_settings(folder)
        if root.exists():
            root.rmdir()
        building.rename(root)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _free_port() -> int:
    # Chosen once and written down: the invite stays valid when the coordinator restarts.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
