"""Continuous batching over a transformers model, with exact log-probabilities.

One step:

    waiting ─► prefill (distinct prompts ahead of need) ─► prompt states
    rows    ─► one forward over the running batch ─► logits ┐
    free slots ◄─ waiting + prompt state (row copy, logits) ┴─► one draw for all ─► tokens, finished rows

A group's completions share one prefill. A finished row's slot is taken in the same step.

Determinism: for the same weights, options and machine, the same requests submitted in one call to an idle engine give
the same bits. A row's logits depend in their last bits on how many rows share the forward pass, and that depends on
nothing but the order of submission. With `isolate`, requests of different calls never share a forward pass, so that a
call's result does not depend on when other calls came.
"""

from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice
from typing import Any, cast

import torch
from transformers import DynamicCache

from echo_node.backends.base import (
    CannotScore,
    Completion,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadRefused,
    Outcome,
    OutOfMemory,
    PolicyFiles,
    ScoreRequest,
)
from echo_node.backends.kv_cache import PromptState, RowCache, split_prompts
from echo_node.backends.options import TorchOptions
from echo_node.backends.rows import Row
from echo_node.backends.sampling import draw, token_logprobs
from echo_node.backends.torch_lora import apply_adapter, remove_adapter
from echo_node.backends.torch_model import DTYPES, build_model, load_weights
from echo_swarm.cgroups import cpu_count
from echo_swarm.work import BackendReport

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass; bounds its memory. A single longer prompt is still one pass."""
KEPT_PROMPTS = 2
"""Prompts kept although no request waits for them: a node often gets a group in parts, as its places become free."""


@dataclass(slots=True)
class _Waiting:
    """A request without a slot. `call` numbers the submit call that brought it."""

    request: GenerationRequest
    call: int


@dataclass(slots=True)
class _Queue:
    """Requests without a slot, in the order of submission, and prompts whose forward pass is done."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    prompts: dict[tuple[int, ...], PromptState] = field(default_factory=dict)
    recent: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=KEPT_PROMPTS))
    """Prompts of the requests seated last, each once."""

    def clear_prompts(self) -> None:
        """Forget all prompts."""
        self.prompts.clear()
        self.recent.clear()


