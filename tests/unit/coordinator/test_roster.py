"""Each peer stands in the roster once, however often it dies."""

import pytest

from echo_coordinator.state import roster as module
from echo_coordinator.state.roster import Admission, Roster
from echo_swarm.identity import PeerId
from echo_swarm.work import BackendReport, Beat, Hello, Role

ANN = PeerId("ann")
BACKEND = BackendReport(backend="scripted", build="1", precision="float32", device="cpu", batch=8)


def hello(instance: int, role: Role = Role.INFERENCE) -> Hello:
    return Hello(
        run_id="ab" * 16,
        software="test",
        role=role,
        instance=instance.to_bytes(16, "big"),
        wall_s=0.0,
        backend=BACKEND,
        addresses=(),
    )


def beat() -> Beat:
    return Beat(lease_ids=(), held_version=1, state="sampling", tokens_per_s=5.0, bytes_served=1, bytes_fetched_peers=2)


def test_a_node_that_restarts_5_times_in_10_s_is_shown_once():
    roster = Roster(beat_s=3)
    for number in range(5):
        now = 2.0 * number
        admission = roster.consider(ANN, hello(number), now)
        assert admission is (Admission.TRIAL if number else Admission.WELCOME)
        assert number == 0 or roster.on_trial(ANN, hello(number).instance)
        assert roster.admit(ANN, hello(number), now, 0.0) is (number > 0)
    assert len(roster.nodes()) == 1 and roster.live() == 1


def test_a_dead_node_that_comes_back_is_live_at_once_and_its_past_is_forgotten():
    roster = Roster(beat_s=3)
    roster.admit(ANN, hello(1), 0, 0.0)
    assert roster.sweep(9) == []
    assert roster.sweep(9.1) == [ANN]
    assert roster.live() == 0 and not roster.beat(ANN, beat(), 10)
    assert roster.consider(ANN, hello(2), 11) is Admission.WELCOME
    roster.admit(ANN, hello(2), 11, 0.0)
    assert roster.live() == 1 and roster.beat(ANN, beat(), 12)
    assert roster.sweep(13) == []


def test_a_copied_key_is_refused_because_the_live_process_beats():
    roster = Roster(beat_s=3)
    roster.admit(ANN, hello(1), 0, 0.0)
    assert roster.consider(ANN, hello(2), 2) is Admission.TRIAL
    assert roster.beat(ANN, beat(), 3)
    assert not roster.on_trial(ANN, hello(2).instance)


def test_a_later_newcomer_ends_the_trial_of_an_earlier_one():
    roster = Roster(beat_s=3)
    roster.admit(ANN, hello(1), 0, 0.0)
    roster.consider(ANN, hello(2), 1)
    roster.consider(ANN, hello(3), 2)
    assert not roster.on_trial(ANN, hello(2).instance)
    assert roster.on_trial(ANN, hello(3).instance)


def test_the_same_process_may_say_hello_again_and_a_goodbye_makes_room_at_once():
    roster = Roster(beat_s=3)
    roster.admit(ANN, hello(1), 0, 0.0)
    assert roster.consider(ANN, hello(1), 1) is Admission.WELCOME
    roster.leave(ANN)
    assert roster.consider(ANN, hello(2), 1) is Admission.WELCOME


def test_made_up_peers_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    roster = Roster(beat_s=3)
    for number in range(3):
        roster.admit(PeerId(str(number)), hello(1), number, 0.0)
    assert roster.consider(ANN, hello(1), 3) is Admission.FULL
    assert roster.consider(ANN, hello(1), 9.5) is Admission.WELCOME
    assert {node.peer for node in roster.nodes()} == {"1", "2"}


def test_after_the_coordinators_restart_a_peer_is_known_but_says_hello_first():
    roster = Roster(beat_s=3)
    roster.restore(ANN, Role.INFERENCE, BACKEND, 0)
    assert roster.heard(ANN, 1) is None
    assert roster.consider(ANN, hello(1), 1) is Admission.WELCOME
    assert roster.admit(ANN, hello(1), 1, 0.0) is False


@pytest.mark.anyio
async def test_a_restart_knows_how_long_ago_each_peer_was_here(open_state):
    async with open_state() as run:
        await run.state.core.write_peer(run.peer("ann"), Role.INFERENCE, None)
        run.clock.advance(600)
        await run.state.core.write_peer(run.peer("bob"), Role.SEEDER, None)
    run.clock.advance(3000)
    async with open_state() as run:
        run.clock.advance(60)
        seen = {node.peer_id: node.last_seen_s for node in run.state.node_statuses()}
    assert seen == {run.peer("ann"): pytest.approx(3660), run.peer("bob"): pytest.approx(3060)}
