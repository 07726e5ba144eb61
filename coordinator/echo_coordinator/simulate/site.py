"""The coordinator's side: its real state, service and loops in one process that can be killed and started again."""

import asyncio
import random
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from sqlite3 import Connection, OperationalError
from typing import Any

from echo_coordinator.config import EvaluationSection
from echo_coordinator.loops.evaluating import EvaluationLoop
from echo_coordinator.loops.feeding import feed_prompts, score_completions
from echo_coordinator.loops.training import Trained
from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.pool import SimPool
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.trainer import Checkpoint, SimTrainer
from echo_coordinator.simulate.truth import END, VOCABULARY, Truth
from echo_coordinator.simulate.virtual_time import LoopClock
from echo_coordinator.simulate.watch import Watch
from echo_coordinator.state.audit_rows import write_secret
from echo_coordinator.state.database import open_database
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.run_state import RunFacts, RunState, open_run
from echo_coordinator.state.service import Published, WorkService
from echo_swarm.errors import LocalFault
from echo_swarm.identity import PeerId
from echo_swarm.wire import Message

RUN_ID = "51" * 16
TICK_S = 1.0


class Site:
    """`Server` for the network."""

    def __init__(
        self,
        *,
        folder: Path,
        scenario: Scenario,
        truth: Truth,
        watch: Watch,
        draws: random.Random,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._folder = folder
        self._scenario = scenario
        self._truth = truth
        self._watch = watch
        self._draws = draws
        self._failed = failed
        self._crew = Crew(failed)
        self._host: asyncio.Task[None] | None = None
        self._killed = asyncio.Event()
        self._service: WorkService | None = None
        self._ids = 0
        self.checkpoint = Checkpoint()
        self.lives = 0
        self.state: RunState | None = None
        self.trainer: SimTrainer | None = None
        self.busy_s = 0.0
        """Of the trainer, in lives that have ended."""
        self.waited_s: dict[str, float] = {}
        self._path = folder / "life0.db"
        self.disk_is_full = False
        self.ended_by_disk = asyncio.Event()
        """A part of the process could not go on without the disk; whoever waits starts it again."""

    @property
    def life(self) -> int | None:
        """Number of the process that answers now."""
        return self.lives if self._service is not None else None

    def begin(self) -> None:
        """Start a process on what the last one left on disk."""
        self.lives += 1
        self._crew, self._killed = Crew(self._part_failed), asyncio.Event()
        self._host = Crew(self._failed).start(self._live())

    def _part_failed(self, error: BaseException) -> None:
        if isinstance(error, LocalFault) and self.disk_is_full:
            self.ended_by_disk.set()
        else:
            self._failed(error)

    async def kill(self) -> None:
        """End the process where it stands; what is committed now is all that its successor finds."""
        if self.state is None or self._host is None:
            return
        left = self._folder / f"life{self.lives}.db"
        for ending in ("", "-wal"):
            if (source := Path(f"{self._path}{ending}")).exists():
                shutil.copyfile(source, f"{left}{ending}")
        self._watch.killed(self.state)
        await self._end()
        for file in self._folder.glob(f"{self._path.name}*"):
            file.unlink()
        self._path = left

    async def set_paused(self, paused: bool) -> bool:
        """Have the owner pause the run, or resume it. Returns whether the process took it in and lived on."""
        state, life = self.state, self.life
        if state is None:
            return False
        try:
            await state.set_paused(paused)
        except LocalFault:
            return False
        return self.life == life

    async def end(self) -> None:
        """Close at the end of the simulation."""
        if self._host is not None and self.state is not None:
            await self._end()

    async def _end(self) -> None:
        assert self._host is not None
        self._account()
        self.state, self._service = None, None
        self._crew.stop()
        self._killed.set()
        await self._host

    def handle(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request."""
        self._crew.start(work)

    async def answer(self, peer: PeerId, method: str, request: Message) -> Message:
        """Answer a request and look whether all is as it should be."""
        service, state = self._service, self.state
        assert service is not None and state is not None, "requests end with the process"
        reply: Message = await getattr(service, method)(peer, request)
        self._watch.answered(state, peer, method, request, reply)
        return reply

    async def _live(self) -> None:
        scenario = self._scenario
        if self.lives == 1:
            self._make_database()
        facts = RunFacts(run_id=RUN_ID, vocabulary_size=VOCABULARY, end_token_ids=(END,))
        async with open_run(
            self._path,
            scenario.work,
            facts,
            LoopClock(),
            ProbeSettings(prompts=0),
            scenario.audits,
            scenario.standing,
            commit=self._commit,
            durable=False,
        ) as state:
            self._watch.begun(state)
            self._start(state)
            await self._killed.wait()

    def _start(self, state: RunState) -> None:
        scenario, crew = self._scenario, self._crew
        pool = SimPool(scenario.trainer.reward, scenario.faults.unscorable, self._draws)
        section = EvaluationSection(every=scenario.eval_every, prompts=scenario.eval_prompts)
        evaluations = EvaluationLoop(state, pool, section)
        self.trainer = SimTrainer(
            state=state,
            scenario=scenario,
            checkpoint=self.checkpoint,
            truth=self._truth,
            watch=self._watch,
            draws=self._draws,
            on_version=lambda version: evaluations.on_version(Trained(policy_version=version, last=False)),
        )
        self._service = WorkService(state, published=lambda: _published(state), new_id=self._new_id)
        self.state = state
        for part in (
            feed_prompts(state, pool, lambda: None),
            score_completions(state, pool),
            self._tick(state),
            self.trainer.publish_as_they_come(),
            self.trainer.run(),
        ):
            crew.start(part)
        if scenario.eval_every:
            crew.start(evaluations.run())

    async def _tick(self, state: RunState) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await state.tick()
            self._watch.ticked(state)

    async def _commit(self, connection: Connection) -> None:
        if self._scenario.faults.disk_s:
            await asyncio.sleep(self._draws.expovariate(1 / self._scenario.faults.disk_s))
        if self.disk_is_full:
            raise OperationalError("the simulated disk is full")
        connection.execute("COMMIT")

    def _make_database(self) -> None:
        connection = open_database(self._path, durable=False)
        write_secret(connection, self._draws.randbytes(32))
        connection.close()

    def _new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16, "big")

    def _account(self) -> None:
        if self.trainer is not None:
            activity = self.trainer.activity
            activity.stop(asyncio.get_running_loop().time())
            self.busy_s += activity.busy_s
            for cause, seconds in activity.waited_s.items():
                self.waited_s[cause] = self.waited_s.get(cause, 0.0) + seconds


def _published(state: RunState) -> Published:
    version = state.core.versions.published
    return Published(run_manifest=b"", head_manifest=None if version is None else version.to_bytes(8, "big"))
