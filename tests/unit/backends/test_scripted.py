"""The scripted engine: predictable content, times by a clock, no torch."""

import subprocess
import sys
from pathlib import Path
from statistics import mean

from echo_node.backends.base import PolicyFiles
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine, script
from echo_swarm.clock import ManualClock
from tests.unit.backends.support import request


def policy(**overrides: object) -> PolicyFiles:
    return PolicyFiles(
        **{
            "policy_version": 0,
            "artifact": Path(__file__),
            "artifact_digest": bytes(32),
            "model_config_json": "{}",
            "end_token_ids": (7,),
            "vocabulary_size": 61,
            "max_prompt_tokens": 32,
            "max_completion_tokens": 64,
            **overrides,
        }
    )


def test_content_follows_from_seed_prompt_and_version_alone() -> None:
    options = ScriptedOptions()
    one = script(request(0, seed=5), policy(), options)
    assert one == script(request(0, seed=5), policy(), options.model_copy(update={"mean_s": 9.0, "batch": 2}))
    others = [
        script(request(0, seed=6), policy(), options),
        script(request(0, seed=5, prompt_ids=(1,)), policy(), options),
        script(request(0, seed=5), policy(policy_version=1), options),
    ]
    assert all(other.token_ids != one.token_ids for other in others)


def test_lengths_and_times_have_the_means_that_were_asked_for() -> None:
    options = ScriptedOptions(batch=1000, mean_s=0.2, sigma=0.5, length=20, length_sigma=0.3)
    lengths = [len(script(request(i, max_tokens=1000), policy(), options).token_ids) for i in range(1000)]
    assert abs(mean(lengths) - 20) < 1
    clock = ManualClock()
    engine = ScriptedEngine(options, now=clock.monotonic_s)
    engine.load(policy())
    engine.submit([request(i) for i in range(1000)])
    start_s, times = clock.monotonic_s(), []
    while engine.pending:
        clock.advance(engine.wait_s())
        times += [clock.monotonic_s() - start_s] * len(engine.step())
    assert abs(mean(times) - 0.2) < 0.02


def test_no_more_than_a_batch_runs_at_once() -> None:
    clock = ManualClock()
    engine = ScriptedEngine(ScriptedOptions(batch=3, mean_s=1.0, sigma=0.0), now=clock.monotonic_s)
    engine.load(policy())
    engine.submit([request(i) for i in range(7)])
    finished: list[int] = []
    while engine.pending:
        engine.step()
        clock.advance(1.0)
        finished.append(len(engine.step()))
    assert finished == [3, 3, 1]


def test_it_needs_no_torch() -> None:
    code = "import sys, echo_node.backends.serve, echo_node.backends.scripted, echo_node.hardware as h; h.probe()\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
