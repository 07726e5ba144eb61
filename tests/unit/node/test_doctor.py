"""`echo-node doctor`: each check, each backend, and the exit code that says what stands in the way."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from echo_node.backends.options import TorchOptions
from echo_node.backends.survey import Installed
from echo_node.backends.tested import Verdicts
from echo_node.checks import Check, _clock, check, local_checks
from echo_node.doctor import BUILT_IN, Report, lines
from echo_node.machine import Machine
from echo_node.trial import BackendCard, examine
from echo_swarm.errors import StorageFull, UsageError
from echo_swarm.extras import install_command
from echo_swarm.identity import load_or_create
from tests.unit.node.test_cli import NOWHERE, run

THERE = Installed(missing=(), versions={"torch": "2.0"})
BIG = Machine(cpu_count=4, available_bytes=32 << 30)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_machine_passes_and_nothing_is_made(tmp_path: Path):
    state = tmp_path / "a" / "b"
    checks = local_checks(state, needed_bytes=1)
    assert [check.name for check in checks if not check.ok] == []
    assert "will be made by the first join" in by_name(checks)["state folder"].text
    assert list(tmp_path.iterdir()) == []
    identity, _ = load_or_create(state / "identity.key")
    assert identity.peer_id in by_name(local_checks(state))["key"].text


def test_a_state_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    found = by_name(local_checks(tmp_path / "file" / "state"))["state folder"]
    assert isinstance(found.error, UsageError) and "choose another folder with --state-dir" in found.text


def test_a_key_that_others_can_read_says_what_to_do(tmp_path: Path):
    load_or_create(tmp_path / "identity.key")
    (tmp_path / "identity.key").chmod(0o644)
    assert "run: chmod 600" in by_name(local_checks(tmp_path))["key"].text


def test_a_full_disk_is_told_with_both_figures(tmp_path: Path):
    found = by_name(local_checks(tmp_path, needed_bytes=1 << 60))["disk"]
    assert isinstance(found.error, StorageFull) and "GiB free where" in found.text and "are needed" in found.text


def test_a_clock_from_before_the_installation_is_told():
    assert not check("clock", lambda: _clock(1_000_000_000.0)).ok


def test_a_clock_behind_the_run_is_told_with_the_difference(tmp_path: Path):
    found = by_name(local_checks(tmp_path, issued_at=time.time() + 3600))["clock"]
    assert re.search(r"the clock is 3[56]\d\d s behind the run's newest version; set", found.text)
    assert by_name(local_checks(tmp_path, issued_at=time.time() + 30))["clock"].ok


async def card(
    options: TorchOptions, machine: Machine = BIG, installed: Installed = THERE, **changes: object
) -> BackendCard:
    arguments = {"log_path": Path("log"), "verdicts": None, "start": False, **changes}
    return await examine("torch", options, installed, BUILT_IN, machine, **arguments)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_model_that_does_not_fit_is_told_with_both_figures():
    """Field case 51."""
    found = await card(TorchOptions(), Machine(cpu_count=2, available_bytes=1 << 30))
    assert found.fits is False and not found.usable
    assert "134,515,008 parameters in float32" in found.text() and "need 1." in found.text()


@pytest.mark.anyio
async def test_what_is_needed_and_what_there_is_are_told():
    found = await card(TorchOptions())
    assert found.fits and found.usable and found.needed_bytes and found.available_bytes == int(0.85 * (32 << 30))
    assert "torch 2.0; needs" in found.text() and "of 27.2 GiB with a batch of 32" in found.text()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_backend_is_started_tested_and_timed_in_a_child_and_a_join_need_not_test_again(tmp_path: Path):
    verdicts = Verdicts(tmp_path)
    with anyio.fail_after(180):
        found = await examine(
            "torch",
            TorchOptions(threads=1),
            THERE,
            BUILT_IN,
            BIG,
            log_path=tmp_path / "log",
            verdicts=verdicts,
        )
    assert found.usable and found.tokens_per_s and found.tokens_per_s > 0
    assert [finding.precision for finding in found.findings] == ["float32"]
    assert "self-test passed" in found.text() and (tmp_path / "self-tests.json").is_file()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_backend_that_dies_is_told_in_its_own_words(tmp_path: Path):
    """Field case 90: a build for another processor."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ILL $$\n")
    python.chmod(0o755)
    with anyio.fail_after(60):
        found = await card(
            TorchOptions(), installed=replace(THERE, python=str(python)), log_path=tmp_path / "log", start=True
        )
    assert not found.usable and "SIGILL: a library in it was built for another processor" in found.problem


