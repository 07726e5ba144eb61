"""`echo-node doctor`: can this machine take part, with which backend, and what to do if it cannot.

local checks ─► libp2p helper ─► with an invite: the run ─► survey ─► each backend in its child ─► Report ─► one verdict
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from rich.console import Console
from rich.text import Text

from echo_node.activity import Activity
from echo_node.backends.options import parse_options, read_option, split_option
from echo_node.backends.survey import Survey, everywhere, survey
from echo_node.backends.tested import Verdicts
from echo_node.bare_errors import bare_errors
from echo_node.checks import MIN_FREE_BYTES, VERSIONS_HELD, Check, check_helper, local_checks
from echo_node.fit import BackendChoice
from echo_node.hardware import ORDER, choose, file_bytes
from echo_node.hosts import open_network, peers_of
from echo_node.introduction import learn_head, learn_run
from echo_node.machine import Machine, cpu_flags, probe
from echo_node.trial import BackendCard, examine
from echo_swarm.clock import SystemClock
from echo_swarm.errors import BackendFailed, EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.manifest import CheckpointManifest, RunManifest
from echo_swarm.succession import RunKeys, Succession, day

BUILT_IN = RunManifest(
    protocol=1,
    run_id="0" * 32,
    name="a model like SmolLM2-135M",
    created_at=0.0,
    publisher_key=bytes(32),
    mode="async",
    max_staleness=1,
    model_config_json=json.dumps(
        {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"vocab_size": 49_152}
    ),
    parameters=134_515_008,
    vocabulary_size=49_152,
    end_token_ids=(2,),
    max_prompt_tokens=512,
    max_completion_tokens=512,
    environment="none",
)
"""What is fitted without an invite."""
_WIDTH = len("libp2p helper")
PATIENCE_S = 15.0
"""For the run of an invite to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a person wants to know."""

    state_dir: Path
    invite: Invite | None = None
    backend: str = "auto"
    python: str = sys.executable
    start: bool = True
    """Start each backend that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found."""

    machine: Machine
    flags: tuple[str, ...]
    model: str
    checks: tuple[Check, ...]
    backends: tuple[BackendCard, ...]
    chosen: BackendChoice | None
    """What `join` would take; None when nothing suits."""
    error: EchoError | None
    """The first thing that stands in the way of a join."""
    provisional: bool = False
    """No version of a run was looked at: what a run publishes may make `auto` choose otherwise."""

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        machine = {**asdict(self.machine), "cpu_flags": self.flags}
        checks = [{"name": c.name, "ok": c.ok, "text": c.text} for c in self.checks]
        backends = [{**asdict(card), "usable": card.usable} for card in self.backends]
        chosen = self.chosen and {"backend": self.chosen.name, "text": self.chosen.text, "reasons": self.chosen.reasons}
        return {
            "ok": self.error is None,
            "machine": machine,
            "model": self.model,
            "checks": checks,
            "backends": backends,
            "chosen": chosen,
            "provisional": self.provisional,
        }


def doctor(question: Question, console: Console, *, as_json: bool) -> None:
    """Look at everything and print each finding as it is known; what is looked at now stands on stderr.

    Raises:
        EchoError: what stands in the way of a join, the first of several.

    """

    def tell(line: str) -> None:
        if not as_json:
            print(f"{line} …", file=sys.stderr, flush=True)

    def show(found: list[str]) -> None:
        if not as_json:
            for line in found:
                console.print(Text(line), soft_wrap=True)

    with bare_errors():
        report = anyio.run(_look, question, tell, show)
    if as_json:
        console.print_json(json.dumps(report.to_json()))
    if report.error is not None:
        raise report.error


async def _look(question: Question, tell: Callable[[str], None], show: Callable[[list[str]], None]) -> Report:
    tell("looking at this machine")
    machine = await to_thread.run_sync(probe)
    show(_machine_lines(machine, cpu_flags()))
    checks, run, head = await _checks(question, tell)
    show([*map(_check_line, checks), ""])
    named = split_option(question.backend)[0] != "auto"
    found = await to_thread.run_sync(survey if named else everywhere, question.python)
    model = run or BUILT_IN
    show([f"backends, for {model.name}:"])
    cards = await _cards(question, found, model, machine, head, tell, show)
    chosen, error = None, next((check.error for check in checks if check.error), None)
    try:
        chosen = choose(question.backend, model, machine, python=question.python, survey=found, head=head)
        card = next((card for card in cards if card.name == chosen.name), None)
        if card is not None and card.problem:
            raise BackendFailed(f"the backend that join would take, {card.name}, cannot be used: {card.problem}")
    except EchoError as e:
        error = error or e
    report = Report(
        machine=machine,
        flags=cpu_flags(),
        model=model.name,
        checks=tuple(checks),
        backends=tuple(cards),
        chosen=chosen,
        error=error,
        provisional=head is None and not named,
    )
    show(_choice_lines(report))
    return report


async def _checks(
    question: Question, tell: Callable[[str], None]
) -> tuple[list[Check], RunManifest | None, CheckpointManifest | None]:
    tell("starting the libp2p helper")
    helper = await check_helper()
    run, head, reached = None, None, []
    if question.invite is not None and helper.ok:
        tell("asking the run")
        try:
            run, head, keys = await _ask_run(question.invite)
            version = "no version yet" if head is None else f"version {head.policy_version}"
            reached = [Check(name="run", text=f"{run.name}: {version}, {run.parameters:,} parameters")]
            if (gone := keys.after(question.invite.key)) is not None:
                reached.append(Check(name="invite", text=_of_old_key(gone, keys)))
        except EchoError as e:
            reached = [Check(name="run", text=str(e), error=e)]
    largest = max((artifact.size_bytes for artifact in head.artifacts), default=0) if head else 0
    needed = max(MIN_FREE_BYTES, (VERSIONS_HELD + 1) * largest)
    issued_at = head.issued_at if head else 0.0
    local = await to_thread.run_sync(lambda: local_checks(question.state_dir, needed_bytes=needed, issued_at=issued_at))
    return [*local, helper, *reached], run, head


def _of_old_key(gone: Succession, keys: RunKeys) -> str:
    return (
        f"its key was replaced on {day(gone.made_at)}, and the run is found under {keys.coordinator}; the invite still "
        "works, but only a fresh one is safe from whoever may have the old key"
    )


async def _ask_run(invite: Invite) -> tuple[RunManifest, CheckpointManifest | None, RunKeys]:
    clock = SystemClock()
    with bare_errors():
        # An identity of its own: looking must not disturb the node that takes part.
        async with open_network(Identity.generate(), invite, outbound_only=True) as network:
            activity = Activity(clock, lambda line: None)
            following = network.following
            run = await learn_run(
                network.host,
                invite,
                clock=clock,
                activity=activity,
                patience_s=PATIENCE_S,
                peers=peers_of(network, invite, clock),
                following=following,
            )
            head = await learn_head(network.host, invite, clock=clock, keys=following.keys)
            return run.message, head, following.keys


async def _cards(
    question: Question,
    found: Survey,
    run: RunManifest,
    machine: Machine,
    head: CheckpointManifest | None,
    tell: Callable[[str], None],
    show: Callable[[list[str]], None],
) -> list[BackendCard]:
    named, given, _ = read_option(question.backend, elsewhere=True)
    cards: list[BackendCard] = []
    with tempfile.TemporaryDirectory(prefix="echo-doctor-") as folder:
        asked, settings = split_option(question.backend)
        for name in ORDER if asked == "auto" else [name for name in ORDER if name == named]:
            options = parse_options(name, settings) if asked == "auto" else given
            if question.start and not found[name].missing:
                tell(f"trying {name}, its self-test and its speed")
            cards.append(
                await examine(
                    name,
                    options,
                    found[name],
                    run,
                    machine,
                    log_path=Path(folder) / f"{name}.log",
                    # A folder that is not there yet is the first join's to make.
                    verdicts=Verdicts(question.state_dir) if question.state_dir.is_dir() else None,
                    start=question.start,
                    file_bytes=file_bytes(options, head),
                )
            )
            show([_card_line(cards[-1])])
    return cards


def lines(report: Report) -> list[str]:
    """Return the report for people."""
    out = [*_machine_lines(report.machine, report.flags), *map(_check_line, report.checks)]
    out += ["", f"backends, for {report.model}:", *map(_card_line, report.backends)]
    return out + _choice_lines(report)


def _machine_lines(machine: Machine, flags: tuple[str, ...]) -> list[str]:
    return [f"machine   {machine.describe()}", f"          CPU: {' '.join(flags) or 'flags unknown'}", ""]


def _check_line(check: Check) -> str:
    return f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{_WIDTH}}  {check.text}"


def _card_line(card: BackendCard) -> str:
    mark = "ok  " if card.usable else ("-   " if not card.versions else "FAIL")
    return f"{mark}  {card.name:<{_WIDTH}}  {card.text()}"


def _choice_lines(report: Report) -> list[str]:
    if report.chosen is None:
        return [""]
    out = ["", f"join would take {report.chosen.text}", *(f"  {reason}" for reason in report.chosen.reasons)]
    if report.provisional:
        out.append("  No version of a run was looked at; the files that a run publishes can change this choice.")
        out.append("  For a certain run: echo-node doctor INVITE")
    return out
