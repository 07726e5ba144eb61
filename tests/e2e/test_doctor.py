"""`echo-node doctor INVITE` against runs that are live: what it says of them, and what it would join with."""

import re
from collections.abc import Generator
from importlib.util import find_spec

import pytest

from echo_node.machine import gib
from tests.e2e.support.commands import NODE, Result, call
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm


@pytest.fixture(scope="module", params=[(), ("f16",)], ids=["safetensors", "gguf"])
def gguf(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What the run publishes beside safetensors."""
    return request.param


@pytest.fixture(scope="module")
def live(gguf: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Generator[Swarm]:
    """A run that has published version 0 and gets no further: nobody takes part."""
    folder = tmp_path_factory.mktemp("doctor")
    write_model(folder / "model")
    swarm = make_swarm(folder, folder / "model", publish={"gguf": list(gguf)})
    with swarm.start():
        yield swarm


def doctor(swarm: Swarm, *options: str) -> Result:
    return call(NODE, "doctor", swarm.invite(), "--quick", "--state-dir", swarm.folder / "nobody", *options)


def test_it_names_the_run_says_what_fits_and_chooses_by_the_files_of_the_run(live: Swarm, gguf: tuple[str, ...]):
    told, shown = doctor(live), doctor(live, "--json").json()
    assert told.code == 0, told.err
    lines = told.out.splitlines()

    assert shown["ok"] and shown["model"] == "sums" and "backends, for sums:" in lines
    (run,) = [check["text"] for check in shown["checks"] if check["name"] == "run"]
    assert re.fullmatch(r"sums: version 0, [\d,]+ parameters", run)
    assert any(line.startswith("ok ") and line.endswith(f" {run}") for line in lines)

    cards = {card["name"]: card for card in shown["backends"]}
    assert set(cards) == {"torch", "llama_cpp", "vllm"}
    assert cards["torch"]["usable"] and 0 < cards["torch"]["needed_bytes"] <= cards["torch"]["available_bytes"]
    for name, card in cards.items():
        (line,) = [line for line in lines if re.match(rf"(ok  |-   |FAIL)  {name} ", line)]
        assert line.startswith("ok ") == card["usable"]
        if card["fits"]:
            assert f"needs {gib(card['needed_bytes'])} of " in line and f" with a batch of {card['batch']}" in line
        else:
            assert card["problem"] in line

    # A CPU's backend of choice, if it is installed and the run has a file for it. vLLM has another environment.
    installed = find_spec("llama_cpp") is not None
    chosen = shown["chosen"]
    assert chosen["backend"] == ("llama_cpp" if gguf and installed else "torch")
    if installed and not gguf:
        assert any("not llama_cpp: version 0 has no gguf" in reason for reason in chosen["reasons"])
    assert all(f"  {reason}" in lines for reason in chosen["reasons"])
    assert any(line.startswith("join would take ") for line in lines)
    assert not (live.folder / "nobody").exists()
