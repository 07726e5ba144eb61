"""Scorer children for real: hanging, dying and lying verifiers, and what the pool makes of them."""

import json
import os
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo_coordinator.demo.tokenizer import BOS_ID, EOS_ID, VOCABULARY, save_tokenizer
from echo_coordinator.scoring.pool import PoolSettings, Scored, ScoreRequest, open_pool
from echo_swarm import codec
from echo_swarm.errors import BackendFailed, SettingsError

pytestmark = pytest.mark.anyio

VERIFIER = '''
import os, pathlib, signal, subprocess, sys, time
from echo_coordinator.environments.base import Prompt, PromptSkipped, Unscorable

class Counting:
    """The answer to `<index> + 1 =`; some answers break the verifier."""

    def __init__(self, argument, settings):
        if argument == "broken":
            raise RuntimeError("no such device")
        if argument == "stopped":
            marker = pathlib.Path(settings["folder"]) / "opened before"
            if marker.exists():
                time.sleep(settings["opens_in_s"])
                return
            marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def size(self, split):
        return 8 if split == "eval" else None

    def prompt(self, split, index):
        if index == 3:
            raise PromptSkipped("three is unlucky")
        if index in (20, 200, 201, 202) and split == "train":
            while True:
                time.sleep(60)
        if index == 30:
            os._exit(3)
        return Prompt(text=f"{index} + 1 =")

    def reward(self, split, index, completion):
        if completion == "666":
            os._exit(3)
        if completion == "777":
            while True:
                time.sleep(60)
        if completion in ("555", "556"):
            # As an environment would that runs what was sampled: the program starts another one, and both hang.
            inner = "import time; time.sleep(3600)"
            outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
            subprocess.run([sys.executable, "-c", outer], start_new_session=completion == "556")
        if completion == "888":
            raise Unscorable("the verifier is confused")
        if completion == "111":
            raise ZeroDivisionError("of a plug-in")
        if completion in ("222", "333", "444", "999"):
            return {"222": float("nan"), "333": None, "444": "1.0", "999": 1e9}[completion]
        return float(completion == str(index + 1))
'''


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator's main process runs on asyncio."""
    return "asyncio"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY), "eos_token_id": EOS_ID}))
    return folder


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    site = tmp_path / "site"
    info = site / "echo_counting-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "echo_counting.py").write_text(VERIFIER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[echo_swarm.environments]\ncounting = echo_counting:Counting\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return "counting"


def settings(model: Path, environment: str, **changes: object) -> PoolSettings:
    values = {"max_prompt_tokens": 12, "deadline_s": 2.0, **changes}
    return PoolSettings(model_dir=model, environment=environment, **values)  # pyright: ignore[reportArgumentType]


def completion(index: int, text: str, split: str = "train") -> ScoreRequest:
    token_ids = [VOCABULARY[character] for character in text] + [EOS_ID]
    return ScoreRequest(split=split, index=index, token_ids=codec.pack_u32(token_ids))


def rewards(results: list[Scored]) -> list[float | None]:
    return [result.reward for result in results]


async def test_prompts_come_tokenised_and_unusable_ones_are_counted(model: Path, counting: str, tmp_path: Path) -> None:
    async with open_pool(settings(model, counting, max_prompt_tokens=8), log_dir=tmp_path / "logs") as pool:
        prompts = await pool.prompts("train", 0, 12)
        held_out = await pool.prompts("eval", 0, 100)
        assert pool.opened.end_token_ids == (EOS_ID,)
        assert pool.opened.train_size is None
        assert pool.opened.eval_size == 8
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert list(codec.unpack_u32(prompts[0].prompt_ids)) == [BOS_ID, *(VOCABULARY[c] for c in "0 + 1 =")]
    assert prompts[0].text == "0 + 1 ="
    assert [prompt.index for prompt in held_out] == [0, 1, 2, 4, 5, 6, 7]
    assert pool.skipped == {"three is unlucky": 2, "prompt longer than 8 tokens": 2}


async def test_a_prompt_that_hangs_or_kills_its_process_is_left_out_and_no_other(
    model: Path, counting: str, tmp_path: Path
) -> None:
    async with open_pool(settings(model, counting, prompt_deadline_s=1.0), log_dir=tmp_path / "logs") as pool:
        prompts = await pool.prompts("train", 18, 14)
        assert pool.replaced == 4
    assert [prompt.index for prompt in prompts] == [18, 19, *range(21, 30), 31]
    reasons = " ".join(pool.skipped)
    assert "longer than 1 s" in reasons and "exit code 3" in reasons and pool.skipped.total() == 2


