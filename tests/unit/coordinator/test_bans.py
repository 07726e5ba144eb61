"""What a ban ends at once, what it leaves, and that neither a restart nor a stopped coordinator makes a difference."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from echo_coordinator.peer_requests import answer, peer_entries
from echo_coordinator.state import ban_rows, rows
from echo_coordinator.state.audit_rules import AuditVerdict, Finding
from echo_coordinator.state.audits import Share
from echo_coordinator.state.ban_rows import Ban
from echo_coordinator.state.groups import SlotState
from echo_coordinator.state.leases import LiveLease
from echo_swarm.errors import LocalFault, RemoteError, UsageError
from echo_swarm.identity import Identity, PeerId
from echo_swarm.peer_entry import PeerEntry, resolve_peer
from echo_swarm.trajectory import Reason
from echo_swarm.work import Role
from tests.unit.coordinator.conftest import BACKEND, OpenRun, Run

pytestmark = pytest.mark.anyio

FAR = Finding(verdict=AuditVerdict.FAR, detail="two nats off", gap=2.0)


async def join(run: Run, name: str) -> None:
    run.join(name)
    await run.state.core.write_peer(run.peer(name), Role.INFERENCE, BACKEND)


async def begin(run: Run, *names: str) -> None:
    """Let each peer deliver one half of a group, and take one half more."""
    await run.publish(0)
    await run.fill(len(names))
    for name in names:
        await join(run, name)
    for name in names:
        (lease,) = run.grant(name, 2)
        made = [run.complete(lease, member) for member in sorted(lease.outstanding)]
        assert set(await run.reasons(name, made)) == {Reason.ACCEPTED}
        run.grant(name, 2)
    await run.state.core.save()


def held(run: Run, name: str) -> int:
    """How many completions of a peer wait to be trained on."""
    peer = run.peer(name)
    return sum(
        slot.work is not None and slot.work.peer == peer
        for group in run.state.core.groups.by_id.values()
        for slot in group.slots
        if slot.state is not SlotState.OPEN
    )


def lease_of(run: Run, name: str) -> LiveLease:
    """A lease of which something is outstanding."""
    core, peer = run.state.core, run.peer(name)
    ids = [slot.lease_id for group in core.groups.by_id.values() for slot in group.slots if slot.lease_id]
    return next(held for held in map(core.leases.get, ids) if held and held.peer == peer and held.outstanding)


async def fail_audit(run: Run, name: str) -> None:
    """Let an audit of what a peer delivered fail."""
    core, peer = run.state.core, run.peer(name)
    group, member = next(
        (group, member)
        for group in core.groups.by_id.values()
        for member, slot in enumerate(group.slots)
        if slot.work is not None and slot.work.peer == peer
    )
    keys = [(group.group_id, member)]
    stored = await core.committer.execute(lambda db: rows.load_trajectories(db, keys))
    share = Share(group=group, peer=peer, completions=tuple(stored.values()), work=frozenset())
    await run.state.audits.record(share, FAR, 0.1, free=True)


async def entry(run: Run, name: str) -> PeerEntry:
    (found,) = [entry for entry in await peer_entries(run.state) if entry.peer_id == run.peer(name)]
    return found


async def test_a_ban_ends_leases_and_leaves_what_was_delivered(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann", "bob")
        leases = run.state.core.leases
        assert await run.state.bans.ban(run.peer("ann"), "spam", take_back=False) == 0
        assert leases.in_flight(run.peer("ann")) == 0 and leases.in_flight(run.peer("bob")) == 2
        assert held(run, "ann") == 2 and held(run, "bob") == 2
        assert run.state.core.roster.alone()
        with pytest.raises(RemoteError, match="banned: spam"):
            run.state.bans.refuse(run.peer("ann"))
        run.state.bans.refuse(run.peer("bob"))


async def test_a_ban_takes_back_what_was_not_trained_on_if_asked_to_and_again_after_a_crash(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann", "bob")
        await run.score()
        assert await run.state.bans.ban(run.peer("ann"), "", take_back=True) == 2
        await run.state.core.save()
        assert held(run, "ann") == 0 and held(run, "bob") == 2
    async with open_state() as run:
        assert held(run, "ann") == 0 and held(run, "bob") == 2
        with pytest.raises(RemoteError, match="no reason was given"):
            run.state.bans.refuse(run.peer("ann"))


async def test_a_push_that_was_being_read_during_the_ban_is_not_taken(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann")
        lease = lease_of(run, "ann")
        made = [run.complete(lease, member) for member in sorted(lease.outstanding)]
        await run.state.bans.ban(run.peer("ann"), "spam", take_back=True)
        assert await run.reasons("ann", made) == [Reason.LATE, Reason.LATE]
        await run.score()  # What waits for its reward is let go of when it has it.
        assert held(run, "ann") == 0


async def test_a_ban_written_while_no_coordinator_ran_holds_from_the_start(open_state: OpenRun, tmp_path: Path):
    async with open_state() as run:
        await begin(run, "ann", "bob")
        ann = run.peer("ann")
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db, db:
        ban_rows.write_ban(db, ann, Ban(at=1.0, reason="spam", takes_back=True))
    async with open_state() as run:
        assert run.state.core.leases.in_flight(ann) == 0
        await run.score()
        assert held(run, "ann") == 0 and held(run, "bob") == 2


def leave_room(run: Run, pages: int) -> None:
    """Let the database grow by so many pages, beyond which its disk is full."""
    connection = run.state.core.committer._connection
    have = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {have + pages}")


async def test_a_ban_that_cannot_be_written_holds_is_said_to_be_owed_and_is_written_later(open_state: OpenRun):
    reason = "spam " * 2000  # More than what is free in the pages there are.
    async with open_state() as run:
        await begin(run, "ann", "bob")
        ann = run.peer("ann")
        leave_room(run, 0)
        with pytest.raises(LocalFault, match=r"is banned, but that could not be written down .* tried again"):
            await run.state.bans.ban(ann, reason, take_back=False)
        with pytest.raises(RemoteError, match="banned"):
            run.state.bans.refuse(ann)
        await run.state.bans.write_owed()
        leave_room(run, 10_000)
        await run.state.tick()
    async with open_state() as run:
        assert run.state.bans.all[ann].reason == reason


async def test_a_pardon_that_cannot_be_written_lifts_nothing(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann")
        ann, state = run.peer("ann"), run.state
        await fail_audit(run, "ann")
        await state.bans.ban(ann, "spam", take_back=False)
        connection = state.core.committer._connection
        connection.execute("PRAGMA query_only = ON")
        with pytest.raises(LocalFault):
            await answer(state, "pardon", {"peer": ann})
        with pytest.raises(LocalFault):
            await state.audits.pardon(ann)
        assert ann in state.bans.all and ann in state.core.roster.banned and state.audits.is_suspended(ann)
        connection.execute("PRAGMA query_only = OFF")
        assert (await answer(state, "pardon", {"peer": ann}))["was_banned"]
        assert not state.bars(ann)


async def test_a_pardon_makes_a_newcomer_of_who_was_banned_or_suspended(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann", "bob")
        ann, state = run.peer("ann"), run.state
        await fail_audit(run, "ann")
        await state.bans.ban(ann, "spam", take_back=False)
        assert (await entry(run, "ann")).standing == "banned"
        done = await answer(state, "pardon", {"peer": ann[-8:]})
        assert done == {"peer_id": ann, "was_banned": True, "had_failed": True}
        found = await entry(run, "ann")
        assert (found.standing, found.audits_failed, found.suspended_s) == ("new", 0, 0.0)
        state.bans.refuse(ann)
        assert not state.bars(ann) and ann not in state.core.leases.pace.on_probation
        again = await answer(state, "pardon", {"peer": ann})
        assert again == {"peer_id": ann, "was_banned": False, "had_failed": False}
    async with open_state() as run:
        assert run.state.audits.word(run.peer("ann")) == "new" and not run.state.bans.all


async def test_peers_are_listed_with_all_that_is_known_of_them(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann", "bob")
        stranger = Identity.generate().peer_id
        await run.reasons("bob", [run.complete(lease_of(run, "bob"), 1, temperature=3.0)])
        await answer(run.state, "ban", {"peer": stranger, "reason": "known from elsewhere"})
        ann, bob = await entry(run, "ann"), await entry(run, "bob")
        assert (ann.backend, ann.precision, ann.role) == ("scripted", "float32", "inference")
        assert (ann.accepted, ann.rejected, ann.in_flight, ann.standing) == (2, {}, 2, "new")
        assert ann.limit == 8 and ann.live and ann.last_seen_s == 0.0
        assert bob.rejected and bob.accepted == 2
        (never,) = [found for found in await peer_entries(run.state) if found.peer_id == stranger]
        assert (never.standing, never.detail, never.last_seen_s) == ("banned", "known from elsewhere", None)
    async with open_state() as run:
        ann = await entry(run, "ann")
        assert (ann.accepted, ann.live) == (2, False)


async def test_who_is_suspended_is_told_until_when_and_why(open_state: OpenRun):
    async with open_state() as run:
        await begin(run, "ann")
        ann = run.peer("ann")
        assert run.state.standing(ann) == ""
        await fail_audit(run, "ann")
        told = run.state.standing(ann)
        assert told.startswith("suspended until ") and "UTC" in told and "two nats off" in told
        run.clock.advance(400)
        assert run.state.standing(ann).startswith("one completion at a time until 4 more audits are clean")


def test_a_shortened_name_means_one_peer_or_is_refused():
    ann, bob = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
    known = [ann, bob]
    assert resolve_peer(ann, known) == resolve_peer(ann[-8:], known) == resolve_peer(f"…{ann[-8:]}", known) == ann
    assert resolve_peer(bob[:20], known) == bob
    other = Identity.generate().peer_id
    assert resolve_peer(other, known) == PeerId(other)
    with pytest.raises(UsageError, match="may be any of 2 peers"):
        resolve_peer("12D3KooW", known)
    for nobody in ("nobody", ann + "x"):
        with pytest.raises(UsageError, match="no peer of this run"):
            resolve_peer(nobody, known)
    for short in ("", "…", ann[-1], f"…{ann[-5:]}", "12D3K"):
        with pytest.raises(UsageError, match="too short for a peer; give 6 characters"):
            resolve_peer(short, [ann])


def test_a_peer_whose_key_was_made_to_end_as_another_ones_is_told_apart():
    ann = Identity.from_seed(bytes(32)).peer_id
    twin = PeerId(ann[:20] + "x" * 20 + ann[-8:])
    with pytest.raises(UsageError, match=f"may be any of 2 peers .*{twin}.*give more of its id"):
        resolve_peer(ann[-8:], [ann, twin])
