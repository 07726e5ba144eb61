"""A backend that has passed its self-test, on this machine, in this build: once, and remembered.

    start_backend ──► report ──► Verdicts: passed before? ── yes ──► to the node
                                                          └─ no ──► self-test ── passed ──► remember ──► to the node
                                                                              └─ failed ──► SelfTestFailed: no join

A failure is not remembered: the next join tests again.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from echo_node.backends.child import ChildBackend, Patience, start_backend
from echo_node.backends.options import EngineOptions, ScriptedOptions
from echo_node.backends.self_test import Finding, run_self_test
from echo_node.machine import cpu_flags
from echo_swarm.errors import BackendFailed
from echo_swarm.work import BackendReport

FILE_NAME = "self-tests.json"
MAX_FILE_BYTES = 1 << 20
MAX_VERDICTS = 100
"""Kept, newest last; a key changes with each build."""
SELF_TEST_S = 900.0
"""For the whole self-test. A backend that compiles at its first load takes minutes."""
_EDITION = 1
"""Of the self-test: another number asks for a new one of every backend."""


class Verdicts:
    """Which builds passed on this machine; a small file in the state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME

    def passed(self, report: BackendReport, python: str) -> bool:
        """Whether this build, on this machine, has passed."""
        return _key(report, python) in self._read()

    def note(self, report: BackendReport, python: str, findings: tuple[Finding, ...]) -> None:
        """Remember that it passed. A file that cannot be written costs another self-test, and nothing else."""
        known = self._read()
        known[_key(report, python)] = {
            "build": report.build,
            "device": report.device,
            "differences": {finding.precision: finding.difference for finding in findings},
        }
        newest = dict(list(known.items())[-MAX_VERDICTS:])
        temporary = self._path.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(newest, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as e:
            print(f"the verdict of the self-test cannot be kept in {self._path}: {e.strerror}", file=sys.stderr)

    def _read(self) -> dict[str, object]:
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                return {}
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _key(report: BackendReport, python: str) -> str:
    """Return what changes whenever another test is due: build, device, precision, interpreter, processor."""
    parts = (_EDITION, report.backend, report.build, report.device, report.precision, python)
    machine = (platform.machine(), *cpu_flags())
    return hashlib.sha256(json.dumps((parts, machine)).encode()).hexdigest()[:32]


@asynccontextmanager
async def open_tested(
    options: EngineOptions,
    *,
    log_path: Path,
    verdicts: Verdicts,
    emit: Callable[[str], None],
    python: str = sys.executable,
    patience: Patience | None = None,
    nice: int = 10,
) -> AsyncGenerator[ChildBackend]:
    """Run a backend for the length of the block, after its self-test if this build was not yet tested here.

    Raises:
        SelfTestFailed: it computes something else than it should.
        BackendFailed: it does not start, or ended.

    """
    async with start_backend(options, log_path=log_path, python=python, patience=patience, nice=nice) as backend:
        report = backend.report
        # A scripted engine computes nothing that could be wrong.
        if not isinstance(options, ScriptedOptions) and not verdicts.passed(report, python):
            emit(f"testing {report.build} ({report.device}) on a tiny known model; once for each build")
            try:
                with anyio.fail_after(SELF_TEST_S):
                    findings = await run_self_test(backend, options)
            except TimeoutError as e:
                raise BackendFailed(f"the self-test of {report.build} took more than {SELF_TEST_S:.0f} s") from e
            emit(f"self-test passed: {describe(findings)}")
            await to_thread.run_sync(verdicts.note, report, python, findings)
        yield backend


def describe(findings: tuple[Finding, ...]) -> str:
    """Return the differences in words."""
    return "log-probabilities differ by at most " + " and ".join(
        f"{finding.difference:.1g} in {finding.precision}" for finding in findings
    )
