"""The demo's run folder: what `init` makes, with the recipe's settings."""

import json
from pathlib import Path
from typing import Any

from echo_coordinator.commands.init import init_run
from echo_coordinator.config import RunSettings, load_settings
from echo_coordinator.demo import recipe
from echo_coordinator.run_folder import RunFolder

Sections = dict[str, dict[str, Any]]


def write_demo_run(root: Path, *, model: Path, seed: int, changes: Sections | None = None) -> RunSettings:
    """Make the run folder `root` around the demo's model. `changes`: settings by section, instead of the recipe's."""
    init_run(root, model=str(model), environment=recipe.ENVIRONMENT, name="demo", mode="async")
    folder = RunFolder(root)
    made = load_settings(folder)
    sections: Sections = {
        "run": {"id": made.run.id, "name": "demo", "updates": recipe.UPDATES},
        "environment": {"name": recipe.ENVIRONMENT, "max_prompt_tokens": recipe.MAX_PROMPT_TOKENS},
        "environment.settings": recipe.ENVIRONMENT_SETTINGS,
        "work": {**recipe.WORK, "seed": seed},
        "objective": recipe.OBJECTIVE,
        "optimizer": {**recipe.OPTIMIZER, "seed": seed},
        "evaluation": recipe.EVALUATION,
        "network": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
    }
    for name, values in (changes or {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    folder.settings.write_text(to_toml(sections), encoding="utf-8")
    return load_settings(folder)


def to_toml(sections: Sections) -> str:
    """Return TOML of tables with plain values: JSON's strings, numbers, booleans and lists are TOML's too."""
    parts = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n\n".join(parts) + "\n"
