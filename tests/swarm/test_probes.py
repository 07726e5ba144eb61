"""Probes in a whole run: who computes what it says stays, who does not is set aside until it does."""

from array import array
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from echo_coordinator.coordinator import Coordinator
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.counters import WORK
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues
from echo_node.backends.base import LoadTimes, PolicyFiles, ScoreRequest, Scores
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine, script_logprobs
from echo_swarm.codec import pack_u32, unpack_u32
from echo_swarm.errors import BackendFailed
from echo_swarm.status import RunStatus
from echo_swarm.work import BackendReport
from tests.swarm.support.puppet_backend import PuppetBackend
from tests.swarm.support.stand_ins import VOCABULARY
from tests.swarm.support.whole_run import RunningNode, WholeRun, joined, make_run, status_of

pytestmark = pytest.mark.anyio

PATIENCE_S = 120.0
OPTIONS = ScriptedOptions(batch=4, scores=True, mean_s=0.01)
Scripted = Callable[[ScoreRequest, int], list["array[float]"]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def values(request: ScoreRequest, version: int) -> list["array[float]"]:
    """What the trainer would say as well."""
    return [script_logprobs(prompt, ids, version) for prompt, ids in request.items]


def shifted(by: float) -> Scripted:
    """Arithmetic that is off by so many nats, alternately up and down."""
    return lambda request, version: [
        array("f", (min(0.0, value + (by if place % 2 else -by)) for place, value in enumerate(piece)))
        for piece in values(request, version)
    ]


class Puppet(ScriptedEngine):
    """A scripted engine that scores as it is told."""

    def __init__(self, precision: str, scripted: Scripted) -> None:
        super().__init__(OPTIONS)
        self.precision = precision
        self.scripted = scripted

    def score(self, request: ScoreRequest) -> list["array[float]"]:
        assert self._policy is not None
        return self.scripted(request, self._policy.policy_version)

    def report(self) -> BackendReport:
        return super().report().model_copy(update={"precision": self.precision})


def trainer_values(version: int, job: ProbeJob) -> tuple[ProbeValues, ...]:
    """The stand-in trainer's: what scripted nodes give, 12 tokens a prompt."""
    made: list[ProbeValues] = []
    for place, text in enumerate(job.texts):
        ids = text.completion_ids or pack_u32([(7 * i + place) % VOCABULARY for i in range(12)])
        logprobs = script_logprobs(unpack_u32(text.prompt_ids), unpack_u32(ids), version)
        made.append(ProbeValues(completion_ids=ids, logprobs=logprobs))
    return tuple(made)


def probed_run(folder: Path, **probes: object) -> WholeRun:
    # A peer is probed with the version that it holds at a beat, if that is not too old by then: a beat must not last
    # much longer than an update.
    run = make_run(folder, beat_s=0.4)
    chosen = ProbeSettings.model_validate({"every": 1, **probes})
    # No audits: this trainer has no values for versions before its own.
    run.settings = run.settings.model_copy(update={"probes": chosen, "audits": AuditSettings(share=0)})
    run.trainer.probe = trainer_values
    run.trainer.step_s = 0.4
    return run


async def until(condition: Callable[[], object], what: str) -> None:
    with anyio.move_on_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - looks at a status, which no event announces
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"never happened: {what}")


def verdict(coordinator: Coordinator, node: RunningNode) -> str:
    status = status_of(coordinator, node)
    return status.probe if status else ""


def class_of(status: RunStatus, precision: str) -> tuple[int, int, int]:
    found = next(c for c in status.classes if c.precision == precision)
    return found.peers, found.measured, found.set_aside


async def test_who_lies_about_its_version_or_computes_otherwise_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    run = probed_run(tmp_path)
    stuck = Puppet("float32", lambda request, version: values(request, max(0, version - 1)))
    broken = Puppet("float32", shifted(1.5))
    async with (
        run.coordinator() as coordinator,
        joined(run, "first", ScriptedEngine(OPTIONS)) as first,
        joined(run, "second", ScriptedEngine(OPTIONS)) as second,
        joined(run, "coarse", Puppet("q8_0", shifted(0.01))) as coarse,
        joined(run, "stuck", stuck) as liar,
        joined(run, "broken", broken) as wrong,
    ):
        await until(lambda: verdict(coordinator, liar) == "other_version", "the liar's version is noticed")
        await until(lambda: verdict(coordinator, wrong) == "far", "the broken backend is noticed")
        for honest in (first, second, coarse):
            await until(lambda honest=honest: verdict(coordinator, honest) == "matches", "an honest node is measured")
            await until(lambda honest=honest: _confirmed(coordinator, honest) >= 1, "its version is confirmed")
        status = coordinator.reporter.status()
        # Before its first lie could be told from the truth, the liar may have fitted; the broken one never did.
        assert class_of(status, "float32") in ((4, 3, 2), (4, 2, 2))
        assert class_of(status, "q8_0") == (1, 1, 0)
        coarse_class = next(c for c in status.classes if c.precision == "q8_0")
        assert coarse_class.gap_mean == pytest.approx(0.01, rel=0.2)
        assert [gap for _, gap in coarse_class.trend] == pytest.approx([0.01] * len(coarse_class.trend), rel=0.2)
        assert sum("is set aside" in warning for warning in status.warnings) == 2

        # They hold nothing and are given nothing, and are told why; the others go on.
        before = [status_of(coordinator, node) for node in (liar, wrong)]
        assert all(node is not None and node.set_aside and not node.in_flight for node in before)
        updates = coordinator.state.updates.count
        await until(lambda: coordinator.state.updates.count >= updates + 2, "training goes on")
        after = [status_of(coordinator, node) for node in (liar, wrong)]
        assert [n and n.accepted for n in before] == [n and n.accepted for n in after]
        assert any("other version" in line for line in liar.lines)
        await until(lambda: "a probe to fit" in wrong.node.activity.headline, "it says what it waits for")

        broken.scripted = values
        await until(lambda: verdict(coordinator, wrong) == "matches", "the mended node is measured again")
        done = wrong.verdicts["accepted"]
        await until(lambda: wrong.verdicts["accepted"] > done, "it works again")
        assert any("fits now" in line for line in wrong.lines)


