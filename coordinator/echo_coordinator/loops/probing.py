"""What the trainer gives to the run's probes at each version, before nodes can fetch that version."""

import logging
from typing import Protocol

from echo_coordinator.loops.feeding import Scorers
from echo_coordinator.state.run_state import RunState
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeRefused, ProbeText, ProbeValues
from echo_swarm.probe import ProbeItem

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 1800.0
"""Scoring a few prompts takes longer than this only in a hang."""


class ProbedTrainer(Protocol):
    """What scores: a trainer."""

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        """Return one result for each text. Raises ProbeRefused, and BackendFailed when the trainer ended."""
        ...


class Probing:
    """Chooses the probes, and has them scored at each version."""

    def __init__(self, state: RunState, pool: Scorers) -> None:
        self._state = state
        self._pool = pool

    async def refer(self, trainer: ProbedTrainer, version: int) -> None:
        """Have the probes scored by `trainer`, which is at `version`. A refusal is noted, and the run goes on."""
        probes = self._state.probes
        if not probes.settings.prompts or version in probes.references:
            return
        try:
            job = await self._job()
            values = await trainer.probe(job, timeout_s=PROBE_LIMIT_S)
        except ProbeRefused as e:
            if not probes.fault:
                log.warning("%s", e)
                await self._state.core.record_event("probes", str(e))
            probes.fault = str(e)
            return
        probes.fault = ""
        if not probes.items:
            pairs = zip(job.texts, values, strict=True)
            await probes.set_items(
                [ProbeItem(prompt_ids=t.prompt_ids, completion_ids=v.completion_ids) for t, v in pairs]
            )
        await probes.set_reference(version, [value.logprobs for value in values])

    async def _job(self) -> ProbeJob:
        probes, facts = self._state.probes, self._state.core.facts
        texts = [ProbeText(prompt_ids=item.prompt_ids, completion_ids=item.completion_ids) for item in probes.items]
        return ProbeJob(
            texts=tuple(texts or await self._prompts(probes.settings.prompts)),
            tokens=min(probes.settings.tokens, self._state.core.settings.max_tokens),
            seed=self._state.core.settings.seed % 2**62,
            end_token_ids=facts.end_token_ids,
            vocabulary=facts.vocabulary_size,
        )

    async def _prompts(self, count: int) -> list[ProbeText]:
        found = await self._pool.prompts("eval", 0, count) or await self._pool.prompts("train", 0, count)
        if not found:
            raise ProbeRefused("the environment has no prompt among the first that could be used as a probe")
        return [ProbeText(prompt_ids=prompt.prompt_ids, completion_ids=b"") for prompt in found]