async def test_an_environment_that_makes_no_prompt_at_all_is_an_error(
    model: Path, counting: str, tmp_path: Path
) -> None:
    async with open_pool(settings(model, counting, prompt_deadline_s=0.5), log_dir=tmp_path / "logs") as pool:
        with pytest.raises(BackendFailed, match=r"could not give prompts.*longer than 0\.5 s"):
            await pool.prompts("train", 200, 4)
        assert [prompt.index for prompt in await pool.prompts("train", 0, 1)] == [0]


async def test_a_scorer_that_was_stopped_while_it_made_prompts_is_replaced_and_no_prompt_is_lost(
    model: Path, counting: str, tmp_path: Path
) -> None:
    async with open_pool(settings(model, counting, prompt_deadline_s=1.0), log_dir=tmp_path / "logs") as pool:
        (before,) = pool.pids
        psutil.Process(before).suspend()
        prompts = await pool.prompts("train", 4, 8)
        assert pool.replaced == 1 and pool.held_up() == ""
    assert [prompt.index for prompt in prompts] == list(range(4, 12)) and not pool.skipped
    assert not psutil.pid_exists(before)


async def test_a_scorer_that_was_stopped_while_it_opened_is_replaced_and_one_that_takes_long_is_not(
    model: Path, counting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_coordinator.scoring.pool.QUIET_S", 5.0)
    monkeypatch.setattr("echo_coordinator.scoring.pool.START_TRIES", 10)
    given = {"folder": str(tmp_path), "opens_in_s": 6.0}
    stopped = settings(model, f"{counting}:stopped", environment_settings=given)
    with anyio.fail_after(110):
        async with open_pool(stopped, log_dir=tmp_path / "logs") as pool:
            assert rewards(await pool.score([completion(4, "5")])) == [1.0]


async def test_an_opening_without_end_is_given_up(
    model: Path, counting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_coordinator.scoring.pool.OPEN_S", 2.0)
    monkeypatch.setattr("echo_coordinator.scoring.pool.START_TRIES", 1)
    (tmp_path / "opened before").touch()
    given = {"folder": str(tmp_path), "opens_in_s": 600}
    endless = settings(model, f"{counting}:stopped", environment_settings=given)
    with pytest.raises(BackendFailed, match="scorer 0 took longer than 2 s to open counting:stopped"):
        async with open_pool(endless, log_dir=tmp_path / "logs"):
            pytest.fail("opened")


async def test_a_prompt_that_takes_long_is_told(
    model: Path, counting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_coordinator.scoring.pool.SLOW_S", 0.0)
    async with (
        open_pool(settings(model, counting, prompt_deadline_s=60.0), log_dir=tmp_path / "logs") as pool,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(pool.prompts, "train", 19, 2)
        with anyio.fail_after(120):
            while not pool.held_up().startswith("train prompt 20 has been in the making for"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert pool.held_up().endswith("replaced after 60 s")
        tasks.cancel_scope.cancel()


async def test_scores_come_from_the_environment_alone(model: Path, counting: str, tmp_path: Path) -> None:
    items = [completion(4, "5"), completion(4, "6"), ScoreRequest(split="train", index=4, token_ids=b"")]
    items.append(ScoreRequest(split="train", index=4, token_ids=codec.pack_u32([VOCABULARY["5"], 4_000_000_000])))
    items += [completion(4, "999"), completion(4, "888"), completion(90, "91", "eval"), completion(7, "8", "eval")]
    async with open_pool(settings(model, counting), log_dir=tmp_path / "logs") as pool:
        results = await pool.score(items)
        assert pool.replaced == 0
    assert rewards(results) == [1.0, 0.0, 0.0, 1.0, None, None, None, 1.0]
    assert "1000000000" in str(results[4].failure)
    assert results[5].failure == "the verifier is confused"
    assert results[0].text == "5"
    assert pool.failures == 3


async def test_a_hanging_verifier_costs_its_own_score_and_no_other(model: Path, counting: str, tmp_path: Path) -> None:
    items = [completion(i, "777" if i in (2, 5) else str(i + 1)) for i in range(8)]
    async with open_pool(settings(model, counting, size=2), log_dir=tmp_path / "logs") as pool:
        results = await pool.score(items)
        again = await pool.score([completion(1, "2")])
        assert pool.replaced == 2
    assert rewards(results) == [1.0, 1.0, None, 1.0, 1.0, None, 1.0, 1.0]
    assert "longer than 2 s" in str(results[2].failure)
    assert rewards(again) == [1.0]


@pytest.mark.parametrize("program", ["555", "556"], ids=["in its group", "in a session of its own"])
async def test_a_program_that_a_verifier_started_and_that_hangs_is_ended_with_all_its_children(
    model: Path, counting: str, tmp_path: Path, program: str
) -> None:
    """Field case 87: bounded, no process left, and counted as the verifier's failure, never as a reward of 0."""
    started: set[psutil.Process] = set()

    async def watch(pids: tuple[int, ...]) -> None:
        while True:
            for pid in pids:
                with suppress(psutil.NoSuchProcess):
                    started.update(psutil.Process(pid).children(recursive=True))
            await anyio.sleep(0.02)

    async with open_pool(settings(model, counting, deadline_s=6.0), log_dir=tmp_path / "logs") as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, pool.pids)
            results = await pool.score([completion(0, "1"), completion(1, program), completion(2, "3")])
            tasks.cancel_scope.cancel()
        assert (pool.replaced, pool.failures) == (1, 1)
        assert len(started) >= 2, "the program and the one that it started"
        _, alive = psutil.wait_procs(list(started), timeout=10)
        assert not alive
        assert rewards(await pool.score([completion(1, "2")])) == [1.0]
    assert rewards(results) == [1.0, None, 1.0]
    assert "longer than 6 s" in str(results[1].failure)


async def test_a_plug_in_that_raises_or_gives_nonsense_is_counted_apart_and_its_process_goes_on(
    model: Path, counting: str, tmp_path: Path
) -> None:
    answers = ["111", "222", "333", "444", "999"]
    async with open_pool(settings(model, counting), log_dir=tmp_path / "logs") as pool:
        results = await pool.score([completion(4, answer) for answer in [*answers, "5"]])
        assert (pool.replaced, pool.failures) == (0, len(answers))
    assert rewards(results) == [None] * len(answers) + [1.0]
    why = [str(result.failure) for result in results]
    assert why[0] == "ZeroDivisionError: of a plug-in"
    assert all("no number from 0 to 1" in words for words in why[1:-1])


async def test_a_verifier_that_kills_its_process_is_given_up_after_three_tries(
    model: Path, counting: str, tmp_path: Path
) -> None:
    items = [completion(0, "1"), completion(1, "666"), completion(2, "3"), completion(3, "4")]
    async with open_pool(settings(model, counting), log_dir=tmp_path / "logs") as pool:
        results = await pool.score(items)
        assert pool.replaced == 3
    assert rewards(results) == [1.0, None, 1.0, 1.0]
    assert "3 times" in str(results[1].failure)


async def test_many_callers_at_once_all_get_their_own_results(model: Path, counting: str, tmp_path: Path) -> None:
    found: dict[int, list[float | None]] = {}
    async with open_pool(settings(model, counting, size=2), log_dir=tmp_path / "logs") as pool:

        async def call(number: int) -> None:
            answers = [completion(i, str(i + 1 if i == number else 0)) for i in range(40)]
            found[number] = rewards(await pool.score(answers))

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(call, number)
    assert found == {number: [float(i == number) for i in range(40)] for number in range(10)}


async def test_a_child_that_is_killed_from_outside_is_replaced(model: Path, counting: str, tmp_path: Path) -> None:
    async with open_pool(settings(model, counting), log_dir=tmp_path / "logs") as pool:
        (before,) = pool.pids
        psutil.Process(before).kill()
        assert rewards(await pool.score([completion(4, "5")])) == [1.0]
        (after,) = pool.pids
        assert after != before
    assert not psutil.pid_exists(after)


async def test_a_scorer_that_cannot_start_ends_the_pool_with_its_own_message(
    model: Path, counting: str, tmp_path: Path
) -> None:
    with pytest.raises(BackendFailed, match=r"3 times in a row.*no such device"):
        async with open_pool(settings(model, f"{counting}:broken"), log_dir=tmp_path / "logs"):
            pytest.fail("opened")


async def test_settings_that_cannot_work_are_told_at_once(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no environment 'nothing'"):
        async with open_pool(settings(model, "nothing"), log_dir=tmp_path / "logs"):
            pytest.fail("opened")


async def test_an_error_of_the_caller_comes_out_as_it_is(model: Path, counting: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_pool(settings(model, counting), log_dir=tmp_path / "logs"):
            raise KeyError("mine")


async def test_towers_of_powers_time_out_one_by_one_and_the_pool_keeps_its_size(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    characters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocab=characters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({"vocab_size": 96, "eos_token_id": 95}))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i + 1}) + "\n" for i in range(20)))
    environment = f"jsonl:{questions}"

    def answer(index: int, text: str) -> ScoreRequest:
        return ScoreRequest(split="train", index=index, token_ids=codec.pack_u32(characters[c] for c in text))

    async with open_pool(settings(model, environment, size=2, deadline_s=1.5), log_dir=tmp_path / "logs") as pool:
        prompts = await pool.prompts("train", 0, 6)
        right = [answer(p.index, rf"\boxed{{{int(p.text.split()[0]) + 1}}}") for p in prompts]
        towers = [answer(0, r"\boxed{9^{9^{9^{9}}}}") for _ in range(10)]
        results = await pool.score(right[:3] + towers + right[3:])
        assert pool.replaced == 10
        assert rewards(await pool.score(right)) == [1.0] * 6
    assert rewards(results) == [1.0] * 3 + [None] * 10 + [1.0] * 3
