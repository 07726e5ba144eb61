"""Who is asked when, what becomes of answers, and what of those that never come."""

from array import array
from typing import Any

import pytest

from echo_coordinator.state.probes import KEPT_REFERENCES, LONGEST_PAUSE_BEATS, MAX_MISSES
from echo_coordinator.state.roster import Node
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.envelope import seal
from echo_swarm.errors import BadSignature, MalformedMessage, RemoteError
from echo_swarm.probe import Probe, ProbeAnswer, ProbeItem, ProbeReply, ProbeVerdict
from echo_swarm.trajectory import BehaviourPolicy
from echo_swarm.work import BackendReport, Hello, Role
from tests.unit.coordinator.conftest import RUN_ID, OpenRun, Run, artifact

pytestmark = pytest.mark.anyio

ITEMS = tuple(ProbeItem(prompt_ids=pack_u32([1, place]), completion_ids=pack_u32([5, 6, 7])) for place in range(2))


def values(version: int, off: float = 0.0) -> "array[float]":
    """The trainer's at a version, alternately off by so much."""
    return array("f", (-3.0 + 0.3 * ((version * (i + 2)) % 5) + (off if i % 2 else -off) for i in range(6)))


async def publish(run: Run, version: int) -> None:
    await run.state.probes.set_reference(version, [values(version)[:3], values(version)[3:]])
    await run.publish(version)


async def begin(run: Run, versions: int = 1) -> None:
    await run.state.probes.set_items(ITEMS)
    for version in range(versions):
        await publish(run, version)


def join(run: Run, name: str, held: int = 0, instance: int = 0, precision: str = "float32") -> Node:
    backend = BackendReport(backend="scripted", build="1", precision=precision, device="none", batch=4)
    hello = Hello(
        run_id=RUN_ID,
        software="test",
        role=Role.INFERENCE,
        instance=bytes([instance]) * 16,
        wall_s=run.clock.wall_s(),
        backend=backend,
        addresses=(),
    )
    roster = run.state.core.roster
    roster.admit(run.peer(name), hello, run.clock.monotonic_s(), 0.0)
    node = roster.get(run.peer(name))
    assert node is not None
    node.held_version = held
    return node


def due(run: Run, node: Node) -> bool:
    return run.state.probes.due(node, run.clock.monotonic_s())


def issue(run: Run, node: Node) -> Probe:
    probe = run.state.probes.issue(node, run.clock.monotonic_s())
    assert probe is not None
    return probe


async def answer(run: Run, name: str, node: Node, probe_id: bytes, version: int = 0, **changes: Any) -> ProbeReply:
    policy = BehaviourPolicy(
        oldest_version=version,
        newest_version=version,
        artifact_digest=artifact(version),
        backend="scripted",
        build="1",
        precision="float32",
    )
    policy = policy.model_copy(update={k: changes.pop(k) for k in list(changes) if k in BehaviourPolicy.model_fields})
    logprobs = pack_f32(changes.pop("logprobs", values(version)))
    fields: dict[str, Any] = {"run_id": RUN_ID, "probe_id": probe_id, "logprobs": logprobs, "refusal": "", **changes}
    sealed = seal(run.identity(name), ProbeAnswer(policy=policy, **fields))
    return await run.state.probes.take(node, sealed, run.clock.monotonic_s())


