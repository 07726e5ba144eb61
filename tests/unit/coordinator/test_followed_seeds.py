"""`audits.require_followed_seeds`: whose draws cannot be followed from the seed gets no work and sells none."""

from pathlib import Path

import pytest

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.followed_seeds import FollowedSeeds
from echo_swarm.errors import RemoteError, SettingsError
from echo_swarm.trajectory import Reason
from echo_swarm.work import BackendReport
from tests.unit.coordinator.conftest import OpenRun


def report(backend: str) -> BackendReport:
    return BackendReport(backend=backend, build="1", precision="float32", device="cpu", batch=4)


@pytest.mark.parametrize("backend", ["vllm", "scripted", "Torch", "torch ", "somebody's own"])
def test_a_backend_whose_draws_are_not_followed_is_refused_at_its_hello_and_told_what_to_use(backend: str) -> None:
    FollowedSeeds(required=False).refuse(report(backend))
    with pytest.raises(RemoteError, match="llama_cpp and torch only") as refused:
        FollowedSeeds(required=True).refuse(report(backend))
    assert refused.value.code == "backend_refused" and backend in refused.value.message


def test_followed_backends_and_peers_without_one_are_taken() -> None:
    for taken in (report("torch"), report("llama_cpp"), None):
        FollowedSeeds(required=True).refuse(taken)


@pytest.mark.anyio
async def test_completions_that_name_another_backend_than_the_hello_did_are_refused(open_state: OpenRun) -> None:
    async with open_state(audits={"require_followed_seeds": True}) as run:
        await run.publish(0)
        await run.fill()
        run.join("ann")
        (lease, *_) = run.grant("ann", 8)
        assert await run.reasons("ann", [run.complete(lease, 0, backend="torch")]) == [Reason.ACCEPTED]
        (verdict,) = await run.push("ann", [run.complete(lease, 1, backend="vllm")])
        assert verdict.reason is Reason.UNKNOWN_POLICY and "vllm" in verdict.detail


def test_it_makes_no_sense_without_audits(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    head = f'[run]\nid = "{"ab" * 16}"\nname = "x"\n[environment]\nname = "jsonl:x"\n[audits]\n'
    folder.settings.write_text(head + "require_followed_seeds = true\n", encoding="utf-8")
    assert load_settings(folder).audits.require_followed_seeds
    folder.settings.write_text(head + "require_followed_seeds = true\nshare = 0\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"audits\.share = 0"):
        load_settings(folder)
