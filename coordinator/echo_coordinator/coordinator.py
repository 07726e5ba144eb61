"""The coordinator, wired. Everything here is an instance of a part that lives elsewhere.

    scorers (children) ──prompts──► feed_prompts ──groups──► RunState ◄──leases, pushes──► nodes (WorkService)
        ▲                                                      │  ▲
        └────── completions ◄── score_completions ◄────────────┘  └── rewards
                                                               │ batches
    trainer (child) ◄──────────── TrainingLoop ◄───────────────┘
        │ weights                      │ on_version
        ▼                              ▼
    Publishing ──► store ──► BlobServer ──► nodes      EvaluationLoop ──► greedy groups in RunState
        └──► directory (head record, own peer record)

Who waits for whom: nodes wait for work (long polls, 30 s at most), the training loop for a batch (looks every second),
feeding for capacity, scoring for completions. What bounds each queue: groups by `Admission.capacity`, pushes by
`pending_bytes`, calls in flight by `RpcServer`, completions to score by the groups they belong to.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from echo_coordinator.beginning import Ground, begin_epoch, check_whole, prepare
from echo_coordinator.child_settings import pool_settings, trainer_config
from echo_coordinator.config import RunSettings
from echo_coordinator.control import control_server
from echo_coordinator.epochs import Fence
from echo_coordinator.key_watch import KeyWatch
from echo_coordinator.loops.auditing import Auditing
from echo_coordinator.loops.evaluating import EvaluationLoop
from echo_coordinator.loops.feeding import Scorers, feed_prompts, score_completions, tick
from echo_coordinator.loops.probing import Probing
from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.loops.reporting import Reporter
from echo_coordinator.loops.sparing import Sparing
from echo_coordinator.loops.training import OpenTrainer, Trained, TrainingLoop
from echo_coordinator.manifests import run_facts
from echo_coordinator.peer_requests import PEER_REQUESTS
from echo_coordinator.peer_requests import answer as answer_about_peers
from echo_coordinator.peers_met import keep_peers
from echo_coordinator.publisher import Publisher
from echo_coordinator.publisher.contents import contents_of
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.scoring.pool import open_pool
from echo_coordinator.state.run_state import RunState, open_run
from echo_coordinator.state.service import MAX_REQUEST_BYTES, Published, WorkService
from echo_coordinator.trainer.client import start_trainer
from echo_coordinator.trainer.settings import correction_warnings
from echo_swarm.checkpoint.files import write_atomically
from echo_swarm.checkpoint.rate import bytes_per_s
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.directory.base import Directory
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcServer
from echo_swarm.work import WORK_PROTOCOL

log = logging.getLogger(__name__)

FAREWELL_BEATS = 4
"""How long a finished run waits for its nodes to hear that they may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What runs in processes of its own."""

    open_trainer: OpenTrainer
    open_scorers: Callable[[], AbstractAsyncContextManager[Scorers]]


def real_children(folder: RunFolder, settings: RunSettings) -> Children:
    """Return the trainer and the scorer pool that the settings ask for."""
    return Children(
        open_trainer=lambda config: start_trainer(config, folder.root, folder.logs / "trainer.log"),
        open_scorers=lambda: open_pool(pool_settings(folder, settings), log_dir=folder.logs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinator:
    """A running coordinator, as its command line and tests see it."""

    folder: RunFolder
    settings: RunSettings
    state: RunState
    training: TrainingLoop
    evaluation: EvaluationLoop
    reporter: Reporter
    invite: Invite
    fence: Fence
    ended: anyio.Event
    """Set when the run has finished or was stopped; the block should then be left."""

    def request_stop(self) -> None:
        """End after the update under way; nodes are told to wait for the coordinator to come back."""
        self.state.stop()
        self.training.stop()

    async def answer(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request of the control socket."""
        if op == "status":
            return {"status": (await self.reporter.status_in_slices()).model_dump(mode="json")}
        if op == "invite":
            if self.state.core.versions.published is None:
                raise EchoError("version 0 is not published yet; try again in a moment")
            return {"invite": str(self.invite)}
        if op in ("pause", "resume"):
            await self.state.set_paused(op == "pause")
            return {}
        if op in PEER_REQUESTS:
            return await answer_about_peers(self.state, op, request)
        if op == "stop":
            self.request_stop()
            await self.ended.wait()
            return {"policy_version": self.state.core.versions.published}
        raise EchoError(f"unknown request {op!r}")


