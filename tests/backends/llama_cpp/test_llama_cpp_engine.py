"""The llama.cpp engine itself: shared prompts, slots, seeds, limits and bad files."""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from echo_node.backends.base import Completion, FailedRequest, FailureCode, LoadRefused, OutOfMemory, ScoreRequest
from echo_node.backends.conductor import self_test
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions
from echo_swarm.trajectory import FinishReason
from tests.backends.llama_cpp.support import complete, content, run, write_gguf_policy
from tests.unit.backends.support import request

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def engine(tmp_path: Path) -> Generator[LlamaCppEngine]:
    engine = LlamaCppEngine(LlamaCppOptions(batch=4, threads=1))
    engine.load(write_gguf_policy(tmp_path))
    yield engine
    engine.close()


def test_a_groups_prompt_is_evaluated_once(engine: LlamaCppEngine) -> None:
    """Twelve completions of one prompt in four slots: 5 prompt tokens in all."""
    done = complete(engine, [request(i, prompt_ids=PROMPT, max_tokens=3 + i) for i in range(12)])
    assert len(done) == 12
    assert engine.evaluated_prompt_tokens == len(PROMPT)


def test_each_prompt_of_several_groups_is_evaluated_once(engine: LlamaCppEngine) -> None:
    prompts = [(1,) * 7, (2,) * 9, (3,), (4,) * 32]
    complete(engine, [request(i, prompt_ids=prompts[i // 4]) for i in range(16)])
    assert engine.evaluated_prompt_tokens == sum(len(prompt) for prompt in prompts)


def test_a_shared_prompt_gives_what_a_prompt_of_its_own_gives(engine: LlamaCppEngine) -> None:
    """Each member of a group alone, evaluated anew, against the group: field case 80."""
    group = complete(engine, [request(i, prompt_ids=PROMPT) for i in range(4)])
    for i in range(4):
        alone = complete(engine, [request(i, prompt_ids=PROMPT)])[i]
        assert alone.token_ids == group[i].token_ids
        assert alone.logprobs.tolist() == pytest.approx(group[i].logprobs.tolist(), abs=1e-4)


def test_a_finished_slot_takes_the_next_completion_at_once(engine: LlamaCppEngine) -> None:
    """Greedy, no end token within reach of the limit: 4 slots make 8 completions of 6 tokens in 2 x 5 steps + 1."""
    never = write_gguf_policy(engine._policy.artifact.parent, end_token_ids=(60,))  # type: ignore[union-attr]
    engine.load(never)
    done = complete(engine, [request(i, max_tokens=6, temperature=0.0) for i in range(8)])
    assert {completion.finish_reason for completion in done.values()} == {FinishReason.LENGTH}
    # One step evaluates the prompt and draws the first token of four, five more draw the rest; the next four draw
    # their first token from the kept logits in the step that seats them.
    assert engine.decode_calls == 1 + 5 + 5


def test_a_seed_gives_the_same_ids_in_other_company(engine: LlamaCppEngine) -> None:
    requests = [request(i, prompt_ids=(i + 1,) * (i + 1), max_tokens=20) for i in range(8)]
    together = complete(engine, requests)
    for i in range(8):
        alone = complete(engine, [requests[i]])[i]
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs.tolist() == pytest.approx(together[i].logprobs.tolist(), abs=1e-4)


def test_the_same_call_to_an_idle_engine_gives_the_same_bits(engine: LlamaCppEngine) -> None:
    requests = [request(i, prompt_ids=(i % 3 + 1,) * (i % 3 + 1), max_tokens=4 + i) for i in range(10)]
    first = complete(engine, requests)
    complete(engine, [request(50, prompt_ids=(9,) * 30, max_tokens=60)])
    assert content(complete(engine, requests)) == content(first)


def test_temperatures_and_greedy_mix_in_a_batch(engine: LlamaCppEngine) -> None:
    mixed = [request(i, temperature=(0.0, 0.6, 1.0, 2.0)[i], max_tokens=10) for i in range(4)]
    done = complete(engine, mixed)
    for i in range(4):
        assert complete(engine, [mixed[i]])[i].token_ids == done[i].token_ids
    assert not any(done[0].logprobs)


def test_prompts_longer_than_one_batch_are_evaluated_in_chunks_beside_running_ones(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = complete(engine, [request(0, prompt_ids=tuple(range(1, 31)), max_tokens=5)])
    monkeypatch.setattr("echo_node.backends.llama_cpp_engine.PROMPT_TOKENS", 4)
    done = complete(
        engine, [request(1, prompt_ids=(1,), max_tokens=40), request(0, prompt_ids=tuple(range(1, 31)), max_tokens=5)]
    )
    assert done[0].token_ids == whole[0].token_ids
    assert done[0].logprobs.tolist() == pytest.approx(whole[0].logprobs.tolist(), abs=1e-4)


def test_a_sequence_fills_its_memory_and_no_more(tmp_path: Path) -> None:
    """Field case 83: the longest prompt and completion the run allows, which is also the whole context of the model."""
    engine = LlamaCppEngine(LlamaCppOptions(batch=2, threads=1))
    engine.load(write_gguf_policy(tmp_path, end_token_ids=(60,), max_prompt_tokens=64, max_completion_tokens=64))
    done = complete(engine, [request(i, prompt_ids=(i + 1,) * 64, max_tokens=64, temperature=0.0) for i in range(3)])
    assert {len(completion.token_ids) for completion in done.values()} == {64}
    engine.close()
    with pytest.raises(LoadRefused, match=r"the run allows 129 tokens, the model's context is 128"):
        engine.load(write_gguf_policy(tmp_path, max_prompt_tokens=65, max_completion_tokens=64))


def test_a_context_set_by_hand_refuses_what_is_longer(tmp_path: Path) -> None:
    engine = LlamaCppEngine(LlamaCppOptions(batch=2, threads=1, context=64))
    engine.load(write_gguf_policy(tmp_path))
    done = run(engine, [request(0, max_tokens=60), request(1, max_tokens=59)])
    assert isinstance(done[0], FailedRequest) and done[0].code is FailureCode.TOO_LONG
    assert "this node's context is 64" in done[0].reason
    assert isinstance(done[1], Completion)
    engine.close()


def test_weights_that_are_not_finite_fail_their_requests_and_the_self_test(tmp_path: Path) -> None:
    policy = write_gguf_policy(tmp_path)
    engine = LlamaCppEngine(LlamaCppOptions(batch=2, threads=1))
    data = bytearray(policy.artifact.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # NaN in the last tensor
    policy.artifact.write_bytes(data)
    engine.load(policy)
    outcome = run(engine, [request(0)])[0]
    assert isinstance(outcome, FailedRequest) and outcome.code is FailureCode.NON_FINITE
    with pytest.raises(LoadRefused, match="self-test"):
        self_test(engine, policy)
    engine.close()


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "header", "folder", "missing"])
def test_a_bad_file_is_refused_in_words_and_the_next_one_loads(
    engine: LlamaCppEngine, tmp_path: Path, kind: str
) -> None:
    bad = write_gguf_policy(tmp_path / "bad")
    content = bad.artifact.read_bytes()
    bad.artifact.unlink()
    match kind:
        case "empty":
            bad.artifact.touch()
        case "text":
            bad.artifact.write_text("version https://git-lfs.github.com/spec/v1\n")
        case "cut":
            bad.artifact.write_bytes(content[:-5000])
        case "header":
            bad.artifact.write_bytes(content[:8] + b"\xff" * 16 + content[24:])
        case "folder":
            bad.artifact.mkdir()
    with pytest.raises(LoadRefused, match=r"model-f32\.gguf"):
        engine.load(bad)
    engine.load(write_gguf_policy(tmp_path / "good"))
    complete(engine, [request(0)])


def test_a_vocabulary_larger_than_the_files_is_refused(engine: LlamaCppEngine, tmp_path: Path) -> None:
    with pytest.raises(LoadRefused, match="vocabulary of 65 is larger than the file's 64"):
        engine.load(write_gguf_policy(tmp_path, vocabulary_size=65))


def test_when_memory_runs_out_the_batch_is_halved_and_nothing_is_lost(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(i, max_tokens=10) for i in range(6)]
    expected = complete(engine, requests)
    decode = engine._context.decode  # type: ignore[union-attr]

    def short_of_memory(ids: list[int], *rest: object) -> object:
        if engine.decode_calls > before + 3:
            raise OutOfMemory("no room")
        return decode(ids, *rest)  # type: ignore[arg-type]

    before = engine.decode_calls
    monkeypatch.setattr(engine._context, "decode", short_of_memory)
    done = complete(engine, requests)
    assert engine.report().batch == engine.batch == 2
    assert {i: c.token_ids for i, c in done.items()} == {i: c.token_ids for i, c in expected.items()}


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scoring_gives_what_sampling_recorded(engine: LlamaCppEngine, temperature: float) -> None:
    prompts = [(3,), (2, 7, 1), (9,) * 32]
    done = complete(
        engine, [request(i, prompt_ids=prompts[i % 3], temperature=temperature, max_tokens=30) for i in range(9)]
    )
    items = tuple((prompts[i % 3], tuple(done[i].token_ids)) for i in range(9))
    scores = engine.score(ScoreRequest(items=items, temperature=temperature))
    for i in range(9):
        assert scores[i].tolist() == pytest.approx(done[i].logprobs.tolist(), abs=1e-4)
    assert content(complete(engine, [request(0)])) == content(complete(engine, [request(0)]))


def test_the_report_names_build_precision_and_threads(engine: LlamaCppEngine, tmp_path: Path) -> None:
    report = engine.report()
    assert (report.backend, report.precision, report.batch) == ("llama_cpp", "f32", 4)
    assert report.build.startswith("llama_cpp 0.") and report.device == "cpu (1 threads)"
    for precision in ("f16", "bf16", "q8_0", "q4_0"):
        engine.load(write_gguf_policy(tmp_path / precision, precision=precision))
        assert engine.report().precision == precision
        self_test(engine, engine._policy)  # type: ignore[arg-type]


def test_neither_torch_nor_transformers_nor_vllm_is_imported(tmp_path: Path) -> None:
    policy = write_gguf_policy(tmp_path)
    code = f"""
import sys
from pathlib import Path
from echo_node.backends.base import GenerationRequest, PolicyFiles
from echo_node.backends.conductor import self_test
from echo_node.backends.options import LlamaCppOptions
from echo_node.backends.serve import make_engine
engine = make_engine(LlamaCppOptions(threads=1))
policy = PolicyFiles(
    policy_version=0, artifact=Path({str(policy.artifact)!r}), artifact_digest=b"", model_config_json="",
    end_token_ids=(7,), vocabulary_size=61, max_prompt_tokens=32, max_completion_tokens=64,
)
engine.load(policy)
self_test(engine, policy)
print(sorted({{"torch", "transformers", "vllm", "tokenizers", "safetensors"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
