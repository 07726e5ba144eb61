"""Whether a backend computes what it says it computes: its log-probabilities against stored ones, in its own child.

    KnownModel ──load──► backend ──32 completions of 2 tokens, two prompts, two temperatures──► compare ──► Finding
                 once for each file: safetensors, or GGUF F32 and Q8_0      └─ scored again, where it can score

A log-probability that belongs to the neighbouring position, lacks the temperature, or counts padding rows is off by far
more than any tolerance here. So is a completion that goes on after its end token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echo_node.backends.base import (
    Backend,
    CannotScore,
    Completion,
    GenerationRequest,
    LoadRefused,
    Outcome,
    ScoreRequest,
)
from echo_node.backends.known_model import KnownModel
from echo_node.backends.options import EngineOptions
from echo_swarm.errors import BackendFailed
from echo_swarm.manifest import ArtifactKind
from echo_swarm.trajectory import FinishReason

TEMPERATURES = (1.0, 0.6)
SEEDS = 8
"""Completions for each prompt and temperature."""
TOKENS = 2
"""As far as expectations are stored for whatever is sampled."""
TOLERANCES = {"float32": 1e-3, "f32": 1e-3, "float16": 0.05, "bfloat16": 0.4, "q8_0": 0.4}
"""Largest difference of a log-probability, by what the backend computes in or reads: three times what was measured.
The logits span 12 nats."""
WIDEST = 0.4
"""For a precision that is not named above."""
GGUF_FILES = ("f32", "q8_0")


class SelfTestFailed(BackendFailed):
    """The backend works, and is wrong: it must not sample for a run, and starting it again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one file went."""

    precision: str
    """What it was computed in."""
    difference: float
    """Largest |log-probability − expected|, nats."""
    tolerance: float
    tokens: int
    """Compared."""


async def run_self_test(
    backend: Backend, options: EngineOptions, model: KnownModel | None = None
) -> tuple[Finding, ...]:
    """Load the known model and compare. Leaves it loaded; load a version of the run after it.

    Raises:
        SelfTestFailed: with what is wrong, and by how much.
        BackendFailed: the backend ended.

    """
    model = model or KnownModel.read()
    kind = options.wanted().kind
    findings: list[Finding] = []
    for file in GGUF_FILES if kind is ArtifactKind.GGUF else ("",):
        try:
            await backend.load(model.files(kind, file))
        except LoadRefused as e:
            raise SelfTestFailed(f"self-test of {backend.report.build}: {e}") from e
        requests = list(_requests(model))
        await backend.submit(requests)
        outcomes = [await backend.next_outcome() for _ in requests]
        report = backend.report
        finding = judge(model, requests, outcomes, report.precision, report.build)
        scored = await _scored_difference(backend, model, outcomes, by_id={r.request_id: r for r in requests})
        if scored > finding.tolerance:
            raise SelfTestFailed(
                f"self-test of {report.build} in {report.precision}: log-probabilities of given ids differ from the "
                f"expected ones by {scored:.2g}, more than {finding.tolerance:g}"
            )
        findings.append(replace(finding, difference=max(finding.difference, scored)))
    return tuple(findings)


async def _scored_difference(
    backend: Backend, model: KnownModel, outcomes: Sequence[Outcome], by_id: dict[int, GenerationRequest]
) -> float:
    """Have the completions scored, as probes do; 0 for a backend that scores none. NaN or a wrong count is infinite."""
    temperature = TEMPERATURES[-1]
    made = [(by_id[o.request_id], o.token_ids) for o in outcomes if isinstance(o, Completion)]
    made = [(request, ids) for request, ids in made if request.temperature == temperature]
    items = tuple((request.prompt_ids, tuple(ids)) for request, ids in made)
    try:
        scores = await backend.score(ScoreRequest(items=items, temperature=temperature))
    except CannotScore:
        return 0.0
    if [len(values) for values in scores.logprobs] != [len(ids) for _, ids in made]:
        return math.inf
    worst = 0.0
    for (request, ids), values in zip(made, scores.logprobs, strict=True):
        expected = model.expected_logprobs(model.prompts.index(request.prompt_ids), ids, temperature)
        differences = [abs(a - b) for a, b in zip(expected, values, strict=True)]
        worst = max(worst, *(value if math.isfinite(value) else math.inf for value in differences))
    return worst


def judge(
    model: KnownModel, requests: Sequence[GenerationRequest], outcomes: Sequence[Outcome], precision: str, build: str
) -> Finding:
    """Compare what came back with what is expected. Raises SelfTestFailed."""
    tolerance = TOLERANCES.get(precision, WIDEST)
    by_id = {request.request_id: request for request in requests}
    worst, tokens, problem, drawn = 0.0, 0, "", set[int]()
    for outcome in outcomes:
        request = by_id.pop(outcome.request_id)
        problem = problem or _fault(model, outcome)
        if problem or not isinstance(outcome, Completion):
            break
        prompt = model.prompts.index(request.prompt_ids)
        expected = model.expected_logprobs(prompt, outcome.token_ids, request.temperature)
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, outcome.logprobs, strict=True)))
        tokens += len(expected)
        drawn.add(outcome.token_ids[0])
    if not problem and worst > tolerance:
        problem = f"log-probabilities differ from the expected ones by {worst:.2g}, more than {tolerance:g}"
    if not problem and len(drawn) < 3:
        problem = f"{len(requests)} seeds gave only {len(drawn)} different first tokens"
    if problem:
        raise SelfTestFailed(f"self-test of {build} in {precision}: {problem}")
    return Finding(precision=precision, difference=worst, tolerance=tolerance, tokens=tokens)


def _requests(model: KnownModel) -> Iterator[GenerationRequest]:
    request_id = 0
    for temperature in TEMPERATURES:
        for prompt in model.prompts:
            for _ in range(SEEDS):
                yield GenerationRequest(
                    request_id=request_id,
                    prompt_ids=prompt,
                    max_tokens=TOKENS,
                    temperature=temperature,
                    seed=request_id,
                )
                request_id += 1


def _fault(model: KnownModel, outcome: Outcome) -> str:
    """Return what is wrong with a completion beyond its figures; empty when nothing is."""
    if not isinstance(outcome, Completion):
        return f"a request failed: {outcome.reason}"
    ids = outcome.token_ids
    if not 1 <= len(ids) <= TOKENS or len(ids) != len(outcome.logprobs):
        return f"{len(ids)} tokens with {len(outcome.logprobs)} log-probabilities, {TOKENS} were asked for"
    if max(ids) >= model.vocabulary:
        return f"token id {max(ids)} outside the vocabulary of {model.vocabulary}"
    # First of all: a comparison with NaN says nothing.
    if bad := [value for value in outcome.logprobs if not (math.isfinite(value) and value <= 0)]:
        return f"a log-probability of {bad[0]}"
    ended = model.end_token_id in ids
    if model.end_token_id in ids[:-1] or (not ended and len(ids) < TOKENS):
        return "a completion does not end with its end token"
    if ended != (outcome.finish_reason is FinishReason.STOP):
        return (
            f"a completion that {'ended' if ended else 'did not end'} with the end token says {outcome.finish_reason}"
        )
    return ""
