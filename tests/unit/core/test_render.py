"""What a person reads of a run's status, at the width of an ordinary terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from echo_swarm.render import counts, duration, render_run_status, size, sparkline
from echo_swarm.status import RunStatus


def node(**changes: Any) -> dict[str, Any]:
    return {
        "peer_id": "12D3KooWNweveGDLMrPDdu3jrEL2sSMzaP4n4m32GXoTtUyCgovv",
        "role": "inference",
        "live": True,
        "last_seen_s": 2.0,
        "backend": "torch",
        "precision": "float32",
        "device": "cpu (8 threads)",
        "held_version": 12,
        "accepted": 700,
        "tokens_per_s": 812.0,
        "state": "sampling with version 12",
        "outbound_only": False,
        **changes,
    }


def shown(*, width: int = 100, **changes: Any) -> str:
    values = {
        "run_id": "ab" * 16,
        "name": "sums",
        "mode": "async",
        "max_staleness": 2,
        "state": "running",
        "policy_version": 12,
        "version_age_s": 65.0,
        "updates": 12,
        "updates_planned": 48,
        "trainer": {"state": "no_nodes", "detail": "no inference node is connected", "since_s": 70.0},
        **changes,
    }
    console = Console(width=width, file=io.StringIO())
    console.print(render_run_status(RunStatus.model_validate(values)))
    return console.file.getvalue()


def test_the_first_line_names_run_state_version_and_its_age():
    assert shown().splitlines()[0].strip() == (
        "sums (abababab) running · async, max staleness 2 · version 12, 1 min 5 s old · 12 of 48 updates"
    )


def test_a_wait_is_told_in_words_with_its_length():
    assert "no nodes for 1 min 10 s: no inference node is connected" in shown()


def test_without_nodes_there_is_a_sentence_and_no_empty_table():
    assert "no node has joined yet" in shown() and "tok/s" not in shown()


def test_nodes_are_summed_up_by_role_backend_and_version_the_living_first_in_the_table():
    other = node(peer_id="12D3KooWother0000", backend="scripted", device="none", held_version=11, outbound_only=True)
    gone = node(peer_id="12D3KooWgone00000", live=False, last_seen_s=600.0)
    text = shown(nodes=[gone, node(), other], width=200)
    assert "2 inference live, 1 gone" in text and "1 outbound only" in text
    assert "1 × torch float32 on cpu (8 threads), 1 × scripted float32 on none" in text
    assert "holding v12: 1, v11: 1" in text
    lines = text.splitlines()
    assert "(gone)" in lines[-1] and "10 min ago" in lines[-1] and "sampling" not in lines[-1]


def test_seeders_have_a_table_of_their_own_with_what_they_served():
    seeder = node(peer_id="12D3KooWseeder000", role="seeder", backend="", bytes_served=2_500_000_000, held_version=9)
    lines = shown(nodes=[seeder, node()], width=200).splitlines()
    (row,) = [number for number, line in enumerate(lines) if "eeder000" in line]
    assert "2.5 GB" in lines[row] and "tok/s" not in lines[row - 1]
    assert "1 seeder" in shown(nodes=[seeder, node()], width=200)


def test_a_node_takes_one_line_of_an_ordinary_terminal():
    rows = [line for line in shown(nodes=[node()]).splitlines() if "TtUyCgovv"[-8:] in line]
    assert len(rows) == 1 and "sampling with version 12" in rows[0]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_header_and_no_word_is_cut_whatever_the_width(width: int):
    rejected = {"stale": 31, "out_of_vocabulary": 2}
    peers = [node(rejected=rejected, accepted=123_456, held_version=1_000), node(live=False, last_seen_s=11_400.0)]
    text = shown(nodes=peers, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    header = next(line.split() for line in text.splitlines() if "tok/s" in line and "doing" in line)
    for words in ("role", "inference", "backend", "torch", "version", "1000"):
        assert words in text, "moved, and not lost"
    titles = ["node", "role", "backend", "version", "seen", "tok/s", "accepted", "rejected", "doing"]
    assert header == [title for title in titles if title in header] and len(header) >= 6
    assert header == titles or width < 140
    for words in ("123456", "3 h 10 min ago", "(gone)", "stale 31", "out_of_vocabulary"):
        assert words in text
    assert text.count("…") == 2, "only what begins a shortened peer id"


def test_the_last_column_of_the_classes_is_whole_on_an_ordinary_terminal():
    measured = {"backend": "llama_cpp", "precision": "q8_0", "peers": 3, "measured": 2, "probes": 9, "version": 11}
    gaps = {"gap_mean": 0.0123, "gap_max": 0.2, "gap_bias": -0.004, "trained_gap": 0.011}
    trend = [[version, 0.01] for version in range(8)]
    text = shown(classes=[{**measured, **gaps, "trend": trend}], width=80)
    row = next(line for line in text.splitlines() if "llama_cpp q8_0" in line)
    assert row.split()[-1] == "1.1e-02" and "2.0e-01" in row
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_waits_for_a_node_is_not_said_to_be_sampled():
    buffer = {"in_flight": 40, "capacity": 48}
    assert "40/48 groups: 40 waiting for a node" in shown(buffer=buffer)
    assert "40 waiting for a node" in shown(buffer=buffer, nodes=[node(live=False)])
    assert "40 being sampled" in shown(buffer=buffer, nodes=[node()])


def test_rejections_stand_with_their_total_and_reasons_the_largest_first():
    text = shown(accepted=90, rejected={"late": 1, "stale": 3})
    assert "90 accepted, 4 rejected (stale 3, late 1)" in text
    assert "none rejected" in shown(accepted=90)


def test_the_first_evaluation_stays_visible_beside_the_last():
    evaluations = [{"policy_version": v, "accuracy": v / 1000, "prompts": 9} for v in range(0, 200, 10)]
    line = next(line for line in shown(evaluations=evaluations).splitlines() if "evaluation" in line)
    assert "v0: 0.000  …  v150: 0.150" in line and line.strip().endswith("v190: 0.190")


def test_streams_that_were_ended_stand_with_their_service_and_cause_and_only_if_there_were_any():
    quiet = {"work": {"crowded_streams": 0}, "pieces": {}}
    assert "streams ended" not in shown(streams=quiet) and "streams ended" not in shown()
    text = shown(
        width=200, streams={"work": {"crowded_streams": 31, "malformed_streams": 2}, "pieces": {"evicted_streams": 1}}
    )
    assert "work: 31 too slow while memory was full, 2 broke the protocol" in text
    assert "; pieces: 1 not in use while places were full" in text


def test_warnings_are_marked():
    assert "! mind the gap" in shown(warnings=["mind the gap"])


def test_figures_have_two_units_at_most():
    seconds = (0.4, 24.2, 59.9, 61, 300, 599, 600, 3_599, 3_600, 11_400, 90_000)
    assert [duration(s) for s in seconds] == [
        *("0 s", "24 s", "59 s", "1 min 1 s", "5 min", "9 min 59 s", "10 min", "59 min"),
        *("1 h", "3 h 10 min", "1 d 1 h"),
    ]
    assert [size(n) for n in (999, 1_500, 2_500_000, 3 * 10**12)] == ["999 B", "1.5 kB", "2.5 MB", "3.0 TB"]
    assert counts({"a": 0, "b": 2}) == "b 2"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█" and sparkline([1.0, 1.0]) == "▁▁"


def test_words_of_peers_are_no_markup_and_no_control_sequences():
    words = "[/x] [bold]y \x1b[2J"
    text = shown(
        width=400,
        name=words,
        nodes=[node(state=words, backend=words, role=words, device=words, rejected={words: 1})],
        trainer={"state": words, "detail": words},
        rejected={words: 2},
        dropped_groups={words: 3},
        waiting_s={words: 4.0},
        warnings=[words],
    )
    assert text.count("[/x] [bold]y ?[2J") >= 10 and "\x1b" not in text


def test_each_class_of_backends_shows_how_far_it_is_from_the_trainer():
    measured = {
        "backend": "llama_cpp",
        "precision": "q8_0",
        "peers": 3,
        "measured": 2,
        "set_aside": 1,
        "probes": 9,
        "version": 11,
        "gap_mean": 0.0123,
        "gap_max": 0.2,
        "gap_bias": -0.004,
        "trend": [[9, 0.01], [10, 0.02], [11, 0.0123]],
        "trained_gap": 0.011,
    }
    plain = {"backend": "vllm", "precision": "bfloat16", "peers": 1}
    text = shown(classes=[measured, plain], nodes=[node(set_aside=True, probe="other_version")], width=120)
    line = next(line for line in text.splitlines() if "llama_cpp q8_0" in line)
    assert line.split() == ["llama_cpp", "q8_0", "2/3", "1", "11", "1.2e-02", "2.0e-01", "-4.0e-03", "▁█▂", "1.1e-02"]
    assert "not measured" in next(line for line in text.splitlines() if "vllm bfloat16" in line)
    assert "set aside: other version" in text
    narrow = shown(classes=[measured, plain], width=60)
    assert "1.2e-02" in narrow and "bias" not in narrow
    assert "gap to trainer" not in shown(classes=[plain])


def transfers(version: int, **changes: Any) -> dict[str, Any]:
    return {
        "policy_version": version,
        "timed": True,
        "nodes": 12,
        "had": 12,
        "half_s": 64.0,
        "all_s": 125.0,
        "told": 13,
        "bytes_coordinator": 1_370_000_000,
        "bytes_peers": 123_900_000_000,
        "bytes_mirrors": 999_900_000,
        "bytes_deltas": 345_600_000,
        "bytes_disk": 12_300_000,
        "bytes_served": 1_400_000_000,
        **changes,
    }


def test_the_last_five_versions_are_a_table_that_fits_80_columns():
    lines = shown(width=80, transfers=[transfers(version) for version in range(123, 110, -1)]).splitlines()
    table = [line for line in lines if line.startswith("v1")]
    assert [line.split()[0] for line in table] == ["v123", "v122", "v121", "v120", "v119"]
    assert "v123      12/12 1 min 4 s 2 min 5 s      1.4 GB 123.9 GB 999.9 MB 345.6 MB" in table[0]
    assert all(len(line) <= 80 for line in lines)
    assert "1.4 GB" in shown(width=120, transfers=[transfers(1)]) and "served" in shown(
        width=120, transfers=[transfers(1)]
    )


def test_a_version_of_before_the_restart_shows_no_times():
    old = transfers(3, timed=False, nodes=0, had=0, half_s=None, all_s=None, bytes_served=None)
    text = shown(width=80, transfers=[transfers(4), old])
    refused = shown(transfers=[transfers(4)], transfers_refused={"too_many_bytes": 3})
    assert "not counted, since it cannot be: too_many_bytes 3" in refused
    assert "v3 (r)" in text and "before the coordinator's restart" in text
    assert "restart" not in shown(width=80, transfers=[transfers(4)])


def test_the_base_of_adapters_is_shown_beside_the_last_versions():
    text = shown(width=80, transfers=[*[transfers(v) for v in range(20, 10, -1)], transfers(0, is_base=True)])
    assert "v0 + base" in text and "v15 " not in text


def test_each_liar_is_named_once_with_who_says_so_and_a_mirror_by_its_address():
    peer = "12D3KooWNweveGDLMrPDdu3jrEL2sSMzaP4n4m32GXoTtUyCgovv"
    lie = {"source": peer, "reason": "wrong_bytes", "named_by": 3, "lie": True}
    mirror = {"source": "https://files.example/\x1b[2J", "reason": "broken_promise", "named_by": 1, "lie": True}
    slow = {"source": peer[:-1] + "x", "reason": "hung_up", "named_by": 2}
    both = [transfers(5, faults=[lie, mirror, slow]), transfers(4, faults=[{**lie, "named_by": 1}])]
    both += [transfers(v) for v in (3, 2, 1)] + [transfers(0, faults=[lie, {**slow, "named_by": 9}])]
    lines = shown(width=80, transfers=both).splitlines()
    assert [line.strip() for line in lines if line.startswith(("liar", "failed"))] == [
        "liar: …UyCgovv wrong bytes, named by 3 (v0, v4, v5)".replace("…U", "…tU"),
        "liar: https://files.example/?[2J broken promise, named by 1 (v5)",
        "failed: …tUyCgovx hung up, named by 2 (v5)",
    ]
