"""What is made of vLLM's answers, without vLLM: stand-ins for its result objects, which have the same fields."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_node.backends.base import Completion, FailedRequest, GenerationRequest, PolicyFiles
from echo_node.backends.vllm_engine import read_logprob, read_output
from echo_swarm.errors import BackendFailed

REQUEST = GenerationRequest(request_id=1, prompt_ids=(1,), seed=0, temperature=1.0, max_tokens=4)
POLICY = PolicyFiles(
    policy_version=3,
    artifact=Path("model.safetensors"),
    artifact_digest=bytes(32),
    model_config_json="{}",
    end_token_ids=(2,),
    vocabulary_size=1000,
    max_prompt_tokens=8,
    max_completion_tokens=8,
)


def answer(ids: list[int], named: list[int], values: list[float]) -> SimpleNamespace:
    flat = SimpleNamespace(token_ids=named, logprobs=values)
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason="length")])


def test_the_log_probability_is_that_of_the_sampled_id_and_not_of_the_first_one_listed():
    assert read_logprob(answer([13], [382, 13], [-4.204, -0.704]), 13) == -0.704
    done = read_output(answer([13, 7], [13, 7], [-0.704, -1.0]), REQUEST, POLICY)
    assert isinstance(done, Completion)
    assert done.logprobs.tolist() == pytest.approx([-0.704, -1.0])


@pytest.mark.parametrize("named", [[382, 7], [7, 13], [382, 13, 7], [13]])
def test_log_probabilities_of_other_ids_than_the_sampled_ones_are_a_failure(named: list[int]):
    with pytest.raises(BackendFailed, match="sampled ones"):
        read_output(answer([13, 7], named, [-0.5] * len(named)), REQUEST, POLICY)
    with pytest.raises(BackendFailed, match="no log-probability of id 5"):
        read_logprob(answer([5], named, [-0.5] * len(named)), 5)


def test_a_log_probability_that_is_no_number_fails_its_request():
    failed = read_output(answer([13], [13], [float("nan")]), REQUEST, POLICY)
    assert isinstance(failed, FailedRequest) and "nan" in failed.reason
