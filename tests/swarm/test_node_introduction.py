"""What can be learnt from a coordinator before joining: what the run is, and how it does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

from echo_node.activity import Activity
from echo_node.config import run_dirs
from echo_node.introduction import learn_head, learn_run
from echo_node.peers import Peers
from echo_node.recall import known_head, known_run
from echo_node.show import ask_status
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.clock import SystemClock
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.errors import PeerUnreachable, RunNotFound
from echo_swarm.identity import Identity
from echo_swarm.status import RunStatus
from echo_swarm.transport.memory import MemoryHost
from tests.swarm.support.node_harness import PATIENCE_S, RunningNode, Swarm, make_swarm, until

pytestmark = pytest.mark.anyio


async def learn(swarm: Swarm, *, run: str | None = None, patience_s: float = 30.0, lines: list[str] | None = None):
    invite = swarm.coordinator.invite()
    invite = invite.model_copy(update={"run": run}) if run else invite
    clock = SystemClock()
    activity = Activity(clock, (lines if lines is not None else []).append)
    async with swarm.network.host(Identity.generate(), outbound_only=True) as host:
        return (await learn_run(host, invite, clock=clock, activity=activity, patience_s=patience_s)).message


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


@asynccontextmanager
async def looking(swarm: Swarm) -> AsyncGenerator[tuple[MemoryHost, Peers]]:
    """A host that joins for the first time, and what it can hear of others in the directory."""
    identity, clock = Identity.generate(), SystemClock()
    async with swarm.network.host(identity, outbound_only=True) as host:
        yield (
            host,
            Peers(
                host=host,
                directory=MemoryDirectory(swarm.directory, identity, clock),
                run_id=swarm.coordinator.run_id,
                coordinator=swarm.coordinator.identity.peer_id,
                near=Reach.GLOBAL,
                clock=clock,
            ),
        )


async def test_a_newcomer_learns_the_run_and_its_newest_version_from_peers_while_the_coordinator_is_away(
    tmp_path: Path,
):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(3)
    clock, lines, invite = SystemClock(), [], swarm.coordinator.invite()
    activity = Activity(clock, lines.append)
    async with anyio.create_task_group() as tasks:
        async with swarm.serving():
            old: RunningNode = await tasks.start(outliving, swarm)
            await until(lambda: old.node.policies.newest == 3 and len(swarm.directory))
        async with looking(swarm) as (host, peers):
            with anyio.fail_after(PATIENCE_S):
                while not await peers.holders(3):  # noqa: ASYNC110 - the directory is elsewhere
                    await anyio.sleep(0.02)
            run = await learn_run(host, invite, clock=clock, activity=activity, patience_s=0.0, peers=peers)
            head = await learn_head(host, invite, clock=clock, peers=peers)
        tasks.cancel_scope.cancel()
    assert run.message.name == "test-run"
    assert head is not None and head.policy_version == 3
    assert lines[0].startswith("waiting for the coordinator") and "getting ready meanwhile" in lines[1]


async def outliving(swarm: Swarm, *, task_status: TaskStatus[RunningNode]) -> None:
    async with swarm.node(outbound_only=False) as running:
        task_status.started(running)
        await anyio.sleep_forever()


async def test_a_node_that_was_here_before_gets_ready_alone_and_works_when_the_coordinator_comes(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as before:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        await before.leave()
    done = len(swarm.coordinator.accepted)
    async with swarm.node(patience_s=None) as again:
        await until(lambda: again.node.worker.loaded == 0)
        assert again.node.activity.headline.startswith("waiting for the coordinator")
        async with swarm.serving():
            await until(lambda: len(swarm.coordinator.accepted) >= done + 4)
            await again.leave()
    assert known_run(run_dirs(tmp_path / "node"), swarm.coordinator.invite()) is not None
    head = known_head(run_dirs(tmp_path / "node"), swarm.coordinator.invite())
    assert head is not None and head.policy_version == 0
    assert known_run(tmp_path / "nothing", swarm.coordinator.invite()) is None
