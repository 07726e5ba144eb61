import json
from pathlib import Path

import pytest

from echo_coordinator.environments.base import Split
from echo_coordinator.environments.jsonl import JsonlEnvironment, check_file
from echo_swarm.errors import SettingsError


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def numbers(path: Path, count: int) -> Path:
    return write(path, *({"prompt": f"What is {i} + {i}?", "answer": 2 * i} for i in range(count)))


def question(environment: JsonlEnvironment, split: Split, index: int) -> str:
    return environment.prompt(split, index).messages[-1].content


def test_splits_share_no_prompt_and_do_not_depend_on_the_order_of_lines(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.jsonl", 40)
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[::-1] + lines[:3]))
    one, other = JsonlEnvironment(path, {}), JsonlEnvironment(tmp_path / "b.jsonl", {})
    held_out = {question(one, Split.EVAL, i) for i in range(one.size(Split.EVAL) or 0)}
    assert len(held_out) == 4
    assert held_out == {question(other, Split.EVAL, i) for i in range(other.size(Split.EVAL) or 0)}
    assert not held_out & {question(one, Split.TRAIN, i) for i in range(200)}


def test_training_goes_round_in_another_order_each_time(tmp_path: Path) -> None:
    environment = JsonlEnvironment(numbers(tmp_path / "a.jsonl", 40), {})
    rounds = [[question(environment, Split.TRAIN, 36 * r + i) for i in range(36)] for r in range(3)]
    assert all(sorted(order) == sorted(rounds[0]) for order in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_completions_are_compared_mathematically(tmp_path: Path) -> None:
    environment = JsonlEnvironment(numbers(tmp_path / "a.jsonl", 4), {"chat": False})
    prompt = environment.prompt(Split.TRAIN, 0).text or ""
    result = 2 * int(prompt.split()[2])
    assert environment.reward(Split.TRAIN, 0, rf"so \boxed{{{result}.0}}") == 1.0
    assert environment.reward(Split.TRAIN, 0, rf"so \boxed{{{result + 1}}}") == 0.0


def test_lines_whose_answer_cannot_be_parsed_are_skipped_and_counted(tmp_path: Path) -> None:
    good = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": r"\frac{1}{2}"}]
    environment = JsonlEnvironment(write(tmp_path / "a.jsonl", *good, {"prompt": "c", "answer": "???"}), {})
    assert environment.skipped == {"answer cannot be parsed": 1}
    seen = {question(environment, Split.TRAIN, i) for i in range(9)} | {question(environment, Split.EVAL, 0)}
    assert seen == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at least 2"),
        ('{"prompt": "a", "answer": "???"}\n', "1 × answer cannot be parsed"),
        ("nonsense\n", "a.jsonl:1: not a JSON value"),
        ("[" * 50_000, "a.jsonl:1: not a JSON value"),
        ("[1]", "a.jsonl:1: no object"),
        ('\n{"prompt": "a"}\n', r"a.jsonl:2: answer missing \(it has: prompt\); expected on each line"),
        ('{"question": "a", "solution": 1}', r"a.jsonl:1: prompt and answer missing \(it has: question, solution\)"),
        ("{}", r"it has: nothing"),
        ('{"prompt": "a", "answer": [1]}', '"answer" is a text or a number'),
        ('{"prompt": "", "answer": "1"}\n', '"prompt" is a text'),
        ('{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}\n', "role"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        JsonlEnvironment(path, {})
    with pytest.raises(SettingsError, match=r"a\.jsonl.*\{\"prompt\": |\"prompt\"|\"answer\"|role"):
        check_file(path)


def test_a_good_file_passes_the_look_that_is_taken_before_a_run_is_made(tmp_path: Path) -> None:
    check_file(
        write(tmp_path / "a.jsonl", {"prompt": "x", "answer": "???"}, *[{"prompt": i, "answer": 1} for i in "ab"])
    )
    twice = write(tmp_path / "b.jsonl", {"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "2"})
    with pytest.raises(SettingsError, match="1 different prompts"):
        check_file(twice)


def test_unknown_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="eval_share"):
        JsonlEnvironment(numbers(tmp_path / "a.jsonl", 4), {"evalshare": 0.5})
