"""`echo-coordinator init`: a run's folder with settings, key and model."""

import json
import random
import secrets
import shutil
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.environments.registry import check_environment
from echo_coordinator.model_folder import ModelFacts, copy_model, count_parameters, find_model, read_facts
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.checkpoint.files import sync_folder, sync_tree
from echo_swarm.errors import LocalFault, SettingsError, UsageError
from echo_swarm.identity import load_or_create

PORTS = range(16_000, 30_000)
LONGEST = 512
"""Tokens of a prompt, and of a completion, where the model's context has room for both."""

_TEMPLATE = """\
# Settings of an Echo Swarm run; docs/settings.md explains each. Stop and start the coordinator after a change.

[run]
id = "{run_id}"   # never change it: nodes know the run by it
name = {name}
{base_model}# updates = 1000              # end the run after so many; without it, it runs until you stop it

[environment]
name = {environment}
max_prompt_tokens = {longest}       # longer prompts are skipped

[environment.settings]        # handed to the environment; for reasoning_gym: the data set's own settings

[work]
mode = "{mode}"               # "async": nobody waits; "sequential": every sample from the newest version
max_staleness = {max_staleness}             # versions a sample may be behind when trained; 0 exactly when sequential
group_size = 8                # completions of one prompt that are compared with each other
groups_per_update = 16
temperature = 1.0
max_tokens = {longest}              # longest completion
seed = {seed}   # of all sampling; keep it to yourself: who knows it can foresee others' completions

[objective]
loss = "grpo"

[optimizer]
learning_rate = 1e-6

[evaluation]
every = 10                    # versions; 0: never
prompts = 200

# [publish]
# gguf = ["q8_0"]             # files for llama.cpp too, for nodes without a GPU; delays every version a little

# [lora]                      # train a LoRA adapter instead of all weights: a version is some megabytes then
# rank = 16
# alpha = 32.0

[network]
listen = ["/ip4/0.0.0.0/tcp/{port}"]
# announce = ["/dns4/swarm.example.org/tcp/{port}"]   # what the invite names, when it differs from `listen`
"""


def init_run(root: Path, *, model: str, environment: str, name: str, mode: str) -> None:
    """Make a run's folder. Nothing is left behind when it fails.

    Raises:
        UsageError: the folder is in use, or model, environment, name or mode cannot work.

    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"{root} exists and is not empty; choose another folder")
    if mode not in ("async", "sequential"):
        raise UsageError(f"mode {mode!r}: choose async or sequential")
    check_environment(environment)
    source = find_model(model)
    facts = read_facts(source)
    count_parameters(source)
    target = root.absolute()
    with _building(target) as building:
        folder = RunFolder(building)
        copy_model(source, folder.model)
        load_or_create(folder.key)
        base_model = "" if Path(model).expanduser().is_dir() else model
        text = _settings(facts, _found_again(environment), name, mode, base_model)
        folder.settings.write_text(text, encoding="utf-8")
        try:
            load_settings(folder)
        except SettingsError as e:
            raise UsageError(str(e).removeprefix(f"{folder.settings}: ")) from e
        _move(building, target)


def _settings(facts: ModelFacts, environment: str, name: str, mode: str, base_model: str) -> str:
    # Prompt and completion share the model's context.
    longest = LONGEST if facts.context_tokens is None else max(1, min(LONGEST, facts.context_tokens // 2))
    return _TEMPLATE.format(
        run_id=secrets.token_hex(16),
        name=json.dumps(name),
        mode=mode,
        max_staleness=0 if mode == "sequential" else WorkSettings().max_staleness,
        base_model=f"base_model = {json.dumps(base_model)}   # named by exported adapters\n" if base_model else "",
        environment=json.dumps(environment),
        longest=longest,
        seed=secrets.randbelow(2**62),
        port=_free_port(),
    )


def _found_again(environment: str) -> str:
    """Return the name of an environment that works wherever the coordinator is started."""
    kind, _, argument = environment.partition(":")
    return f"jsonl:{Path(argument).expanduser().absolute()}" if kind == "jsonl" else environment


@contextmanager
def _building(target: Path) -> Generator[Path]:
    """Make a folder beside `target` for the length of the block, and the folders above it unless the block fails."""
    missing = [parent for parent in target.parents if not parent.exists()]
    building = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        yield building
    except OSError as e:
        raise UsageError(f"cannot make {target}: {e.strerror}") from e
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if not target.exists():
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()


def _move(building: Path, target: Path) -> None:
    sync_tree(building)
    if not target.exists():
        building.rename(target)
        sync_folder(target.parent)
        return
    # An empty folder that the person made, perhaps the one they are in; run.toml, which makes it a run, comes last.
    for path in sorted(building.iterdir(), key=lambda path: path.name == "run.toml"):
        path.rename(target / path.name)
        sync_folder(target)


def _free_port() -> int:
    """Return a port, chosen once and written down: the invite stays valid when the coordinator restarts.

    Not one that the system gives to outgoing connections, or another program could sit on it at the next start.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise LocalFault(f"no free port found between {PORTS.start} and {PORTS.stop}")
