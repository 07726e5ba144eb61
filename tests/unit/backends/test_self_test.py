"""The self-test: the stored model, what passes, what fails, and that a verdict is remembered."""

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from echo_node.backends.base import Completion, FailedRequest, FailureCode, Outcome, ScoreRequest
from echo_node.backends.inline import InlineBackend
from echo_node.backends.known_model import FOLDER, KnownModel
from echo_node.backends.options import ScriptedOptions, TorchOptions
from echo_node.backends.self_test import SelfTestFailed, _requests, judge, run_self_test
from echo_node.backends.tested import Verdicts, open_tested
from echo_node.backends.torch_engine import TorchEngine
from echo_swarm.trajectory import FinishReason
from echo_swarm.work import BackendReport
from tools.make_known_model import write

MODEL = KnownModel.read()
REQUESTS = list(_requests(MODEL))
REPORT = BackendReport(backend="torch", build="torch 1.0", precision="float32", device="cpu", batch=4)


def right_answers(temperature: float | None = None, shift: int = 0, rows: int = MODEL.vocabulary) -> list[Outcome]:
    """What a right backend answers; or one that always computes with `temperature`, or misplaces its figures."""
    outcomes: list[Outcome] = []
    for request in REQUESTS:
        ids = array("I", [(7 * request.request_id) % MODEL.vocabulary, (11 * request.request_id) % MODEL.vocabulary])
        if ids[0] == MODEL.end_token_id:
            ids = ids[:1]
        prompt = MODEL.prompts.index(request.prompt_ids)
        logprobs = MODEL.expected_logprobs(prompt, ids, temperature or request.temperature)
        outcomes.append(
            Completion(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=array("f", logprobs[shift:] + logprobs[:shift]),
                finish_reason=FinishReason.STOP if MODEL.end_token_id in ids else FinishReason.LENGTH,
                oldest_version=0,
                newest_version=0,
                artifact_digest=bytes(32),
            )
        )
    return outcomes


def first(change: Callable[[Completion], Outcome]) -> list[Outcome]:
    """Right answers, but for the first."""
    answers = right_answers()
    assert isinstance(answers[0], Completion)
    return [change(answers[0]), *answers[1:]]


def test_the_package_holds_what_the_tool_writes(tmp_path: Path) -> None:
    write(tmp_path)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 200_000
    for path in sorted(tmp_path.iterdir()):
        if path.name != "expected.bin":
            assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
    stored, anew = (array("f", (folder / "expected.bin").read_bytes()) for folder in (FOLDER, tmp_path))
    # Another release of torch may sum in another order.
    assert max(abs(a - b) for a, b in zip(stored, anew, strict=True)) < 1e-4


def test_right_answers_pass_in_every_precision() -> None:
    for precision in ("float32", "bfloat16", "q8_0", "unheard_of"):
        assert judge(MODEL, REQUESTS, right_answers(), precision, "b").difference < 1e-5


