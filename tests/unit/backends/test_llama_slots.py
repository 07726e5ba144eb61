"""Seats, shared prompts and moves, on a memory that only notes what each sequence holds."""

from random import Random

import pytest

from echo_node.backends.llama_slots import Slot, SlotTable
from echo_node.backends.rows import Row
from tests.unit.backends.support import request

A, B = (1, 2, 3, 4), (5, 6)


class Notebook:
    """What llama.cpp would hold: for each sequence, its tokens."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.copies = 0
        self.wiped = False

    def copy(self, source: int, target: int) -> None:
        assert source != target
        self.copies += 1
        self.tokens[target] = list(self.tokens[source])

    def trim(self, sequence: int, length: int) -> None:
        assert length <= len(self.tokens[sequence]) or length == 0
        del self.tokens[sequence][length:]

    def clear(self, *, numbers: bool) -> None:
        self.tokens = [[] for _ in self.tokens]
        self.wiped |= numbers


def table_of(count: int) -> tuple[SlotTable, Notebook]:
    memory = Notebook(count)
    return SlotTable(count, memory), memory


def row(prompt: tuple[int, ...], request_id: int = 0) -> Row:
    return Row.start(request(request_id, prompt_ids=prompt), call=0)


def evaluate(table: SlotTable, memory: Notebook, budget: int = 100) -> int:
    """Do what a step does with prompts. Returns the tokens run."""
    chunks = table.next_chunks(budget)
    for slot in list(table.slots):
        if count := chunks.get(slot.index, 0):
            memory.tokens[slot.index] += slot.prompt[slot.evaluated : slot.evaluated + count]
            table.evaluated(slot, count)
    return sum(chunks.values())


def write(memory: Notebook, slot: Slot, token: int) -> None:
    memory.tokens[slot.index].append(token)
    slot.length += 1


def test_a_group_runs_its_prompt_once() -> None:
    table, memory = table_of(3)
    slots = [table.seat(row(A), logits_known=False) for _ in range(3)]
    assert [slot.evaluating for slot in slots] == [True, False, False]
    assert evaluate(table, memory) == 4
    assert all(slot.running for slot in slots) and memory.copies == 2
    assert memory.tokens == [list(A)] * 3


def test_the_next_of_a_group_takes_a_freed_slot_without_a_copy() -> None:
    table, memory = table_of(2)
    first, second = (table.seat(row(A), logits_known=False) for _ in range(2))
    evaluate(table, memory)
    copies = memory.copies
    for slot in (first, second):
        write(memory, slot, 9)
    table.release(second)
    assert table.seat(row(A), logits_known=True) is second
    assert second.running and memory.copies == copies
    assert memory.tokens == [[*A, 9], list(A)]


def test_a_prompt_is_copied_from_a_slot_that_runs_and_trimmed() -> None:
    table, memory = table_of(2)
    first = table.seat(row(A), logits_known=False)
    evaluate(table, memory)
    write(memory, first, 9)
    second = table.seat(row(A), logits_known=True)
    assert second.running and memory.tokens == [[*A, 9], list(A)]


def test_without_the_prompts_logits_only_its_last_token_is_run_again() -> None:
    table, memory = table_of(2)
    table.seat(row(A), logits_known=False)
    evaluate(table, memory)
    second = table.seat(row(A), logits_known=False)
    assert second.evaluating and second.evaluated == 3
    assert evaluate(table, memory) == 1
    assert memory.tokens == [list(A)] * 2


def test_a_long_prompt_is_run_in_chunks_first_come_first_served() -> None:
    table, memory = table_of(2)
    table.seat(row(A), logits_known=False)
    table.seat(row(B), logits_known=False)
    assert table.next_chunks(3) == {0: 3}
    evaluate(table, memory, 3)
    assert table.next_chunks(3) == {0: 1, 1: 2}
    evaluate(table, memory, 3)
    assert all(slot.running for slot in table.slots) and memory.tokens == [list(A), list(B)]


def test_moved_slots_leave_no_hole_and_keep_what_they_hold() -> None:
    table, memory = table_of(4)
    slots = [table.seat(row((i + 1, 9)), logits_known=False) for i in range(4)]
    evaluate(table, memory)
    table.release(slots[0])
    table.release(slots[2])
    table.compact()
    assert [slot.row is not None for slot in table.slots] == [True, True, False, False]
    assert [slot.index for slot in table.slots] == [0, 1, 2, 3]
    assert [memory.tokens[slot.index] for slot in (slots[1], slots[3])] == [[2, 9], [4, 9]]


@pytest.mark.parametrize("company", [True, False])
def test_spoiled_memory_is_overwritten(company: bool) -> None:
    table, memory = table_of(2)
    slot = table.seat(row(A), logits_known=False)
    other = table.seat(row(B), logits_known=False)
    evaluate(table, memory)
    if not company:
        table.release(other)
    table.release(slot, spoiled=True)
    assert not slot.prompt and memory.tokens[slot.index] == []
    assert memory.wiped != company


def test_any_order_of_events_keeps_each_completion_with_its_own_tokens() -> None:
    """A thousand random steps: seats, chunks, tokens, ends and moves; memory is compared after each."""
    random = Random(5)
    table, memory = table_of(5)
    written: dict[int, list[int]] = {}
    known: set[tuple[int, ...]] = set()
    for step in range(1000):
        while not table.full and random.random() < 0.5:
            prompt = random.choice([A, B, (1,), (7,) * 9])
            slot = table.seat(row(prompt, step), logits_known=prompt in known and random.random() < 0.8)
            written[id(slot)] = []
        evaluate(table, memory, random.randrange(1, 8))
        for slot in list(table.slots):
            if slot.running:
                known.add(slot.prompt)
                assert memory.tokens[slot.index] == [*slot.prompt, *written[id(slot)]]
                assert slot.length == len(memory.tokens[slot.index])
                written[id(slot)].append(step)
                write(memory, slot, step)
                if random.random() < 0.3:
                    table.release(slot)
        if random.random() < 0.5:
            table.compact()
            occupied = [slot.row is not None for slot in table.slots]
            assert occupied == sorted(occupied, reverse=True)
        if not table.occupied:
            table.forget()
            known.clear()