def _confirmed(coordinator: Coordinator, node: RunningNode) -> int:
    status = status_of(coordinator, node)
    return -1 if status is None or status.confirmed_version is None else status.confirmed_version


async def test_a_backend_that_cannot_score_works_and_is_shown_as_not_measured(tmp_path: Path) -> None:
    run = probed_run(tmp_path)
    async with run.coordinator() as coordinator, run.node("plain") as plain:
        await until(lambda: verdict(coordinator, plain) == "not_measured", "it says that it cannot")
        done = plain.verdicts["accepted"]
        await until(lambda: plain.verdicts["accepted"] > done, "it works")
        status = coordinator.reporter.status()
        assert [(c.backend, c.peers, c.measured, c.gap_mean) for c in status.classes] == [("scripted", 1, 0, None)]
        assert not [warning for warning in status.warnings if "probe" in warning or "aside" in warning]


async def test_where_probes_are_required_nobody_works_before_one_fits(tmp_path: Path) -> None:
    run = probed_run(tmp_path, required=True)
    async with (
        run.coordinator() as coordinator,
        run.node("plain") as plain,
        joined(run, "measured", ScriptedEngine(OPTIONS)) as measured,
    ):
        await until(lambda: measured.verdicts["accepted"] >= 8, "who was measured works")
        await until(lambda: verdict(coordinator, plain) == "not_measured", "the other one was asked")
        await until(lambda: "a probe to fit" in plain.node.activity.headline, "it says what it waits for")
        assert plain.verdicts["accepted"] == 0


async def test_a_warning_alone_takes_no_work_away(tmp_path: Path) -> None:
    run = probed_run(tmp_path, action="warn")
    async with run.coordinator() as coordinator, joined(run, "broken", Puppet("float32", shifted(1.5))) as wrong:
        await until(lambda: verdict(coordinator, wrong) == "far", "it is noticed")
        done = wrong.verdicts["accepted"]
        await until(lambda: wrong.verdicts["accepted"] > done, "it works on")
        assert any("is not trusted" in warning for warning in coordinator.reporter.status().warnings)


async def test_who_is_set_aside_stays_so_over_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    run = probed_run(tmp_path)
    broken = Puppet("float32", shifted(1.5))
    async with joined(run, "broken", broken) as wrong, joined(run, "good", ScriptedEngine(OPTIONS)) as good:
        async with run.coordinator() as coordinator:
            await until(lambda: verdict(coordinator, wrong) == "far", "it is noticed")
            await until(lambda: verdict(coordinator, good) == "matches", "the other one fits")
            items, before = coordinator.state.probes.items, status_of(coordinator, wrong)
        async with run.coordinator() as coordinator:
            assert coordinator.state.probes.items == items
            await until(lambda: good.verdicts["accepted"] > 8, "the other one works")
            status = status_of(coordinator, wrong)
            assert status is not None and status.set_aside
            assert before is not None and status.accepted == before.accepted
            done = wrong.verdicts["accepted"]
            broken.scripted = values
            await until(lambda: wrong.verdicts["accepted"] > done, "mended, it works again")


async def test_a_trainer_that_gives_no_values_costs_the_probes_alone(tmp_path: Path) -> None:
    run = probed_run(tmp_path, required=True)
    run.trainer.probe = None
    async with run.coordinator() as coordinator, joined(run, "node", ScriptedEngine(OPTIONS)) as node:
        await until(lambda: node.verdicts["accepted"] >= 8, "it works all the same")
        assert any(warning.startswith("no node is probed") for warning in coordinator.reporter.status().warnings)


async def test_a_probe_that_comes_before_the_first_load_or_whose_backend_dies_is_answered_later(tmp_path: Path) -> None:
    # Once measured it is not asked again, however many versions go by before this test looks.
    run = probed_run(tmp_path, every=1000)
    puppet = PuppetBackend()
    puppet.scores = True
    scored, fail, loading = 0, True, anyio.Event()
    load, score = puppet.load, puppet.score

    async def slow_load(policy: PolicyFiles) -> LoadTimes:
        await loading.wait()
        return await load(policy)

    async def failing_score(request: ScoreRequest) -> Scores:
        nonlocal scored, fail
        scored += 1
        if fail:
            fail = False
            raise BackendFailed("it died of the question")
        return await score(request)

    puppet.load, puppet.score = slow_load, failing_score  # type: ignore[method-assign]
    async with run.coordinator() as coordinator, run.node("late", open_backend=puppet.open) as late:
        await until(lambda: status_of(coordinator, late), "it joined")
        await until(lambda: coordinator.state.probes.references, "there is something to ask")
        assert not scored
        loading.set()
        await until(lambda: verdict(coordinator, late) == "matches", "it answers in the end")
        # On a busy machine the version scored may be too old by the time the answer comes; then it is asked once more.
        assert scored == 2 + coordinator.state.core.counters.get(WORK, "probe_outdated")
        assert [line for line in late.lines if "tried again (it died of the question)" in line]
