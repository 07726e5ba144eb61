"""Audits in a whole run: who computes and draws what it says is trusted, who does not loses its work and its place."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from echo_coordinator.coordinator import Coordinator
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.counters import WORK
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues
from echo_node.backends.base import Completion, GenerationRequest, Outcome
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine, script_logprobs
from echo_swarm.codec import pack_u32, unpack_u32
from tests.swarm.support.stand_ins import VOCABULARY
from tests.swarm.support.whole_run import RunningNode, WholeRun, joined, make_run, status_of

pytestmark = pytest.mark.anyio

PATIENCE_S = 120.0
OPTIONS = ScriptedOptions(batch=4, scores=True, mean_s=0.01)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Liar(ScriptedEngine):
    """Answers probes honestly, and samples with log-probabilities that it makes up."""

    def step(self) -> list[Outcome]:
        return [
            replace(made, logprobs=array("f", [-0.5] * len(made.token_ids)))
            if isinstance(made, Completion) and any(made.logprobs)
            else made
            for made in super().step()
        ]


class Stuck(ScriptedEngine):
    """Samples with the log-probabilities of version 0, whatever it says."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self._asked: dict[int, GenerationRequest] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._asked |= {request.request_id: request for request in requests}
        super().submit(requests)

    def step(self) -> list[Outcome]:
        return [self._old(made) if isinstance(made, Completion) else made for made in super().step()]

    def _old(self, made: Completion) -> Completion:
        request = self._asked.pop(made.request_id)
        if request.temperature == 0:
            return made
        return replace(made, logprobs=script_logprobs(request.prompt_ids, made.token_ids, 0))


def trainer_values(version: int, job: ProbeJob) -> tuple[ProbeValues, ...]:
    """The stand-in trainer's, with the weights of now or of a published file: it repeats its version."""
    if job.weights:
        version = int.from_bytes(Path(job.weights).read_bytes()[-8:], "little")
    made: list[ProbeValues] = []
    for place, text in enumerate(job.texts):
        ids = text.completion_ids or pack_u32([(7 * i + place) % VOCABULARY for i in range(12)])
        logprobs = script_logprobs(unpack_u32(text.prompt_ids), unpack_u32(ids), version)
        flat = array("f", bytes(4 * len(logprobs))) if job.spread else array("f")
        made.append(ProbeValues(completion_ids=ids, logprobs=logprobs, expected=logprobs, variance=flat))
    return tuple(made)


def audited_run(folder: Path, **audits: object) -> WholeRun:
    run = make_run(folder, beat_s=0.4)
    run.settings = run.settings.model_copy(update={"audits": AuditSettings.model_validate(audits)})
    run.trainer.probe = trainer_values
    run.trainer.step_s = 0.1
    return run


def standing(coordinator: Coordinator, node: RunningNode) -> str:
    status = status_of(coordinator, node)
    return status.standing if status else ""


async def until(condition: Callable[[], object], what: str) -> None:
    with anyio.move_on_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - looks at a status, which no event announces
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"never happened: {what}")


async def test_liars_that_answer_probes_honestly_are_found_and_their_work_is_not_trained_on(tmp_path: Path) -> None:
    run = audited_run(tmp_path, suspend_s=3600.0)
    async with (
        run.coordinator() as coordinator,
        joined(run, "first", ScriptedEngine(OPTIONS)) as first,
        joined(run, "second", ScriptedEngine(OPTIONS)) as second,
        joined(run, "liar", Liar(OPTIONS)) as liar,
        joined(run, "stuck", Stuck()) as stuck,
    ):
        for bad in (liar, stuck):
            await until(lambda bad=bad: standing(coordinator, bad) == "suspended", "it is found")
        for good in (first, second):
            await until(lambda good=good: standing(coordinator, good) == "proven", "it is trusted")
        found = status_of(coordinator, liar)
        assert found is not None and found.standing_detail.startswith("far") and not found.in_flight
        assert any("failed an audit" in warning for warning in coordinator.reporter.status().warnings)
        audits = coordinator.reporter.status().audits
        assert audits.clean >= 32 and audits.failed == 2 and audits.not_made == 0 and audits.taken_back >= 2
        updates = coordinator.state.updates.count
        await until(lambda: coordinator.state.updates.count >= updates + 3, "training goes on")
    # All was audited before it was trained on, so nothing of the liar's ever was.
    lies = liar.node.status().peer_id
    assert not [m for batch in run.trainer.trained for m in batch.members if m.peer_id == lies]


async def test_suspensions_outlive_the_coordinator_and_versions_before_the_newest_are_audited_too(
    tmp_path: Path,
) -> None:
    run = audited_run(tmp_path, suspend_s=3600.0)
    versions: list[str] = []

    def noted(version: int, job: ProbeJob) -> tuple[ProbeValues, ...]:
        versions.append(job.weights)
        return trainer_values(version, job)

    run.trainer.probe = noted
    run.trainer.step_s = 0.4  # So that a busy machine audits a version before it is no longer kept.
    async with joined(run, "liar", Liar(OPTIONS)) as liar, joined(run, "good", ScriptedEngine(OPTIONS)) as good:
        async with run.coordinator() as coordinator:
            await until(lambda: standing(coordinator, liar) == "suspended", "it is found")
        async with run.coordinator() as coordinator:
            await until(lambda: standing(coordinator, good) == "proven", "the other one is trusted")
            assert standing(coordinator, liar) == "suspended"
            assert coordinator.state.core.counters.get(WORK, "audit_not_audited") == 0
    assert any(versions), "some were sampled with a version before the trainer's"


async def test_a_trainer_that_cannot_audit_holds_it_against_nobody(tmp_path: Path) -> None:
    run = audited_run(tmp_path)
    run.trainer.probe = None
    async with run.coordinator() as coordinator, joined(run, "node", Liar(OPTIONS)) as node:
        await until(lambda: coordinator.state.updates.count >= 3, "training goes on")
        assert standing(coordinator, node) == "new"
        status = coordinator.reporter.status()
        assert status.audits.not_made and not status.audits.failed
        assert any("could not be made" in warning for warning in status.warnings)
