"""Held-out evaluation: when, with which prompts, and what came out.

A version is evaluated when its number is a multiple of `every`, and the last one always. Nodes complete the prompts
greedily with exactly that version; these leases go out before those for training. An evaluation that does not
complete within `max_wait_s` is recorded as far as it is, with an event that says so.
"""

import logging
from collections import deque

import anyio.lowlevel

from echo_coordinator.config import EvaluationSection
from echo_coordinator.loops.feeding import Scorers
from echo_coordinator.loops.training import Trained
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.run_state import RunState

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0


class EvaluationLoop:
    """Starts evaluations and records them."""

    def __init__(self, state: RunState, pool: Scorers, settings: EvaluationSection) -> None:
        self._state = state
        self._pool = pool
        self._settings = settings
        self._due: deque[int] = deque()
        self._since: dict[int, float] = {}
        self._prompts: list[Prompt] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is due or under way."""
        return not self._due and not self._state.evaluations.under_way()

    def on_version(self, trained: Trained) -> None:
        """Note a new version; called for the same one again after a restart."""
        every = self._settings.every
        version = trained.policy_version
        known = {evaluation.version for evaluation in self._state.evaluations.recorded()}
        known.update(self._state.evaluations.under_way(), self._due)
        if every and (version % every == 0 or trained.last) and version not in known:
            self._due.append(version)
            self._state.core.changed.notify()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            while self._due:
                await self._state.evaluations.add(self._due[0], await self._held_out())
                self._due.popleft()
            for version in self._state.evaluations.under_way():
                await self._look(version)
            await self._state.wait_changed(LOOK_AGAIN_S)

    async def _held_out(self) -> list[Prompt]:
        if self._prompts is None:
            found = await self._pool.prompts("eval", 0, self._settings.prompts)
            self._prompts = [Prompt(index=prompt.index, prompt_ids=prompt.prompt_ids) for prompt in found]
        return self._prompts

    async def _look(self, version: int) -> None:
        progress = self._state.evaluations.progress(version)
        now = self._state.core.clock.monotonic_s()
        waited = now - self._since.setdefault(version, now)
        if not progress.is_complete and waited < self._settings.max_wait_s:
            return
        evaluation = await self._state.evaluations.record(version)
        self._since.pop(version, None)
        if not progress.is_complete:
            text = f"evaluation of version {version} was given up after {waited:.0f} s with {progress.done} of "
            await self._state.core.record_event("evaluation", f"{text}{progress.total} prompts")
        log.info("version %d: held-out accuracy %s over %d prompts", version, evaluation.accuracy, evaluation.scored)

    async def wait_idle(self) -> None:
        """Return when nothing is due or under way."""
        while not self.idle:
            await self._state.wait_changed(LOOK_AGAIN_S)
            await anyio.lowlevel.checkpoint()