def report(**changes: object) -> Report:
    values = {
        "machine": BIG,
        "flags": ("avx2",),
        "model": "m",
        "checks": (Check(name="disk", text="full", error=StorageFull("full")), Check(name="key", text="there")),
        "backends": (
            BackendCard(name="vllm", problem=f"vllm not installed; run: {install_command('vllm')}"),
            BackendCard(name="torch", versions="torch 2.0", problem="self-test of torch 2.0: wrong by 3"),
        ),
        "chosen": None,
        "error": StorageFull("full"),
    }
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def test_the_report_for_people_marks_what_failed_and_what_is_merely_absent():
    text = lines(report())
    assert any(line.startswith("FAIL  disk") for line in text) and any(line.startswith("ok    key") for line in text)
    assert any(line.startswith("-     vllm") and "pip install" in line for line in text)
    assert any(line.startswith("FAIL  torch") and "wrong by 3" in line for line in text)


def test_the_report_for_programs_is_one_document():
    document = json.loads(json.dumps(report().to_json()))
    assert not document["ok"] and document["chosen"] is None
    assert document["checks"][0] == {"name": "disk", "ok": False, "text": "full"}
    assert document["backends"][1]["usable"] is False and document["machine"]["cpu_flags"] == ["avx2"]


def test_a_machine_that_can_join_exits_with_0_and_prints_json(tmp_path: Path):
    done = run("doctor", "--quick", "--json", "--state-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] and document["chosen"]["backend"] == "torch"
    assert {check["name"] for check in document["checks"]} == {"state folder", "key", "disk", "clock", "libp2p helper"}
    assert [card["name"] for card in document["backends"]] == ["vllm", "llama_cpp", "torch"]
    assert document["backends"][2]["fits"] and document["backends"][2]["needed_bytes"] > 0


def test_a_run_that_does_not_answer_is_a_failed_check_with_its_own_exit_code(tmp_path: Path):
    done = run("doctor", NOWHERE, "--quick", "--json", "--state-dir", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stderr)["error"] == "BootstrapFailed"
    assert [check["ok"] for check in json.loads(done.stdout)["checks"] if check["name"] == "run"] == [False]


def test_only_the_backend_that_was_named_is_looked_at_and_progress_stands_on_stderr(tmp_path: Path):
    done = run("doctor", "--quick", "--backend", "torch:threads=1", "--state-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "looking at this machine" in done.stderr and "looking at" not in done.stdout
    rows = [line.split()[1] for line in done.stdout.partition("backends, for")[2].splitlines()[1:] if line[:4].strip()]
    assert rows[0] == "torch" and "llama_cpp" not in done.stdout and "vllm" not in done.stdout


def test_without_a_run_the_choice_is_said_to_depend_on_it(tmp_path: Path):
    text = run("doctor", "--quick", "--state-dir", str(tmp_path)).stdout
    assert "the files that a run publishes can change this choice" in text
    document = json.loads(run("doctor", "--quick", "--json", "--state-dir", str(tmp_path)).stdout)
    assert document["provisional"] is True and document["backends"][0]["name"] == "vllm"


def test_a_backend_that_is_not_there_ends_with_its_exit_code(tmp_path: Path):
    done = run("doctor", "--quick", "--backend", "torch:device=cuda:7", "--state-dir", str(tmp_path))
    assert done.returncode in (2, 6) and "CUDA" in done.stderr + done.stdout
