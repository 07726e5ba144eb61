"""The vLLM engine: vLLM's own scheduler and sampler, in this process, driven step by step.

    submit ─► vLLM's queue (first come, first served) ─► step: schedule · forward · sample ─► finished requests
    load   ─► prove nothing runs ─► copy the weights in place ─► prove the prefix cache empty
              │ first policy, other architecture or base, or anything that fails: start anew
              └ of an adapter: take the old one out ─► prove the prefix cache empty ─► put the new one in, by a new id

Ids go in and come out; there is no tokenizer. A finished sequence leaves at once and the next one takes its place. The
completions of a group share the whole blocks of their prompt through the prefix cache, whose keys are salted with the
number of the load: weights that are gone can never answer, even if a reset were to lie.

The engine core stays in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that nothing survives the child; with
tensor parallelism, vLLM's workers are processes of their own that watch the pipe to this one.
"""

# vLLM lives in an environment of its own, where type checking does not look.
# pyright: reportMissingImports=false

import math
import os
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo_node.backends.base import (
    CannotScore,
    Completion,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadRefused,
    Outcome,
    PolicyFiles,
    ScoreRequest,
)
from echo_node.backends.options import VllmOptions
from echo_swarm.cgroups import cpu_count, cpu_quota
from echo_swarm.errors import BackendFailed
from echo_swarm.trajectory import FinishReason
from echo_swarm.work import BackendReport

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this one; 0 is greedy."""


class VllmEngine:
    """An `Engine` on whatever the installed build of vLLM runs on. See the module's docstring."""

    def __init__(self, options: VllmOptions | None = None) -> None:
        self.options = options or VllmOptions()
        device = prepare_environment(self.options)
        try:
            import vllm

            from echo_node.backends import vllm_start
        except ImportError as e:
            raise BackendFailed(
                f"vLLM cannot be imported ({e}); name the interpreter of an environment that has it and this package "
                "with --backend-python"
            ) from e
        self._vllm = vllm_start
        self._build = f"vllm {vllm.__version__}"
        self._device = vllm_start.Device(
            on_cpu=device == "cpu",
            precision=self.options.precision or ("float32" if device == "cpu" else "bfloat16"),
            eager=bool(os.environ.get("TORCHDYNAMO_DISABLE")),
        )
        self._device_name = device
        self.batch = self.options.batch
        self._core: LLMEngine | None = None
        self._adapter: LoRARequest | None = None
        self._policy: PolicyFiles | None = None
        self._loaded_for: tuple[object, ...] = ()
        self._salt = 0
        self._requests: dict[str, GenerationRequest] = {}
        self._failed: list[Outcome] = []
        self._folder = tempfile.TemporaryDirectory(prefix="echo-vllm-")

    def load(self, policy: PolicyFiles) -> None:
        """Check the file, then swap the weights in place, or start vLLM (see `Engine.load`)."""
        assert not self.pending, "the conductor loads only between requests"
        self._policy = None
        self._vllm.check_artifact(policy)
        self._salt += 1
        folder = Path(self._folder.name) / str(self._salt)
        self._vllm.write_folder(policy, folder)
        needs = self._vllm.fixed_at_start(policy)
        if self._core is None or needs != self._loaded_for or not self._swap(policy, folder):
            self._start(policy, folder)
            self._loaded_for = needs
        else:
            self._use_adapter(policy, folder)
        self._policy = policy

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand requests to vLLM's queue (see `Engine.submit`)."""
        from vllm.inputs import tokens_input

        assert self._core is not None and self._policy is not None
        for request in requests:
            if 0 < request.temperature < LOWEST_TEMPERATURE:
                reason = f"temperature {request.temperature}: vLLM samples at 0 or from {LOWEST_TEMPERATURE} on"
                self._fail(request, FailureCode.BAD_REQUEST, reason)
                continue
            name = str(request.request_id)
            self._requests[name] = request
            prompt = tokens_input(list(request.prompt_ids), cache_salt=str(self._salt))
            settings = sampling_settings(request, self._policy.end_token_ids)
            self._core.add_request(name, prompt, settings, lora_request=self._adapter)

    def step(self) -> list[Outcome]:
        """Let vLLM schedule and compute once; return what finished (see `Engine.step`)."""
        failed, self._failed = self._failed, []
        if not self._requests:
            return failed
        assert self._core is not None
        reason = ""
        try:
            finished = self._core.step()
        except Exception as e:
            if not self._vllm.is_out_of_memory(e):
                raise
            finished, reason = [], self._vllm.first_line(e)
        if reason:
            self._shrink(reason)
        return failed + [self._outcome(output) for output in finished if output.finished]  # pyright: ignore

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        """Ask for each token with all before it as the prompt, of which the cache knows most (`ScoringEngine.score`).

        vLLM's log-probabilities of a prompt would be those before temperature.
        """
        from vllm.inputs import tokens_input

        assert self._core is not None and not self.pending
        if request.temperature < LOWEST_TEMPERATURE:
            raise CannotScore(f"vLLM has no temperatures between 0 and {LOWEST_TEMPERATURE}")
        missing: dict[str, tuple[int, int]] = {}
        for item, (prompt, completion) in enumerate(request.items):
            for place, token_id in enumerate(completion):
                name = f"score-{item}-{place}"
                missing[name] = (item, place)
                context = tokens_input([*prompt, *completion[:place]], cache_salt=str(self._salt))
                settings = scoring_settings(token_id, request.temperature)
                self._core.add_request(name, context, settings, lora_request=self._adapter)
        found = [array("f", bytes(4 * len(completion))) for _, completion in request.items]
        while missing:
            for output in self._core.step():
                item, place = missing.pop(output.request_id)
                token_id = request.items[item][1][place]
                found[item][place] = min(0.0, read_logprob(output, token_id))  # pyright: ignore
        return found

    def wait_s(self) -> float:
        """Return 0: a step always computes."""
        return 0.0

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._requests) + len(self._failed)

    def report(self) -> BackendReport:
        """Say what samples here."""
        return BackendReport(
            backend="vllm",
            build=self._build,
            precision=self._device.precision,
            device=self._device_name[:128],
            batch=self.batch,
        )

    # Inside.

    def _swap(self, policy: PolicyFiles, folder: Path) -> bool:
        """Copy weights over the old ones, or take an adapter out. False when that cannot be shown to have worked."""
        assert self._core is not None
        try:
            if policy.base is not None:
                return self._vllm.drop_adapter(self._core, self._adapter)
            return self._vllm.swap(self._core, folder)
        except Exception as e:  # noqa: BLE001 - whatever it was, a fresh start either works or says why
            print(f"weights cannot be swapped in place, starting anew: {self._vllm.first_line(e)}", file=sys.stderr)
            return False

    def _start(self, policy: PolicyFiles, folder: Path) -> None:
        self._close()
        self._core, self.batch = self._vllm.start(policy, folder, self.options, self._device, self.batch)
        self._use_adapter(policy, folder)

    def _use_adapter(self, policy: PolicyFiles, folder: Path) -> None:
        self._adapter = None
        if policy.base is not None:
            assert self._core is not None
            self._adapter = self._vllm.use_adapter(self._core, folder, self._salt)

    def _close(self) -> None:
        if self._core is not None:
            core, self._core = self._core, None
            self._vllm.stop(core)

    def _shrink(self, reason: str) -> None:
        """Start again with half the batch, every request from its seed. At a batch of 1 the first one fails."""
        requests, self._requests = list(self._requests.values()), {}
        policy = self._policy
        assert policy is not None
        self._close()
        if self.batch == 1:
            self._fail(requests.pop(0), FailureCode.OUT_OF_MEMORY, reason)
        self.batch = max(1, self.batch // 2)
        try:
            self._start(policy, Path(self._folder.name) / str(self._salt))
        except LoadRefused as e:
            raise BackendFailed(f"out of memory ({reason}), and then: {e}") from e
        self.submit(requests)

    def _fail(self, request: GenerationRequest, code: FailureCode, reason: str) -> None:
        self._failed.append(FailedRequest(request_id=request.request_id, code=code, reason=reason))

    def _outcome(self, output: "RequestOutput") -> Outcome:
        assert self._policy is not None
        request = self._requests.pop(output.request_id)
        return read_output(output, request, self._policy)


def prepare_environment(options: VllmOptions) -> str:
    """Set what vLLM and torch read while they are imported. Returns the device's name, `cpu` without a GPU."""
    # Without a quota, vLLM chooses by itself; it knows of none.
    if threads := options.threads or (cpu_count() if cpu_quota() is not None else 0):
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # It would override the size that the engine works out.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if options.eager if options.eager is not None else device == "cpu":
        # Else even an eager engine compiles a helper of its sampler: a minute on a small machine, and a C++ compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return device


def sampling_settings(request: GenerationRequest, end_token_ids: Sequence[int]) -> "SamplingParams":
    """Return a request in vLLM's terms: nothing that would change the distribution but temperature."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        # The run's end tokens alone end a completion; those of the model's config do not.
        ignore_eos=True,
        stop_token_ids=list(end_token_ids),
        # Of the sampled token only, in flat arrays.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scoring_settings(token_id: int, temperature: float) -> "SamplingParams":
    """Return what makes vLLM tell the log-probability of one id, whatever it draws itself."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,
        ignore_eos=True,
        logprob_token_ids=[token_id],
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def read_logprob(output: "RequestOutput", token_id: int) -> float:
    """Return the log-probability of the id that `scoring_settings` asked for."""
    flat = output.outputs[0].logprobs
    if flat is None or token_id not in flat.token_ids:  # pyright: ignore
        raise BackendFailed(f"vLLM gave no log-probability of id {token_id}")
    return flat.logprobs[flat.token_ids.index(token_id)]  # pyright: ignore


def read_output(output: "RequestOutput", request: GenerationRequest, policy: PolicyFiles) -> Outcome:
    """Return a finished request in our terms.

    Raises:
        BackendFailed: vLLM gave it up, or its ids and log-probabilities do not match.

    """
    (result,) = output.outputs
    ids, flat = list(result.token_ids), result.logprobs
    if result.finish_reason not in ("stop", "length") or flat is None:
        raise BackendFailed(f"vLLM ended a request with {result.finish_reason!r}")
    # One entry a position: with `logprobs=0` there is nothing beside the sampled token.
    values, named = flat.logprobs, flat.token_ids  # pyright: ignore
    if named != ids:
        raise BackendFailed(f"vLLM gave log-probabilities of {len(named)} ids for {len(ids)} sampled ones")
    if bad := [value for value in values if not math.isfinite(value)]:
        return FailedRequest(
            request_id=request.request_id,
            code=FailureCode.NON_FINITE,
            reason=f"version {policy.policy_version} gives a log-probability of {bad[0]}",
        )
    greedy = request.temperature == 0
    return Completion(
        request_id=request.request_id,
        token_ids=array("I", ids),
        logprobs=array("f", [0.0 if greedy else min(0.0, value) for value in values]),
        finish_reason=FinishReason.STOP if ids[-1] in policy.end_token_ids else FinishReason.LENGTH,
        oldest_version=policy.policy_version,
        newest_version=policy.policy_version,
        artifact_digest=policy.artifact_digest,
    )
