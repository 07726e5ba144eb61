"""Option strings and the restart policy."""

import sys

import pytest

from echo_node.backends.options import ScriptedOptions, TorchOptions, parse_options, read_option, split_option
from echo_node.backends.restart import RestartPolicy
from echo_swarm.errors import BackendFailed, UsageError
from echo_swarm.extras import install_command


def test_an_option_string_becomes_typed_settings() -> None:
    name, values = split_option("scripted:mean_s=0.2,sigma=0.5,length=8,batch=16")
    assert parse_options(name, values) == ScriptedOptions(mean_s=0.2, sigma=0.5, length=8, batch=16)
    assert parse_options(*split_option("torch")) == TorchOptions()
    assert parse_options(*split_option("torch:isolate=true,device=cuda:1")) == TorchOptions(
        isolate=True, device="cuda:1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "jax",
            r"unknown backend 'jax'; there are: auto, torch \(installed\), llama_cpp \(.*\), .*scripted \(installed\)",
        ),
        ("torch:batch=0", "--backend torch: batch: '0' is not allowed, it must be 1 or more"),
        ("torch:bacth=1", "there is no setting 'bacth'; did you mean batch[?] There are: batch, device"),
        ("torch:batch", "write options as NAME:key=value"),
        ("torch:batch=1,batch=2", "each key once"),
        ("torch:precision=int3", "precision: 'int3' is not allowed, choose 'float32', 'bfloat16' or 'float16'"),
        ("torch:device=gpu", "device: 'gpu' is not allowed, choose auto, cpu, cuda, or one GPU such as cuda:1"),
    ],
)
def test_a_wrong_option_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(*split_option(text))


@pytest.mark.parametrize("text", ["auto", None, "torch:batch=4"])
def test_an_engine_that_is_not_installed_says_how_to_install_it(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_option(text)[0] == "torch"
    for module in ("transformers", "llama_cpp", "vllm"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    with pytest.raises(BackendFailed) as refused:
        read_option(text)
    assert install_command("torch") in str(refused.value)
    assert "torch (not installed), llama_cpp (not installed), vllm (not installed)" in str(refused.value)
    assert read_option("scripted:batch=3") == ("scripted", ScriptedOptions(batch=3), frozenset({"batch"}))


def test_delays_double_until_the_limit_of_failures() -> None:
    policy = RestartPolicy(limit=5, first_delay_s=1.0)
    assert [policy.failed(float(t)) for t in (0, 5, 10, 15, 20)] == [1.0, 2.0, 4.0, 8.0, None]
    assert policy.recent_failures == 5


def test_failures_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy(limit=3, window_s=100.0, first_delay_s=1.0)
    assert [policy.failed(float(t)) for t in (0, 60, 120, 300, 1000)] == [1.0, 2.0, 2.0, 1.0, 1.0]


def test_delays_are_capped() -> None:
    policy = RestartPolicy(limit=100, longest_delay_s=10.0)
    assert max(delay for t in range(50) if (delay := policy.failed(float(t))) is not None) == 10.0


def test_what_fails_twice_in_one_way_before_anything_was_sampled_is_not_tried_again():
    policy = RestartPolicy(limit=5)
    assert policy.failed(0.0, "RuntimeError: head size 16 at 0x7f12 (pid 811)", sampled=False) == 1.0
    assert policy.failed(1.0, "RuntimeError: head size 16 at 0x8abc (pid 902)", sampled=False) is None
    assert "twice in the same way" in policy.verdict("RuntimeError: …") and "--backend" in policy.verdict("…")


def test_other_words_a_full_machine_and_a_backend_that_has_sampled_get_all_their_tries():
    for words in (
        ["one", "other"] * 2,
        ["vllm backend ended with signal SIGKILL"] * 4,
        ["gave no answer for 180 s"] * 4,
    ):
        policy = RestartPolicy(limit=5)
        assert None not in [policy.failed(float(n), said, sampled=False) for n, said in enumerate(words)]
    policy = RestartPolicy(limit=5)
    assert None not in [policy.failed(float(n), "the same", sampled=True) for n in range(4)]
    assert policy.failed(4.0, "the same", sampled=True) is None and "failed 5 times" in policy.verdict("the same")
