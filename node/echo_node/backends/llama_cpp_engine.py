"""Continuous batching over a llama.cpp context, with exact log-probabilities. Neither torch nor transformers.

One step:

    waiting ─► free slots ─► prompt known? ── yes ─► draw its first token from the kept logits
                                           └─ no ──► evaluate it, in chunks
    one llama_decode: the newest token of every running slot + up to PROMPT_TOKENS prompt tokens ─► logits
    logits ─► one draw for all ─► tokens, finished rows, free slots (taken at the beginning of the next step)

A group's completions share one evaluation of their prompt (see `llama_slots`). A context is never shifted: a sequence's
memory has room for the longest prompt and completion that the run allows.

Determinism: for the same weights, options and build, the same requests submitted in one call to an idle engine give the
same bits. Which requests share a step changes the last bits of their logits (a matrix product sums in another order for
another number of rows), so that with other company a seed gives the same ids except where a uniform falls within that
rounding of a boundary between two ids; a completion differs from there on. Log-probabilities are right either way.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

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
from echo_node.backends.inverse_cdf import Drawer, Floats
from echo_node.backends.llama_context import ContextShape, LlamaContext
from echo_node.backends.llama_files import OpenFiles
from echo_node.backends.llama_library import build, has_gpu, library
from echo_node.backends.llama_slots import Slot, SlotTable
from echo_node.backends.options import LlamaCppOptions
from echo_node.backends.rows import Row
from echo_node.machine import cpu_count
from echo_swarm.work import BackendReport

PROMPT_TOKENS = 512
"""Prompt tokens that one step runs beside the running completions: a long prompt holds them up by this much."""


class LlamaCppEngine:
    """An `Engine` on llama.cpp. See the module's docstring for the flow and for what is deterministic."""

    def __init__(self, options: LlamaCppOptions | None = None) -> None:
        """Raises BackendFailed when llama-cpp-python is not there."""
        self.options = options or LlamaCppOptions()
        library()
        self.batch = self.options.batch
        self.threads = self.options.threads or cpu_count()
        self.gpu_layers = self.options.gpu_layers if has_gpu() else 0
        self.evaluated_prompt_tokens = 0
        """Prompt tokens run through the model since the start; a shared prompt counts once."""
        self.decode_calls = 0
        self._build = build()
        self._policy: PolicyFiles | None = None
        self._files = OpenFiles()
        self._context: LlamaContext | None = None
        self._table: SlotTable | None = None
        self._drawer = Drawer(1)
        self._waiting: deque[GenerationRequest] = deque()
        self._refused: list[Outcome] = []
        self._known: dict[tuple[int, ...], Floats] = {}
        """Logits after prompts that a waiting request will need."""

    def load(self, policy: PolicyFiles) -> None:
        """Close the old files and open the new ones (see `Engine.load`): memory for two is never needed.

        The context is made anew: it knows neither an old adapter nor a key or value that was computed with it.
        """
        assert not self.pending, "the conductor loads only between requests"
        self._policy = None
        self._drop_context()
        try:
            self._files.load(policy, gpu_layers=self.gpu_layers)
            self._policy = policy
            self._drawer = Drawer(policy.vocabulary_size)
            self._make_context()
        except LoadRefused:
            self.close()
            raise

    def close(self) -> None:
        """Give model and context back."""
        self._policy = None
        self._drop_context()
        self._files.close()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Engine.submit`); the next step refuses those beyond a context that was set by hand."""
        context = self.options.context
        for request in requests:
            if context is None or len(request.prompt_ids) + request.max_tokens <= context:
                self._waiting.append(request)
            else:
                self._refused.append(_too_long(request, context))

    def step(self) -> list[Outcome]:
        """Seat newcomers, advance all slots, and return what finished (see `Engine.step`)."""
        assert self._table is not None
        refused, self._refused = self._refused, []
        try:
            outcomes = self._seat(self._table)
            if self._table.occupied:
                outcomes += self._decode(self._table)
        except OutOfMemory as e:
            return refused + self._shrink(e)
        if not self._waiting:
            self._table.compact()
        if not self.pending:
            # An idle engine remembers nothing, so that the next call's result depends on nothing before it.
            self._known.clear()
            self._table.forget()
        return refused + outcomes

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        """Return the log-probabilities of given completions, one after the other (see `ScoringEngine.score`)."""
        assert not self.pending and self._table is not None
        scores: list[array[float]] = []
        for prompt, completion in request.items:
            if len(prompt) + len(completion) > (self.options.context or len(prompt) + len(completion)):
                raise CannotScore(f"this node's context is {self.options.context} (--backend llama_cpp:context=...)")
            scores.append(self._score_one([*prompt, *completion], len(prompt), request.temperature))
        self._table.forget()
        return scores

    def _score_one(self, ids: list[int], prompt: int, temperature: float) -> "array[float]":
        """Run `ids` through the first sequence; logits are wanted from the prompt's last token on."""
        assert self._context is not None
        self._context.trim(0, 0)
        scores = array("f")
        start = 0
        while start < len(ids) - 1:
            wants = start >= prompt - 1
            # As many rows of logits at once as there are sequences.
            stop = min(start + self.batch, len(ids) - 1) if wants else min(start + PROMPT_TOKENS, prompt - 1)
            count = stop - start
            logits = self._context.decode(ids[start:stop], range(start, stop), [0] * count, [wants] * count)
            if wants:
                scores.extend(self._drawer.logprobs_of(ids[start + 1 : stop + 1], logits, temperature))
            start = stop
        return scores

    def wait_s(self) -> float:
        """Return 0: a step always computes."""
        return 0.0

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return (self._table.occupied if self._table else 0) + len(self._waiting) + len(self._refused)

    def report(self) -> BackendReport:
        """Say what samples here. The precision is that of the file, so it is known only after a load."""
        device = f"cpu ({self.threads} threads)"
        if self.gpu_layers:
            device = "gpu" if self.gpu_layers < 0 else f"gpu ({self.gpu_layers} layers), {device}"
        precision = self._files.model.precision if self._files.model else "gguf"
        return BackendReport(
            backend="llama_cpp", build=self._build, precision=precision, device=device, batch=self.batch
        )

    # One step, in the order of the drawing.

    def _seat(self, table: SlotTable) -> list[Outcome]:
        """Give free slots to waiting requests; draw at once for those whose prompt's logits are kept."""
        outcomes: list[Outcome] = []
        while self._waiting and not table.full:
            ready: list[Slot] = []
            while self._waiting and not table.full:
                row = Row.start(self._waiting.popleft(), call=0)
                slot = table.seat(row, logits_known=row.request.prompt_ids in self._known)
                if slot.running:
                    ready.append(slot)
            if ready:
                logits = np.stack([self._known[slot.prompt] for slot in ready])
                outcomes += self._advance(table, ready, logits)
            self._forget_prompts()
        return outcomes

    def _decode(self, table: SlotTable) -> list[Outcome]:
        """Run one batch through the model, and draw for every slot that got logits."""
        assert self._context is not None
        ids: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        drawing: list[Slot] = []
        chunks = table.next_chunks(PROMPT_TOKENS)
        for slot in table.slots:
            start = slot.length
            if slot.running:
                assert slot.row is not None
                tokens: Sequence[int] = (slot.row.last_id,)
                last = True
                slot.length += 1
            elif count := chunks.get(slot.index, 0):
                tokens = slot.prompt[slot.evaluated : slot.evaluated + count]
                last = slot.evaluated + count == len(slot.prompt)
            else:
                continue
            ids += tokens
            positions += range(start, start + len(tokens))
            sequences += [slot.index] * len(tokens)
            wanted += [False] * (len(tokens) - 1)
            wanted.append(last)
            if last:
                drawing.append(slot)
        logits = self._context.decode(ids, positions, sequences, wanted)
        self.decode_calls += 1
        return self._take_logits(table, chunks, drawing, logits)

    def _take_logits(
        self, table: SlotTable, chunks: dict[int, int], drawing: list[Slot], logits: Floats
    ) -> list[Outcome]:
        """Note what was computed; let the slots that waited for a prompt draw from its logits too."""
        places = list(range(len(drawing)))
        place_of = {slot.index: place for place, slot in enumerate(drawing)} if chunks else {}
        for slot in table.slots if chunks else ():
            count = chunks.get(slot.index, 0)
            if not count:
                continue
            self.evaluated_prompt_tokens += count
            waited = table.evaluated(slot, count)
            if slot.complete:
                place = place_of[slot.index]
                if self._is_needed(slot.prompt):
                    self._known[slot.prompt] = logits[place].copy()
                drawing += waited
                places += [place] * len(waited)
        if not drawing:
            return []
        return self._advance(table, drawing, logits if len(places) == len(logits) else logits[places])

    def _advance(self, table: SlotTable, slots: list[Slot], logits: Floats) -> list[Outcome]:
        """Draw one token a slot and retire what is finished."""
        assert self._policy is not None
        rows = [slot.row for slot in slots if slot.row is not None]
        temperatures = [row.request.temperature for row in rows]
        ids, logprobs = self._drawer.draw(logits, temperatures, [row.uniforms.random() for row in rows])
        outcomes: list[Outcome] = []
        for slot, row, token_id, logprob in zip(slots, rows, ids, logprobs, strict=True):
            outcome = row.append(token_id, logprob, self._policy)
            if outcome is not None:
                outcomes.append(outcome)
                table.release(slot, spoiled=not isinstance(outcome, Completion))
        return outcomes

    # Kept logits, and the context's life.

    def _is_needed(self, prompt: tuple[int, ...]) -> bool:
        return any(request.prompt_ids == prompt for request in islice(self._waiting, self.batch))

    def _forget_prompts(self) -> None:
        """Keep logits only for the next requests: a vocabulary's worth of numbers each."""
        if self._known:
            self._known = {prompt: logits for prompt, logits in self._known.items() if self._is_needed(prompt)}

    def _make_context(self) -> None:
        """Make a context for the whole batch, or for the largest half, quarter and so on that fits."""
        model = self._files.model
        assert self._policy is not None and model is not None
        longest = self.options.context or self._policy.max_prompt_tokens + self._policy.max_completion_tokens
        kv = self.options.kv or ("f32" if model.precision == "f32" else "f16")
        while True:
            shape = ContextShape(
                sequences=self.batch,
                tokens_per_sequence=longest,
                batch_tokens=self.batch + PROMPT_TOKENS,
                threads=self.threads,
                kv=kv,
                offload=self.gpu_layers != 0,
            )
            try:
                self._context = LlamaContext(model, shape, self._files.adapter)
                break
            except OutOfMemory as e:
                if self.batch == 1:
                    raise LoadRefused(f"not enough memory for a single completion: {e}") from e
                self.batch //= 2
        self._table = SlotTable(self.batch, self._context)

    def _drop_context(self) -> None:
        self._known.clear()
        self._table = None
        if self._context is not None:
            self._context.close()
            self._context = None

    def _shrink(self, error: OutOfMemory) -> list[Outcome]:
        """Halve the batch and start its rows over later; a request that does not fit alone fails."""
        assert self._table is not None
        # Same seed from the start: the tokens drawn so far are drawn again.
        self._waiting.extendleft(row.request for row in reversed(list(self._table.rows())))
        self._drop_context()
        lost: list[Outcome] = []
        if self.batch > 1:
            self.batch //= 2
        else:
            request = self._waiting.popleft()
            lost = [
                FailedRequest(request_id=request.request_id, code=FailureCode.OUT_OF_MEMORY, reason=str(error)[:300])
            ]
        self._make_context()
        return lost


def _too_long(request: GenerationRequest, context: int) -> FailedRequest:
    return FailedRequest(
        request_id=request.request_id,
        code=FailureCode.TOO_LONG,
        reason=f"prompt of {len(request.prompt_ids)} tokens and completion of up to {request.max_tokens}; "
        f"this node's context is {context} (--backend llama_cpp:context=...)",
    )