@pytest.mark.parametrize("precision", ["f32", "float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("wrong", [{"shift": 1}, {"temperature": 1.0}, {"temperature": 0.6}])
def test_a_neighbours_figures_and_a_forgotten_temperature_fail_in_every_precision(
    precision: str, wrong: dict[str, float]
) -> None:
    with pytest.raises(SelfTestFailed, match=rf"self-test of b in {precision}: log-probabilities differ .* by \d"):
        judge(MODEL, REQUESTS, right_answers(**wrong), precision, "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, logprobs=array("f", [math.nan, -1.0])), "a log-probability of nan"),
        (lambda c: replace(c, logprobs=array("f", [0.5, -1.0])), "a log-probability of 0.5"),
        (lambda c: replace(c, logprobs=array("f", [-1.0])), "2 tokens with 1 log-probabilities"),
        (lambda c: replace(c, token_ids=array("I"), logprobs=array("f")), "0 tokens with 0"),
        (lambda c: replace(c, token_ids=array("I", [63, 1])), "token id 63 outside"),
        (lambda c: replace(c, token_ids=array("I", [MODEL.end_token_id, 1])), "does not end with its end token"),
        (lambda c: replace(c, token_ids=c.token_ids[:1], logprobs=c.logprobs[:1]), "does not end with its end"),
        (lambda c: replace(c, finish_reason=FinishReason.STOP), "did not end with the end token says stop"),
        (
            lambda c: FailedRequest(request_id=c.request_id, code=FailureCode.NON_FINITE, reason="all is NaN"),
            "a request failed: all is NaN",
        ),
    ],
)
def test_each_fault_is_named(change: Callable[[Completion], Outcome], message: str) -> None:
    """Field case 78."""
    with pytest.raises(SelfTestFailed, match=message):
        judge(MODEL, REQUESTS, first(change), "float32", "b")


def test_seeds_that_change_nothing_fail() -> None:
    same = right_answers()[5]
    assert isinstance(same, Completion)
    answers: list[Outcome] = []
    for request in REQUESTS:
        prompt = MODEL.prompts.index(request.prompt_ids)
        logprobs = array("f", MODEL.expected_logprobs(prompt, same.token_ids, request.temperature))
        answers.append(replace(same, request_id=request.request_id, logprobs=logprobs))
    with pytest.raises(SelfTestFailed, match="32 seeds gave only 1 different first tokens"):
        judge(MODEL, REQUESTS, answers, "float32", "b")


@pytest.mark.anyio
async def test_the_torch_engine_passes_and_one_that_places_tokens_wrongly_does_not() -> None:
    (finding,) = await run_self_test(InlineBackend(TorchEngine(TorchOptions(batch=8))), TorchOptions())
    assert finding.difference < 1e-4 and finding.tokens > 40
    wrong = replace(MODEL, config={**MODEL.config, "rope_theta": 1000.0})
    with pytest.raises(SelfTestFailed, match=r"self-test of torch .* in float32: log-probabilities differ"):
        await run_self_test(InlineBackend(TorchEngine(TorchOptions(batch=8))), TorchOptions(), wrong)


class ScoresTheNext(TorchEngine):
    """Gives each id the log-probability of the one before it."""

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        return [values[-1:] + values[:-1] for values in super().score(request)]


@pytest.mark.anyio
async def test_scores_of_given_ids_are_compared_too() -> None:
    with pytest.raises(SelfTestFailed, match="log-probabilities of given ids differ from the expected ones by"):
        await run_self_test(InlineBackend(ScoresTheNext(TorchOptions(batch=8))), TorchOptions())


@pytest.mark.anyio
async def test_a_model_that_cannot_be_loaded_is_a_failed_self_test() -> None:
    wrong = replace(MODEL, config={**MODEL.config, "num_hidden_layers": 3})
    with pytest.raises(SelfTestFailed, match="lacks"):
        await run_self_test(InlineBackend(TorchEngine()), TorchOptions(), wrong)


def test_a_verdict_holds_for_one_build_on_one_device_with_one_interpreter(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    assert not verdicts.passed(REPORT, "python")
    verdicts.note(REPORT, "python", ())
    assert Verdicts(tmp_path).passed(REPORT, "python")
    assert not verdicts.passed(REPORT, "another python")
    for change in ({"build": "torch 1.1"}, {"device": "gpu"}, {"precision": "bfloat16"}, {"backend": "vllm"}):
        assert not verdicts.passed(REPORT.model_copy(update=change), "python")
    # The size of a batch does not change what is computed.
    assert verdicts.passed(REPORT.model_copy(update={"batch": 1}), "python")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_damaged_file_of_verdicts_costs_a_test_and_no_more(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "self-tests.json").write_bytes(content)
    verdicts = Verdicts(tmp_path)
    assert not verdicts.passed(REPORT, "python")
    verdicts.note(REPORT, "python", ())
    assert verdicts.passed(REPORT, "python")


def test_old_verdicts_make_room(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    for i in range(130):
        verdicts.note(REPORT.model_copy(update={"build": str(i)}), "python", ())
    assert len(json.loads((tmp_path / "self-tests.json").read_text())) == 100
    assert verdicts.passed(REPORT.model_copy(update={"build": "129"}), "python")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_child_is_tested_once_for_each_build(tmp_path: Path) -> None:
    lines: list[str] = []
    verdicts = Verdicts(tmp_path)
    for options in (TorchOptions(batch=4, threads=1), TorchOptions(batch=4, threads=1), ScriptedOptions()):
        with anyio.fail_after(120):
            async with open_tested(options, log_path=tmp_path / "log", verdicts=verdicts, emit=lines.append, nice=0):
                pass
    assert len(lines) == 2
    assert lines[0].startswith("testing torch ") and "log-probabilities differ by at most" in lines[1]
