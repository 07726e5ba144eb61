"""A run that is small enough to be killed, or left alone, for long: a real trainer on a model of 20,000 parameters."""

import os
from pathlib import Path
from typing import Any

from tests.e2e.support import plug_in
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm


def small_run(folder: Path, **work: Any) -> Swarm:
    """Make the run's folder; `work` are settings of WorkSettings. Its environment goes into ours, for children."""
    model = folder / "model"
    write_model(model)
    environment = plug_in.install(folder / "plug-in")
    os.environ.update(environment)
    # Nobody computed what a scripted node says: an audit would end it.
    audits = {"share": 0}
    return make_swarm(folder, model, environment=environment, name=plug_in.NAME, work=work, audits=audits)
