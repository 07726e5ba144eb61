"""One backend looked at closely: installed, fits, starts, computes right, and how fast. All in its own child.

survey ─► fit ─► start_backend ─► self-test on the known model ─► a short trial with it ─► BackendCard
"""

import time
from dataclasses import dataclass
from pathlib import Path

import anyio

from echo_node.backends.base import Backend, Completion, GenerationRequest
from echo_node.backends.child import start_backend
from echo_node.backends.known_model import MAX_COMPLETION_TOKENS, KnownModel
from echo_node.backends.options import EngineOptions
from echo_node.backends.self_test import Finding, run_self_test
from echo_node.backends.survey import Installed
from echo_node.backends.tested import SELF_TEST_S, Verdicts, describe
from echo_node.fit import fit
from echo_node.machine import Machine, gib
from echo_swarm.errors import BackendFailed, EchoError
from echo_swarm.extras import install_command
from echo_swarm.manifest import RunManifest

TRIAL_REQUESTS = 32
TRIAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCard:
    """What is known of one backend after looking at it. What was not reached is None or empty."""

    name: str
    versions: str = ""
    """Empty: not installed."""
    fits: bool | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    batch: int | None = None
    build: str = ""
    device: str = ""
    findings: tuple[Finding, ...] = ()
    """Of the self-test, when it passed."""
    tokens_per_s: float | None = None
    """With the tiny known model: what the engine itself costs, not what the run's model will."""
    problem: str = ""
    """Why it cannot be used; empty when it can."""
    tried: bool = True
    """False: it was not started, since nobody wanted that."""

    @property
    def usable(self) -> bool:
        """Whether a node could join with it, as far as was looked."""
        return not self.problem

    def text(self) -> str:
        """Return all of it in one line."""
        parts = [self.versions, self.device]
        if self.needed_bytes is not None and self.available_bytes is not None:
            parts.append(f"needs {gib(self.needed_bytes)} of {gib(self.available_bytes)} with a batch of {self.batch}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tokens/s with a tiny model")
        if self.findings:
            parts.append(f"self-test passed: {describe(self.findings)}")
        parts.append(self.problem)
        return "; ".join(part for part in parts if part)


async def examine(
    name: str,
    options: EngineOptions,
    installed: Installed,
    run: RunManifest,
    machine: Machine,
    *,
    log_path: Path,
    verdicts: Verdicts | None,
    start: bool = True,
    file_bytes: int | None = None,
) -> BackendCard:
    """Look at one backend; `start` it too, if wanted. A passed self-test is noted in `verdicts`: no join repeats it."""
    if installed.missing:
        missing = " and ".join(installed.missing)
        problem = f"{missing} not installed; run: {install_command(name.replace('_', '-'))}"
        return BackendCard(name=name, problem=problem, tried=False)
    facts: dict[str, object] = {"name": name, "versions": installed.text, "tried": start}
    try:
        choice = fit(options, run, machine, fixed=False, file_bytes=file_bytes)
        options = choice.options
        facts |= {
            "fits": True,
            "needed_bytes": choice.needed_bytes,
            "available_bytes": choice.available_bytes,
            "batch": choice.batch,
        }
    except EchoError as e:
        # It is started all the same: whether it works is worth knowing, and the known model fits anywhere.
        facts |= {"fits": False, "problem": str(e)}
    if start:
        try:
            facts |= await _start(options, installed.python, log_path, verdicts)
        except BackendFailed as e:
            facts["problem"] = str(e)
    return BackendCard(**facts)  # pyright: ignore[reportArgumentType]


async def _start(options: EngineOptions, python: str, log_path: Path, verdicts: Verdicts | None) -> dict[str, object]:
    # Somebody waits for the answer: not at the low priority of a node.
    async with start_backend(options, log_path=log_path, python=python, nice=0) as backend:
        report = backend.report
        with anyio.move_on_after(SELF_TEST_S) as limit:
            findings = await run_self_test(backend, options)
            if verdicts is not None:
                await anyio.to_thread.run_sync(verdicts.note, report, python, findings)
            speed = await _tokens_per_s(backend)
            return {
                "build": report.build,
                "device": report.device,
                "findings": findings,
                "tokens_per_s": speed,
            }
    assert limit.cancelled_caught
    raise BackendFailed(f"{report.build} took more than {SELF_TEST_S:.0f} s for its self-test")


async def _tokens_per_s(backend: Backend) -> float | None:
    """Sample with what is loaded, the known model. None when it takes too long to be worth waiting for."""
    prompt = KnownModel.read().prompts[-1]
    requests = [
        GenerationRequest(
            request_id=1000 + i, prompt_ids=prompt, max_tokens=MAX_COMPLETION_TOKENS, temperature=1.0, seed=i
        )
        for i in range(TRIAL_REQUESTS)
    ]
    started_s, tokens = time.monotonic(), 0
    with anyio.move_on_after(TRIAL_S):
        await backend.submit(requests)
        for _ in requests:
            outcome = await backend.next_outcome()
            tokens += len(outcome.token_ids) if isinstance(outcome, Completion) else 0
        return tokens / (time.monotonic() - started_s)
    return None
