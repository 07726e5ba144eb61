"""A banned node in a whole run: it is told why, leaves with its own exit code, and comes back when it is pardoned."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from echo_coordinator.control import ask
from echo_node.backends.options import ScriptedOptions
from echo_node.status import LEFT_BANNED
from echo_swarm.errors import Banned, EchoError
from tests.swarm.support.whole_run import RunningNode, make_run, status_of

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
OPTIONS = ScriptedOptions(batch=4, mean_s=0.02)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until(condition: Callable[[], object], what: str) -> None:
    with anyio.move_on_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - looks at a status, which no event announces
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"never happened: {what}")


async def ends_banned(node: RunningNode, reason: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        await node.ended.wait()
    assert isinstance(node.error, Banned) and node.error.exit_code == 10
    assert reason in str(node.error)
    assert node.node.status().state == LEFT_BANNED


async def test_a_banned_node_is_told_why_and_leaves_also_after_a_restart_until_it_is_pardoned(tmp_path: Path) -> None:
    run = make_run(tmp_path, beat_s=0.4)
    run.settings = run.settings.model_copy(update={"audits": run.settings.audits.model_copy(update={"share": 0.0})})
    async with run.node("good", options=OPTIONS) as good:
        async with run.coordinator() as coordinator, run.node("bad", options=OPTIONS) as bad:
            for node in (good, bad):
                await until(lambda node=node: node.node.status().accepted >= 4, "both deliver")
            peer = bad.node.status().peer_id
            with pytest.raises(EchoError, match="may be any of 2 peers"):
                await ask(run.folder, "ban", peer="12D3Koo", reason="")
            reply = await ask(run.folder, "ban", peer=peer[-8:], reason="copies answers", take_back=True)
            assert reply["peer_id"] == peer
            await ends_banned(bad, "copies answers")
            shown = status_of(coordinator, bad)
            assert shown is not None and (shown.standing, shown.standing_detail) == ("banned", "copies answers")
            assert shown.in_flight == 0
            accepted, updates = shown.accepted, coordinator.state.updates.count
            await until(lambda: coordinator.state.updates.count >= updates + 3, "training goes on")
            assert not [m for batch in run.trainer.trained[updates + 2 :] for m in batch.members if m.peer_id == peer]
        async with run.coordinator() as coordinator:
            async with run.node("bad", options=OPTIONS) as bad:
                await ends_banned(bad, "copies answers")
            listed = (await ask(run.folder, "peers"))["peers"]
            (entry,) = [entry for entry in listed if entry["peer_id"] == peer]
            assert entry["standing"] == "banned" and entry["accepted"] == accepted
            await ask(run.folder, "pardon", peer=peer)
            async with run.node("bad", options=OPTIONS) as bad:
                await until(lambda: bad.node.status().accepted > accepted, "it works again")
