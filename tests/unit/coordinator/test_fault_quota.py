"""How much useless work one peer may make the coordinator look at."""

from echo_coordinator.state.fault_quota import BURST, MAX_PEERS, PER_S, REPLAY_COST, FaultQuota
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason

ANN, BOB = PeerId("ann"), PeerId("bob")


def test_a_flood_of_junk_is_cut_off_and_forgiven_with_time_while_others_are_served():
    quota = FaultQuota()
    quota.charge(ANN, [Reason.BAD_LOGPROB] * (BURST - 1), now=0.0)
    assert not quota.is_exhausted(ANN, 0.0)
    quota.charge(ANN, [Reason.MALFORMED], now=0.0)
    assert quota.is_exhausted(ANN, 0.0) and not quota.is_exhausted(BOB, 0.0)
    assert not quota.is_exhausted(ANN, 1 / PER_S)


def test_work_that_came_late_or_twice_costs_little_and_stale_work_nothing():
    quota = FaultQuota()
    quota.charge(ANN, [Reason.LATE, Reason.STALE, Reason.DUPLICATE, Reason.ACCEPTED] * BURST, now=0.0)
    quota.charge(BOB, [Reason.STALE] * 100 * BURST, now=0.0)
    assert not quota.is_exhausted(ANN, 0.0) and not quota.is_exhausted(BOB, 0.0)


def test_an_endless_flood_of_replays_is_cut_off():
    quota = FaultQuota()
    most = int(BURST / REPLAY_COST)
    quota.charge(ANN, [Reason.DUPLICATE] * (most - 1), now=0.0)
    assert not quota.is_exhausted(ANN, 0.0)
    quota.charge(ANN, [Reason.LATE], now=0.0)
    assert quota.is_exhausted(ANN, 0.0)


def test_made_up_peers_take_bounded_memory():
    quota = FaultQuota()
    for number in range(MAX_PEERS + 10):
        quota.charge(PeerId(str(number)), [Reason.NO_LEASE], now=0.0)
    assert len(quota._levels) == MAX_PEERS