@asynccontextmanager
async def run_coordinator(
    folder: RunFolder,
    settings: RunSettings,
    identity: Identity,
    host: Host,
    directory: Directory,
    children: Children | None = None,
    *,
    take_over: bool = False,
) -> AsyncGenerator[Coordinator]:
    """Run a coordinator for the length of the block; see `Coordinator.ended`.

    Args:
        folder: made by `init`; held by its lock.
        settings: of run.toml.
        identity: the run's key.
        host: its peer id is that of the run's key.
        directory: where versions are announced.
        children: the processes it starts; the real ones if None.
        take_over: also when another coordinator with this key is known to have begun later; see `take_epoch`.

    Raises:
        TakenOver: it is, and this one is not to; or it began while this one ran.
        EchoError: what made it impossible to go on (settings, disk, a trainer or scorer that fails again and again).

    """
    clock = SystemClock()
    children = children or real_children(folder, settings)
    ground = prepare(folder, settings, identity, clock)
    async with (
        _open_state(folder, settings, clock) as state,
        children.open_scorers() as pool,
        _blob_server(host, ground.store, settings) as blobs,
    ):
        check_whole(folder, ground.store, state)
        fence = begin_epoch(folder, ground, clock, host.addresses, take_over=take_over)
        publishing = _publishing(folder, settings, ground, state, fence)
        coordinator = _assemble(folder, settings, identity, host, children, state, pool, publishing, blobs, fence)
        coordinator.reporter.keys = ground.keys

        max_bytes = settings.network.service_bytes
        server = RpcServer(host, WORK_PROTOCOL, max_request_bytes=MAX_REQUEST_BYTES, max_bytes=max_bytes)
        _work_service(coordinator, publishing, ground.run_manifest, host).register(server)
        coordinator.reporter.traffic["work"] = server.traffic
        await coordinator.reporter.refresh()
        async with server, anyio.create_task_group() as tasks:
            # Closed before the tasks are cancelled: a wait cancelled in closing would hide what the block raised.
            async with control_server(folder, coordinator.answer):
                for loop in _loops(coordinator, pool):
                    tasks.start_soon(loop)
                tasks.start_soon(publishing.announce, host, directory, settings.run.id)
                tasks.start_soon(fence.watch, directory)
                tasks.start_soon(KeyWatch(ground.keys, host, directory, coordinator.reporter.warn).run)
                tasks.start_soon(keep_peers, folder, state, host)
                try:
                    yield coordinator
                finally:
                    status_now = coordinator.reporter.status()
                    write_atomically(folder.last_status, status_now.model_dump_json(indent=2).encode())
            tasks.cancel_scope.cancel()


def _work_service(coordinator: Coordinator, publishing: Publishing, run_manifest: bytes, host: Host) -> WorkService:
    fence, hear = coordinator.fence, coordinator.fence.hear

    def published() -> Published:
        head = publishing.head
        return Published(run_manifest=run_manifest, head_manifest=head and head.raw, epoch=fence.raw)

    status = Sparing(coordinator.reporter.making_plain)
    return WorkService(coordinator.state, published=published, status=status, hear_epoch=hear, seen_at=host.seen_at)


def _open_state(folder: RunFolder, settings: RunSettings, clock: Clock) -> AbstractAsyncContextManager[RunState]:
    facts, limits = run_facts(folder, settings), settings.standing
    return open_run(folder.database, settings.work, facts, clock, settings.probes, settings.audits, limits)


