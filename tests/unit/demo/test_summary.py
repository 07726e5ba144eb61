"""What the demo promises, and that each broken promise is named."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo_coordinator.demo.summary import node_counters, render_summary, summarise
from echo_coordinator.run_folder import RunFolder
from echo_swarm.status import RunStatus

PEERS = ("12D3KooWAnnAnnAnnAnn", "12D3KooWBobBobBobBob")


def node(peer: str, **changes: Any) -> dict[str, Any]:
    return {
        "peer_id": peer,
        "role": "inference",
        "live": False,
        "last_seen_s": 1.0,
        "backend": "torch",
        "accepted": 100,
        "rejected": {"late": 2},
        **changes,
    }


def status(**changes: Any) -> RunStatus:
    kept = {
        "run_id": "a" * 32,
        "name": "demo",
        "mode": "async",
        "max_staleness": 2,
        "state": "finished",
        "trainer": {"state": "finished"},
        "updates": 48,
        "policy_version": 48,
        "nodes": [node(peer) for peer in PEERS],
        "accepted": 200,
        "rejected": {"late": 4},
        "staleness": {0: 50, 1: 100, 2: 50},
        "evaluations": [
            {"policy_version": 0, "accuracy": 0.2, "prompts": 256},
            {"policy_version": 48, "accuracy": 0.6, "prompts": 256},
        ],
        "model_parameters": 300_000,
        "trainer_busy_share": 0.9,
    }
    return RunStatus.model_validate({**kept, **changes})


def counters() -> dict[str, dict[str, int]]:
    return {peer: {"accepted": 100, "late": 2} for peer in PEERS}


def problems(seen: RunStatus, counted: dict[str, dict[str, int]] | None = None) -> list[str]:
    _, found = summarise(
        seen, counters() if counted is None else counted, started=2, wall_s=100.0, run=RunFolder(Path("run"))
    )
    return found


def test_a_demo_that_keeps_its_promises_has_no_problem_and_the_figures_that_were_promised():
    summary, found = summarise(status(), counters(), started=2, wall_s=100.0, run=RunFolder(Path("run")))
    assert found == []
    promised = {
        "evaluations", "updates", "nodes", "rejected", "staleness", "wall_s", "trainer_busy_share", "model_parameters",
    }  # fmt: skip
    assert promised <= summary.keys()
    assert {"peer_id", "backend", "accepted", "rejected"} <= summary["nodes"][0].keys()
    assert summary["evaluations"][0] == {"policy_version": 0, "accuracy": 0.2}
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"state": "stopped"}, "did not finish"),
        ({"updates": 39}, "39 updates, expected at least 40"),
        ({"evaluations": []}, "no evaluation"),
        ({"evaluations": [{"policy_version": v, "accuracy": v / 99, "prompts": 9} for v in (12, 48)]}, "of version 0"),
        (
            {"evaluations": [{"policy_version": v, "accuracy": v / 99, "prompts": 9} for v in (0, 36)]},
            "of 48, the last",
        ),
        (
            {
                "evaluations": [
                    {"policy_version": v, "accuracy": a, "prompts": 256} for v, a in ((0, 0.2), (12, 0.9), (48, 0.34))
                ]
            },
            "rose by 0.140",
        ),
        ({"staleness": {0: 1, 1: 1, 2: 1, 3: 1}}, "staleness 3, allowed 2"),
        ({"staleness": {0: 1, 2: 1}}, "no trajectory of staleness 1"),
        ({"nodes": [node(PEERS[0], accepted=0, rejected={}), node(PEERS[1])]}, "contributed nothing"),
        ({"nodes": [node(PEERS[0], accepted=101), node(PEERS[1])]}, "counted"),
        ({"nodes": [node(PEERS[0], rejected={"stale": 2}), node(PEERS[1])]}, "counted"),
        ({"nodes": [node(PEERS[0])]}, "1 of 2 nodes"),
        ({"nodes": []}, "0 of 2 nodes"),
        ({"accepted": 201}, "counted {'accepted': 201"),
        ({"rejected": {"late": 4, "stale": 1}}, "'stale': 1} in all"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, Any], named: str):
    found = problems(status(**changes))
    assert any(named in problem for problem in found), found


def test_a_node_that_left_no_summary_is_named():
    assert problems(status(), {PEERS[0]: counters()[PEERS[0]]}) == [
        "node …BobBobBob left no summary".replace("BobBobBob", PEERS[1][-8:])
    ]


def test_peers_that_only_watch_need_not_contribute():
    watcher = node("12D3KooWEveEveEveEve", role="observer", accepted=0, rejected={})
    assert problems(status(nodes=[*(node(peer) for peer in PEERS), watcher])) == []


def test_what_a_node_decided_by_itself_is_not_compared(tmp_path: Path):
    folder = tmp_path / "node-0" / "runs" / ("a" * 32)
    folder.mkdir(parents=True)
    written = {"peer_id": PEERS[0], "accepted": 5, "rejected": {"late": 1, "node_stale": 7}}
    (folder / "status.json").write_text(json.dumps(written))
    assert node_counters(tmp_path) == {PEERS[0]: {"accepted": 5, "late": 1}}


@pytest.mark.parametrize(("ok", "word"), [(True, "ok"), (False, "failed")])
def test_the_table_ends_with_the_verdict(ok: bool, word: str):
    summary, _ = summarise(status(), counters(), started=2, wall_s=100.0, run=RunFolder(Path("run")))
    console = Console(width=100, file=io.StringIO())
    console.print(render_summary({**summary, "ok": ok}))
    text = console.file.getvalue()
    assert text.strip().splitlines()[-1].split() == ["result", word]
    assert "v0: 0.200  v48: 0.600" in text


def test_the_summary_has_each_classs_mismatch() -> None:
    measured = {
        "backend": "torch",
        "precision": "float32",
        "peers": 2,
        "version": 48,
        "gap_mean": 2e-6,
        "gap_max": 1e-5,
    }
    plain = {"backend": "vllm", "precision": "bfloat16", "peers": 1}
    summary, _ = summarise(
        status(classes=[measured, plain]), counters(), started=2, wall_s=100.0, run=RunFolder(Path("run"))
    )
    assert summary["mismatch"]["torch/float32"]["gap_max"] == 1e-5
    assert summary["mismatch"]["vllm/bfloat16"]["gap_mean"] is None
    console = Console(width=120, file=io.StringIO())
    console.print(render_summary({**summary, "ok": True}))
    text = console.file.getvalue()
    assert "2.0e-06 nats a token from the trainer at version 48" in text and "not measured" in text
