"""Which sequence of a llama.cpp context serves which completion, and what its memory holds. Calls no model.

A slot is one sequence. What a finished completion leaves in its memory begins with its prompt, and stays until the slot
is used again. So a prompt is run through the model once for a group, however few slots there are:

    prompt in the free slot itself      trim it to the prompt                     nothing is copied
    prompt in another slot              copy that slot, trim                      one copy of a sequence's memory
    prompt being run in another slot    take the seat, wait, then copy
    prompt nowhere                      run it

Seats are given and moved so that the occupied slots are the first ones: llama.cpp computes only neighbours together.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from echo_node.backends.rows import Row


class SequenceMemory(Protocol):
    """What a context offers (see `LlamaContext`)."""

    def copy(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""
        ...

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens."""
        ...

    def clear(self, *, numbers: bool) -> None:
        """Forget all sequences; `numbers`: and overwrite what was computed for them."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One sequence."""

    index: int
    row: Row | None = None
    """The completion that it serves; None when free."""
    prompt: tuple[int, ...] = ()
    """What its memory begins with, or will once `evaluated` has reached its length."""
    evaluated: int = 0
    """Tokens of the prompt in memory."""
    length: int = 0
    """Tokens in memory."""
    donor: "Slot | None" = None
    """Runs the same prompt and will be copied."""

    @property
    def complete(self) -> bool:
        """Whether the memory holds the whole prompt."""
        return bool(self.prompt) and self.evaluated == len(self.prompt)

    @property
    def running(self) -> bool:
        """Whether it draws tokens."""
        return self.row is not None and self.evaluated == len(self.prompt)

    @property
    def evaluating(self) -> bool:
        """Whether (the rest of) its prompt is to be run through the model."""
        return self.row is not None and self.donor is None and self.evaluated < len(self.prompt)


class SlotTable:
    """All slots of a context (see the module's docstring)."""

    def __init__(self, count: int, memory: SequenceMemory) -> None:
        """`memory` must be empty."""
        self.slots = [Slot(index=index) for index in range(count)]
        """By index."""
        self._memory = memory
        self._queue: list[Slot] = []
        self.occupied = 0
        """Slots that serve a completion."""

    @property
    def full(self) -> bool:
        """Whether every slot serves a completion."""
        return self.occupied == len(self.slots)

    def seat(self, row: Row, *, logits_known: bool) -> Slot:
        """Give a free slot to `row`; there must be one.

        `logits_known`: those after the prompt are at hand, so that its last token need not be run again.
        """
        prompt = row.request.prompt_ids
        same = [slot for slot in self.slots if slot.prompt == prompt]
        donor = next((slot for slot in same if slot.evaluating), None)
        holder = next((slot for slot in same if slot.complete and slot.row is None), None)
        holder = holder or next((slot for slot in same if slot.complete), None)
        slot = holder if holder and holder.row is None else next(slot for slot in self.slots if slot.row is None)
        slot.row, slot.prompt = row, prompt
        self.occupied += 1
        if holder and logits_known:
            self._take_over(slot, holder, len(prompt))
        elif donor:
            slot.donor, slot.evaluated, slot.length = donor, 0, 0
        else:
            self._take_over(slot, holder, len(prompt) - 1 if holder else 0)
            self._queue.append(slot)
        return slot

    def next_chunks(self, budget: int) -> dict[int, int]:
        """Return how many prompt tokens to run now, by slot index; first come, first served, `budget` in all."""
        chunks: dict[int, int] = {}
        for slot in self._queue:
            if budget <= 0:
                break
            chunks[slot.index] = min(budget, len(slot.prompt) - slot.evaluated)
            budget -= chunks[slot.index]
        return chunks

    def evaluated(self, slot: Slot, count: int) -> list[Slot]:
        """Note that `count` more prompt tokens were run. Returns the slots that waited for them, now complete."""
        slot.evaluated += count
        slot.length += count
        if not slot.complete:
            return []
        self._queue.remove(slot)
        waiting = [other for other in self.slots if other.donor is slot]
        for other in waiting:
            other.donor = None
            self._take_over(other, slot, len(slot.prompt))
        return waiting

    def release(self, slot: Slot, *, spoiled: bool = False) -> None:
        """Free a running slot. `spoiled`: its memory holds numbers that are not finite, and must be overwritten."""
        slot.row = None
        self.occupied -= 1
        if spoiled:
            self._scrub(slot)

    def compact(self) -> None:
        """Move the last occupied slots into the first free ones."""
        while 0 < self.occupied < len(self.slots):
            hole = next(slot for slot in self.slots if slot.row is None)
            last = next(slot for slot in reversed(self.slots) if slot.row is not None)
            if hole.index > last.index:
                return
            if last.length:
                self._memory.copy(last.index, hole.index)
            else:
                self._memory.trim(hole.index, 0)
            # The slots change places in memory, so that whoever refers to one still refers to the same completion.
            hole.index, last.index = last.index, hole.index
            self.slots[hole.index], self.slots[last.index] = hole, last
            self._empty(hole)

    def forget(self, *, numbers: bool = False) -> None:
        """Forget what free slots hold; all of them must be free. `numbers`: overwrite it too."""
        assert not self.occupied
        self._memory.clear(numbers=numbers)
        for slot in self.slots:
            slot.prompt, slot.evaluated, slot.length = (), 0, 0

    def rows(self) -> Iterable[Row]:
        """Return the completions that are being served."""
        return [slot.row for slot in self.slots if slot.row is not None]

    def _take_over(self, slot: Slot, holder: Slot | None, length: int) -> None:
        """Let `slot` hold the first `length` tokens of its prompt, from `holder`, which may be the slot itself."""
        if holder and holder is not slot:
            self._memory.copy(holder.index, slot.index)
        self._memory.trim(slot.index, length)
        slot.evaluated = slot.length = length

    def _empty(self, slot: Slot) -> None:
        self._memory.trim(slot.index, 0)
        slot.prompt, slot.evaluated, slot.length = (), 0, 0

    def _scrub(self, slot: Slot) -> None:
        """Overwrite a sequence's memory: 0 times NaN is NaN, so that masked cells would spoil the next completion."""
        sound = [other for other in self.slots if other is not slot and (other.row is None or other.running)]
        if self.occupied and sound:
            self._memory.copy(sound[0].index, slot.index)
            self._empty(slot)
        elif not self.occupied:
            self.forget(numbers=True)