async def test_a_process_is_asked_once_and_again_after_some_versions(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        node = join(run, "peer")
        probe = issue(run, node)
        assert (probe.items, probe.temperature) == (ITEMS, 1.0)
        assert not due(run, node)
        # A reply that was lost is given again, with the time that is left.
        run.clock.advance(5)
        again = issue(run, node)
        assert (again.probe_id, probe.expires_in_s - again.expires_in_s) == (probe.probe_id, pytest.approx(5))
        assert (await answer(run, "peer", node, probe.probe_id)).verdict is ProbeVerdict.MATCHES
        assert run.state.probes.issue(node, run.clock.monotonic_s()) is None
        for version in range(1, 6):
            assert not due(run, node)
            await publish(run, version)
            node.held_version = version
        assert due(run, node)
        # Another process of the same key begins anew.
        assert due(run, join(run, "peer", held=5, instance=1))


async def test_nobody_is_asked_before_there_is_something_to_compare_with(open_state: OpenRun) -> None:
    async with open_state() as run:
        node = join(run, "peer")
        assert not due(run, node)
        await run.publish(0)
        await run.state.probes.set_items(ITEMS)
        assert not due(run, node)
        await publish(run, 0)
        assert due(run, node)
        node.held_version = None
        assert not due(run, node)
        node.held_version, run.state.probes.fault = 0, "the trainer is out of order"
        assert not due(run, node)


async def test_who_does_not_fit_holds_nothing_until_it_does(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        await run.fill()
        node = join(run, "peer")
        assert run.grant("peer")
        reply = await answer(run, "peer", node, issue(run, node).probe_id, logprobs=values(0, 0.5))
        assert (reply.verdict, "mean gap" in reply.detail) == (ProbeVerdict.FAR, True)
        probes, core = run.state.probes, run.state.core
        assert probes.bars(node.peer) and core.leases.in_flight(node.peer) == 0
        assert not core.roster.alone() and core.roster.live() == 1
        # Asked again soon, then with growing pauses.
        pauses: list[float] = []
        for _ in range(8):
            waited = 0.0
            while not due(run, node):
                run.clock.advance(core.settings.beat_s)
                waited += core.settings.beat_s
            pauses.append(waited / core.settings.beat_s)
            await answer(run, "peer", node, issue(run, node).probe_id, logprobs=values(0, 0.5))
        assert pauses == sorted(pauses) and 1 < pauses[0] < pauses[-1] <= LONGEST_PAUSE_BEATS + 1
        run.clock.advance(LONGEST_PAUSE_BEATS * core.settings.beat_s)
        assert (await answer(run, "peer", node, issue(run, node).probe_id)).verdict is ProbeVerdict.MATCHES
        assert not probes.bars(node.peer) and core.roster.alone()


async def test_being_set_aside_outlives_a_restart_of_either_side(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        node = join(run, "peer")
        await answer(run, "peer", node, issue(run, node).probe_id, logprobs=values(0, 0.5))
    async with open_state() as run:
        node = join(run, "peer", instance=1)
        assert run.state.probes.bars(node.peer) and run.state.probes.items == ITEMS
        await answer(run, "peer", node, issue(run, node).probe_id)
        assert not run.state.probes.bars(node.peer)
    async with open_state() as run:
        assert not run.state.probes.bars(join(run, "peer", instance=2).peer)
        (record,) = run.state.probes.classes.records.values()
        assert record.probes == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": values(0)[:-1]},
        {"logprobs": array("f", [float("nan"), *values(0)[1:]])},
        {"logprobs": array("f", [1.0, *values(0)[1:]])},
        {"artifact_digest": bytes(32).replace(b"\0", b"\1")},
        {"newest_version": 1},
        {"backend": "torch"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_an_answer_that_makes_no_sense_counts_against_its_peer(
    open_state: OpenRun, wrong: dict[str, Any]
) -> None:
    async with open_state() as run:
        await begin(run)
        node = join(run, "peer")
        reply = await answer(run, "peer", node, issue(run, node).probe_id, **wrong)
        assert reply.verdict is ProbeVerdict.MALFORMED
        assert run.state.probes.bars(node.peer)


async def test_an_answer_counts_once_and_for_the_peer_that_was_asked(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        node, other = join(run, "peer"), join(run, "other")
        probe = issue(run, node)
        with pytest.raises(BadSignature, match="answer your own"):
            await answer(run, "other", node, probe.probe_id)
        with pytest.raises(RemoteError, match="unknown_run"):
            await answer(run, "peer", node, probe.probe_id, run_id="cd" * 16)
        with pytest.raises(MalformedMessage):
            await run.state.probes.take(node, b"\x80", run.clock.monotonic_s())
        assert (await answer(run, "other", other, probe.probe_id)).verdict is ProbeVerdict.UNKNOWN_PROBE
        assert (await answer(run, "peer", node, probe.probe_id)).verdict is ProbeVerdict.MATCHES
        assert (await answer(run, "peer", node, probe.probe_id)).verdict is ProbeVerdict.UNKNOWN_PROBE
        restarted = join(run, "peer", instance=1)
        late = issue(run, restarted)
        assert (await answer(run, "peer", join(run, "peer", instance=2), late.probe_id)).verdict is (
            ProbeVerdict.UNKNOWN_PROBE
        )


async def test_who_never_answers_is_set_aside_in_the_end(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        node, settings = join(run, "peer"), run.state.core.settings
        for _ in range(MAX_MISSES):
            assert not run.state.probes.bars(node.peer)
            run.clock.advance(LONGEST_PAUSE_BEATS * settings.beat_s)
            probe = issue(run, node)
            run.clock.advance(settings.lease_max_s)
            assert not due(run, node)
            assert (await answer(run, "peer", node, probe.probe_id)).verdict is ProbeVerdict.UNKNOWN_PROBE
        assert run.state.probes.bars(node.peer)
        assert "without an answer" in run.state.warnings()[0]
        run.clock.advance(LONGEST_PAUSE_BEATS * settings.beat_s)
        await answer(run, "peer", node, issue(run, node).probe_id)
        assert not run.state.probes.bars(node.peer)


async def test_a_swap_between_question_and_answer_is_no_fault_and_an_old_version_is(open_state: OpenRun) -> None:
    async with open_state(mode="sequential") as run:
        await begin(run, versions=2)
        node = join(run, "peer", held=0)
        assert not due(run, node)
        node.held_version = 1
        probe = issue(run, node)
        await publish(run, 2)
        assert (await answer(run, "peer", node, probe.probe_id, version=1)).verdict is ProbeVerdict.MATCHES
        fresh = join(run, "peer", held=2, instance=1)
        for _ in range(MAX_MISSES):
            assert not run.state.probes.bars(fresh.peer)
            run.clock.advance(LONGEST_PAUSE_BEATS * run.state.core.settings.beat_s)
            reply = await answer(run, "peer", fresh, issue(run, fresh).probe_id, version=1)
            assert reply.verdict is ProbeVerdict.OUTDATED
        assert run.state.probes.bars(fresh.peer)


async def test_a_class_that_is_further_off_than_usual_is_worth_a_warning_and_nothing_more(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run)
        node = join(run, "peer", precision="q8_0")
        probe = issue(run, node)
        reply = await answer(run, "peer", node, probe.probe_id, logprobs=values(0, 0.2), precision="q8_0")
        assert (reply.verdict, run.state.probes.bars(node.peer)) == (ProbeVerdict.MATCHES, False)
        (warning,) = run.state.warnings()
        assert warning.startswith("scripted in q8_0 is 0.2 nats a token from the trainer at version 0, usual are up to")


async def test_a_precision_that_a_node_learns_by_loading_counts_from_its_first_answer_on(open_state: OpenRun) -> None:
    """llama.cpp's is that of a file which a node has not chosen yet when it says hello."""
    async with open_state() as run:
        await begin(run)
        node = join(run, "peer", precision="gguf")
        probe = issue(run, node)
        refusal = {"logprobs": array("f"), "refusal": "not now", "precision": "q4_0"}
        assert (await answer(run, "peer", node, probe.probe_id, **refusal)).verdict is ProbeVerdict.NOT_MEASURED
        assert node.backend is not None and node.backend.precision == "gguf"
        node = join(run, "peer", precision="gguf", instance=1)
        reply = await answer(run, "peer", node, issue(run, node).probe_id, logprobs=values(0, 0.2), precision="q8_0")
        assert (reply.verdict, run.state.probes.bars(node.peer)) == (ProbeVerdict.MATCHES, False)
        assert list(run.state.probes.classes.records) == [("scripted", "q8_0")]
        # What is allowed is what that precision may have, not what any unknown one may.
        node = join(run, "peer", precision="gguf", instance=2)
        reply = await answer(run, "peer", node, issue(run, node).probe_id, logprobs=values(0, 0.2), precision="f32")
        assert reply.verdict is ProbeVerdict.FAR


async def test_references_are_kept_for_the_newest_versions_alone(open_state: OpenRun) -> None:
    async with open_state() as run:
        kept = KEPT_REFERENCES + run.state.core.settings.max_staleness
        await begin(run, versions=kept + 5)
        expected = list(range(5, kept + 5))
        assert sorted(run.state.probes.references) == expected
    async with open_state() as run:
        assert sorted(run.state.probes.references) == expected
        assert run.state.probes.references[7] == values(7)