class TorchEngine:
    """An `Engine` on CPU or CUDA. See the module's docstring for the flow and for what is deterministic."""

    def __init__(
        self, options: TorchOptions | None = None, *, before_forward: Callable[[int], None] | None = None
    ) -> None:
        """`before_forward` is called with the number of rows ahead of each forward pass: where a memory budget acts."""
        self.options = options or TorchOptions()
        # torch counts the machine's cores, whatever share of their time this process may have.
        torch.set_num_threads(self.options.threads or min(torch.get_num_threads(), cpu_count()))
        self.device = _device(self.options.device)
        self.precision = self.options.precision or ("float32" if self.device.type == "cpu" else "bfloat16")
        self.batch = self.options.batch
        self._before_forward = before_forward or (lambda rows: None)
        self._model: Any = None
        self._config_json = ""
        self._base_digest = b""
        """Of the model that is held below an adapter; empty when it is none that an adapter may be put over."""
        self._cache_argument = "cache"
        self._policy: PolicyFiles | None = None
        self._rows: list[Row] = []
        self._cache = RowCache()
        self._queue = _Queue()
        self._calls = 0
        self._running_call = 0

    def load(self, policy: PolicyFiles) -> None:
        """Build the model on first use, then copy the weights over the old ones in place (see `Engine.load`)."""
        assert not self.pending, "the conductor loads only between requests"
        self._policy = None
        self._queue.clear_prompts()
        self._cache.clear()
        if self._model is None or policy.model_config_json != self._config_json:
            self._model, self._base_digest = None, b""
            self._model = build_model(policy, DTYPES[self.precision], self.device)
            self._config_json = policy.model_config_json
            # Renamed in transformers 5.24; the old name warns there.
            known = signature(self._model.forward).parameters
            self._cache_argument = "cache" if "cache" in known else "past_key_values"
        if policy.vocabulary_size > self._model.get_input_embeddings().num_embeddings:
            raise LoadRefused(f"the run's vocabulary of {policy.vocabulary_size} is larger than the model's")
        self._load_weights(policy)
        self._policy = policy

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Engine.submit`)."""
        self._calls += 1
        self._queue.waiting.extend(_Waiting(request, self._calls) for request in requests)

    def step(self) -> list[Outcome]:
        """Advance all rows by one token, seat newcomers, and return what finished (see `Engine.step`)."""
        try:
            with _naming_exhaustion(), torch.inference_mode():
                logits = self._decode()
                logits += [state.logits.unsqueeze(0) for state in self._seat()]
                outcomes = self._advance(logits[0] if len(logits) == 1 else torch.cat(logits)) if logits else []
            if not self.pending:
                # An idle engine remembers nothing, so that the next call's result depends on nothing before it.
                self._queue.clear_prompts()
            return outcomes
        except OutOfMemory as e:
            reason = str(e)
        # Outside the handler: the exception's frames hold tensors of this step.
        return self._shrink(reason)

    def score(self, request: ScoreRequest) -> list["array[float]"]:
        """Return the log-probabilities of given completions, one forward pass each (see `ScoringEngine.score`)."""
        found: list[array[float]] = []
        try:
            with _naming_exhaustion(), torch.inference_mode():
                for prompt, completion in request.items:
                    # The last token predicts nothing that is asked for.
                    ids = torch.tensor([[*prompt, *completion[:-1]]], device=self.device)
                    logits = self._forward(ids, DynamicCache(), logits_to_keep=len(completion))[0]
                    found.append(array("f", token_logprobs(logits, completion, request.temperature)))
        except OutOfMemory as e:
            raise CannotScore(f"out of memory while scoring: {e}") from e
        return found

    def wait_s(self) -> float:
        """Return 0: a step always computes."""
        return 0.0

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._rows) + len(self._queue.waiting)

    def report(self) -> BackendReport:
        """Say what samples here."""
        if self.device.type == "cpu":
            device = f"cpu ({torch.get_num_threads()} threads)"
        else:
            device = torch.cuda.get_device_name(self.device)
        return BackendReport(
            backend="torch",
            build=f"torch {torch.__version__}",
            precision=self.precision,
            device=device[:128],
            batch=self.batch,
        )

    def _load_weights(self, policy: PolicyFiles) -> None:
        """Load a whole model, or an adapter over a base that is read only if it is not the one held."""
        if policy.base is None or policy.base_digest != self._base_digest:
            self._base_digest = b""
            remove_adapter(self._model)
            load_weights(self._model, policy.base or policy.artifact)
            self._base_digest = policy.base_digest
        if policy.base is not None:
            apply_adapter(self._model, policy.artifact)

    # One step, in the order of the drawing.

    def _decode(self) -> list[torch.Tensor]:
        """Run all rows through the model. Returns one tensor of logits [rows, vocabulary], none when nothing runs."""
        if not self._rows:
            return []
        last = torch.tensor([[row.last_id] for row in self._rows], device=self.device)
        positions, mask = self._cache.begin_step(self.device)
        logits = self._forward(last, self._cache, position_ids=positions, attention_mask=mask)[:, -1]
        self._cache.end_step()
        return [logits]

    def _seat(self) -> list[PromptState]:
        """Give free slots to waiting requests. Returns the newcomers' prompts, in the order of their rows."""
        seated: list[PromptState] = []
        while len(self._rows) < self.batch and self._queue.waiting and self._may_join(self._queue.waiting[0]):
            head = self._queue.waiting[0]
            prompt = self._queue.prompts.get(head.request.prompt_ids) or self._prefill()
            # First: the cache grows here, and a request that was taken off the queue before that would be lost.
            self._cache.add(prompt)
            self._queue.waiting.popleft()
            self._running_call = head.call
            self._rows.append(Row.start(head.request, head.call))
            seated.append(prompt)
            if head.request.prompt_ids not in self._queue.recent:
                self._queue.recent.append(head.request.prompt_ids)
        if seated:
            self._forget_prompts()
        return seated

    def _may_join(self, head: _Waiting) -> bool:
        return not self.options.isolate or not self._rows or head.call == self._running_call

    def _prefill(self) -> PromptState:
        """Run the prompts of the next requests in one pass. Returns the first one's state."""
        prompts = self._next_prompts()
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        # Padded on the right: causal attention never looks there, so that no mask is needed.
        ids = torch.tensor([[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts], device=self.device)
        ends, place = torch.unique(torch.tensor(lengths, device=self.device) - 1, return_inverse=True)
        cache = DynamicCache()
        logits = self._forward(ids, cache, logits_to_keep=ends)
        logits = logits[torch.arange(len(prompts), device=self.device), place]
        layers = [(layer.keys, layer.values) for layer in cast("list[Any]", cache.layers)]
        self._queue.prompts.update(zip(prompts, split_prompts(layers, logits, lengths), strict=True))
        return self._queue.prompts[prompts[0]]

    def _next_prompts(self) -> list[tuple[int, ...]]:
        """Distinct prompts, not yet run, of the next `batch` waiting requests, as many as one pass may hold."""
        prompts: dict[tuple[int, ...], None] = {}
        width = 0
        for index, item in enumerate(self._queue.waiting):
            prompt = item.request.prompt_ids
            if index >= self.batch or (self.options.isolate and item.call != self._queue.waiting[0].call):
                break
            if prompt in prompts or prompt in self._queue.prompts:
                continue
            width = max(width, len(prompt))
            if prompts and width * (len(prompts) + 1) > PREFILL_TOKENS:
                break
            prompts[prompt] = None
        return list(prompts)

    def _forget_prompts(self) -> None:
        """Keep only prompts that a waiting request will need (what was run ahead, or a group partly seated), and a few.

        With `isolate` none for a later call: its result would depend on this one.
        """
        queue, isolate = self._queue, self.options.isolate
        waiting = [item for item in islice(queue.waiting, self.batch) if not isolate or item.call == self._running_call]
        needed = {item.request.prompt_ids for item in waiting}
        kept = {ids: state for ids, state in queue.prompts.items() if ids in needed}
        if not isolate:
            spare = [ids for ids in queue.recent if ids in queue.prompts and ids not in needed]
            kept |= {ids: queue.prompts[ids].alone() for ids in spare}
        queue.prompts = kept

    def _forward(self, ids: torch.Tensor, cache: Any, **arguments: Any) -> torch.Tensor:
        assert self._policy is not None
        self._before_forward(ids.shape[0])
        arguments[self._cache_argument] = cache
        logits = self._model(input_ids=ids, use_cache=True, **arguments).logits
        # Rows beyond the vocabulary are padding of the embedding; cut off, they cannot be sampled.
        return logits[..., : self._policy.vocabulary_size]

    def _advance(self, logits: torch.Tensor) -> list[Outcome]:
        """Draw one token a row and retire what is finished."""
        assert self._policy is not None
        uniforms = [row.uniforms.random() for row in self._rows]
        ids, logprobs = draw(logits, [row.request.temperature for row in self._rows], uniforms)
        outcomes: list[Outcome] = []
        # From the last to the first, so that the row which moves into a hole has been looked at.
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            outcome = row.append(ids[index], logprobs[index], self._policy)
            if outcome is None:
                continue
            outcomes.append(outcome)
            moved = self._cache.remove(index, scrub=not isinstance(outcome, Completion))
            self._rows[index] = self._rows[moved]
            self._rows.pop()
        return outcomes

    def _shrink(self, reason: str) -> list[Outcome]:
        """Halve the batch and start its rows over later; a request that does not fit alone fails."""
        rows, self._rows = self._rows, []
        self._queue.clear_prompts()
        self._cache.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        # Same seed from the start: the tokens drawn so far are drawn again.
        self._queue.waiting.extendleft(_Waiting(row.request, row.call) for row in reversed(rows))
        if self.batch > 1:
            self.batch //= 2
            return []
        lost = self._queue.waiting.popleft().request
        return [FailedRequest(request_id=lost.request_id, code=FailureCode.OUT_OF_MEMORY, reason=reason)]


@contextmanager
def _naming_exhaustion() -> Generator[None]:
    """Turn every way in which an allocation fails into OutOfMemory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as e:
        raise OutOfMemory(str(e).partition("\n")[0][:300]) from e
    except RuntimeError as e:
        # The CPU allocator has no error type of its own.
        if "not enough memory" not in str(e) and "can't allocate" not in str(e):
            raise
        raise OutOfMemory(str(e).partition("\n")[0][:300]) from e


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
