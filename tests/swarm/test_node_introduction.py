"""What can be learnt from a coordinator before joining: what the run is, and how it does."""

from pathlib import Path

import anyio
import pytest

from echo_node.activity import Activity
from echo_node.introduction import learn_run
from echo_node.show import ask_status
from echo_swarm.clock import SystemClock
from echo_swarm.errors import PeerUnreachable, RunNotFound
from echo_swarm.identity import Identity
from echo_swarm.status import RunStatus
from tests.swarm.support.node_harness import Swarm, make_swarm, until

pytestmark = pytest.mark.anyio


async def learn(swarm: Swarm, *, run: str | None = None, patience_s: float = 30.0, lines: list[str] | None = None):
    invite = swarm.coordinator.invite()
    invite = invite.model_copy(update={"run": run}) if run else invite
    clock = SystemClock()
    activity = Activity(clock, (lines if lines is not None else []).append)
    async with swarm.network.host(Identity.generate(), outbound_only=True) as host:
        return await learn_run(host, invite, clock=clock, activity=activity, patience_s=patience_s)


async def test_the_run_is_learnt_from_the_coordinator(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    async with swarm.serving():
        assert (await learn(swarm)).name == "test-run"


async def test_a_coordinator_that_is_still_starting_is_waited_for(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    (swarm.coordinator.store.folder / "run.bin").unlink()
    lines: list[str] = []

    async def make_ready() -> None:
        await until(lambda: lines)
        swarm.coordinator.store.save_run(swarm.coordinator.run_envelope)

    async with swarm.serving(), anyio.create_task_group() as tasks:
        tasks.start_soon(make_ready)
        assert (await learn(swarm, patience_s=0.0, lines=lines)).name == "test-run"


async def test_another_run_and_no_coordinator_are_told_apart(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    async with swarm.serving():
        with pytest.raises(RunNotFound):
            await learn(swarm, run="f" * 32)
    with pytest.raises(PeerUnreachable):
        await learn(swarm, patience_s=0.0)


async def test_status_of_a_run_can_be_asked_without_joining(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(3)
    async with swarm.serving(), swarm.network.host(Identity.generate(), outbound_only=True) as host:
        status = RunStatus.model_validate(await ask_status(host, swarm.coordinator.invite()))
        assert status.policy_version == 3
        with pytest.raises(RunNotFound) as wrong:
            await ask_status(host, swarm.coordinator.invite().model_copy(update={"run": "f" * 32}))
    assert wrong.value.exit_code == 4
    assert not swarm.coordinator.hellos


async def test_status_of_a_run_that_is_down_is_an_error_and_no_empty_table(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    async with swarm.network.host(Identity.generate(), outbound_only=True) as host:
        with pytest.raises(PeerUnreachable, match="it may have stopped: ask who runs it") as down:
            await ask_status(host, swarm.coordinator.invite())
    assert down.value.exit_code == 4
