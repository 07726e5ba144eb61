"""A live coordinator that hands out manifests it should not: refused and told, and the next good one is taken."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echo_swarm.directory.memory import DirectoryStore
from echo_swarm.envelope import seal, unseal
from echo_swarm.errors import BadSignature, EchoError, MalformedMessage, Untrusted
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import MANIFEST_LIMITS, CheckpointManifest, RunManifest
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.work import Hello, Welcome
from tests.swarm.support.fake_coordinator import FakeCoordinator
from tests.swarm.support.node_harness import Swarm, until
from tests.swarm.support.puppet_backend import PuppetBackend

pytestmark = pytest.mark.anyio

STRANGER = Identity.from_seed(b"s" * 32)


class LyingCoordinator(FakeCoordinator):
    """Answers a hello with whatever a test puts here."""

    forged_head: bytes | None = None
    forged_run: bytes | None = None

    async def _hello(self, peer: PeerId, hello: Hello) -> Welcome:
        welcome = await super()._hello(peer, hello)
        forged = {"head_manifest": self.forged_head, "run_manifest": self.forged_run}
        return welcome.model_copy(update={name: value for name, value in forged.items() if value is not None})

    def manifest(self, version: int) -> CheckpointManifest:
        signed = self.store.manifest(version)
        assert signed is not None
        return signed.message

    def run(self) -> RunManifest:
        return unseal(self.run_envelope, RunManifest, MANIFEST_LIMITS).message


def lying(folder: Path) -> tuple[Swarm, LyingCoordinator]:
    coordinator = LyingCoordinator(folder / "coordinator")
    for version in (1, 2):
        coordinator.publish(version)
    swarm = Swarm(folder=folder, network=MemoryNetwork(), directory=DirectoryStore(), coordinator=coordinator)
    return swarm, coordinator


def changed(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


HEADS: dict[str, Callable[[LyingCoordinator], bytes]] = {
    "older": lambda c: seal(c.identity, c.manifest(1)),
    "the same version with other content": lambda c: seal(
        c.identity, c.manifest(2).model_copy(update={"issued_at": 7.0})
    ),
    "of another run": lambda c: seal(c.identity, c.manifest(2).model_copy(update={"run_id": "f" * 32})),
    "newer, by another key": lambda c: seal(STRANGER, c.manifest(2).model_copy(update={"policy_version": 9})),
    "another kind of message": lambda c: c.run_envelope,
    "one bit changed": lambda c: changed(seal(c.identity, c.manifest(2))),
    "cut short": lambda c: seal(c.identity, c.manifest(2))[:-1],
    "garbage": lambda c: b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("forge", HEADS.values(), ids=HEADS.keys())
async def test_a_head_that_is_no_newer_version_of_this_run_is_refused_told_and_got_over(
    tmp_path: Path, forge: Callable[[LyingCoordinator], bytes]
) -> None:
    swarm, coordinator = lying(tmp_path)
    async with swarm.node() as running:
        async with swarm.serving():
            await until(lambda: 2 in running.puppet.loaded)
        coordinator.forged_head = forge(coordinator)
        async with swarm.serving():
            await until(lambda: any("head is refused" in line for line in running.lines))
            accepted = len(coordinator.accepted)
            await until(lambda: len(coordinator.accepted) > accepted, "work with the version that is trusted")
            coordinator.forged_head = None
            coordinator.publish(3)
            await until(lambda: 3 in running.puppet.loaded)
        assert running.puppet.loaded == [2, 3] and not running.ended.is_set()


RUNS: dict[str, tuple[type[EchoError], Callable[[LyingCoordinator], bytes]]] = {
    "by another key": (Untrusted, lambda c: seal(STRANGER, c.run())),
    "naming another key": (
        Untrusted,
        lambda c: seal(c.identity, c.run().model_copy(update={"publisher_key": STRANGER.public_key})),
    ),
    "of another run": (Untrusted, lambda c: seal(c.identity, c.run().model_copy(update={"run_id": "f" * 32}))),
    "one bit changed": (BadSignature, lambda c: changed(c.run_envelope)),
    "garbage": (MalformedMessage, lambda c: b"\xc1"),
}


@pytest.mark.parametrize(("error", "forge"), RUNS.values(), ids=RUNS.keys())
async def test_a_run_that_does_not_fit_the_invite_is_never_worked_for(
    tmp_path: Path, error: type[EchoError], forge: Callable[[LyingCoordinator], bytes]
) -> None:
    swarm, coordinator = lying(tmp_path)
    coordinator.forged_run = forge(coordinator)
    puppet = PuppetBackend()
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        with pytest.raises(error):
            await running.wait()
    assert not puppet.loaded and not coordinator.granted