def _loops(coordinator: Coordinator, pool: Scorers) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    settings, state = coordinator.settings, coordinator.state

    def groups_left() -> int | None:
        planned = settings.run.updates
        if planned is None:
            return None
        return max(0, planned - state.updates.count) * settings.work.groups_per_update

    return [
        partial(tick, state),
        partial(feed_prompts, state, pool, groups_left),
        *[partial(score_completions, state, pool) for _ in range(settings.scoring.processes)],
        coordinator.evaluation.run,
        partial(_train, coordinator),
    ]


def _blob_server(host: Host, store: VersionStore, settings: RunSettings) -> BlobServer:
    network = settings.network
    return BlobServer(
        host,
        store,
        max_uploads=32,
        allocates=True,
        max_bytes_per_s=bytes_per_s(network.max_upload_mbit),
        max_bytes=network.service_bytes,
    )


def _publishing(folder: RunFolder, settings: RunSettings, ground: Ground, state: RunState, fence: Fence) -> Publishing:
    publisher = Publisher(
        identity=ground.identity,
        store=ground.store,
        clock=state.core.clock,
        max_staleness=settings.work.max_staleness,
        keep_versions=settings.keep_versions,
        lifetime_s=settings.publish.valid_s,
        deltas=settings.publish.deltas,
        fence=fence,
        keys=ground.keys,
    )
    return Publishing(
        state=state,
        publisher=publisher,
        identity=ground.identity,
        clock=state.core.clock,
        contents=contents_of(folder, settings.publish, lora=settings.lora is not None),
        fence=fence,
    )


def _assemble(
    folder: RunFolder,
    settings: RunSettings,
    identity: Identity,
    host: Host,
    children: Children,
    state: RunState,
    pool: Scorers,
    publishing: Publishing,
    blobs: BlobServer,
    fence: Fence,
) -> Coordinator:
    evaluation = EvaluationLoop(state, pool, settings.evaluation)

    async def on_version(trained: Trained) -> None:
        evaluation.on_version(trained)
        await reporter.refresh()

    training = TrainingLoop(
        folder=folder,
        state=state,
        publishing=publishing,
        probing=Probing(state, pool),
        auditing=Auditing(state, weights=partial(_audited_weights, settings, publishing)),
        config=trainer_config(folder, settings),
        open_trainer=children.open_trainer,
        updates=settings.run.updates,
        clock=state.core.clock,
        on_version=on_version,
    )
    reporter = Reporter(
        settings=settings,
        state=state,
        publishing=publishing,
        training=training,
        blobs=blobs,
        pool=pool,
        recent=[],
    )
    reporter.extra_warnings += correction_warnings(settings.objective, settings.work.max_staleness)
    return Coordinator(
        folder=folder,
        settings=settings,
        state=state,
        training=training,
        evaluation=evaluation,
        reporter=reporter,
        invite=_invite(settings, identity, host),
        fence=fence,
        ended=anyio.Event(),
    )


async def _train(coordinator: Coordinator) -> None:
    """Train to the end, evaluate the last version, let the nodes go."""
    state = coordinator.state
    await coordinator.training.run()
    if coordinator.training.done:
        with anyio.move_on_after(coordinator.settings.evaluation.max_wait_s + 5):
            await coordinator.evaluation.wait_idle()
        state.stop(finished=True)
        with anyio.move_on_after(FAREWELL_BEATS * coordinator.settings.work.beat_s):
            while any(node.live for node in state.core.roster.nodes()):
                await state.wait_changed(1.0)
    coordinator.ended.set()


def _audited_weights(settings: RunSettings, publishing: Publishing, version: int, current: bool) -> Path | None:
    # Published in float32, they are bit by bit what the trainer has when it stands there.
    if current and (settings.lora is not None or settings.publish.precision == "float32"):
        return Path()
    return publishing.weights_path(version)


def _invite(settings: RunSettings, identity: Identity, host: Host) -> Invite:
    announced = [f"{address}/p2p/{identity.peer_id}" for address in settings.network.announce]
    addresses = announced or list(host.addresses)
    return Invite(
        run=settings.run.id, key=identity.public_key, boot=tuple([*addresses, *settings.network.bootstrap][:16])
    )
