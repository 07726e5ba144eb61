"""Field case 37: the ids that are trained on are those that were sampled, whatever their text would be turned into.

Real coordinator, real node, a network in memory; the children stand in, so that no tokenizer is on the way at all.
"""

import itertools
import json
import math
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tokenizers import Tokenizer, decoders, models

from echo_node.backends.base import Completion
from echo_node.backends.inline import InlineBackend
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine
from echo_swarm import codec
from tests.swarm.support.whole_run import make_run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


class Recording(ScriptedEngine):
    """Notes the completions that it gives."""

    def __init__(self, options: ScriptedOptions) -> None:
        super().__init__(options)
        self.sampled: list[bytes] = []

    def step(self):
        outcomes = super().step()
        self.sampled += [codec.pack_u32(o.token_ids) for o in outcomes if isinstance(o, Completion)]
        return outcomes


def merging_tokenizer(vocabulary_size: int) -> Tokenizer:
    """A tokenizer of all ids: some letters, and pairs of them: [a, b] → text → [ab]."""
    letters = [chr(0x4E00 + number) for number in range(math.isqrt(vocabulary_size))]
    pairs = list(itertools.islice(itertools.product(letters, letters), vocabulary_size - len(letters)))
    texts = [*letters, *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=pairs))
    made.decoder = decoders.Fuse()
    return made


async def test_ids_that_their_own_text_would_not_give_are_trained_byte_by_byte_as_they_were_sampled(tmp_path: Path):
    run = make_run(tmp_path, updates=4)
    tokenizer = merging_tokenizer(json.loads((run.folder.model / "config.json").read_text())["vocab_size"])
    engine = Recording(ScriptedOptions(batch=4, length=12.0))

    @asynccontextmanager
    async def open_backend():
        yield InlineBackend(engine)

    async with run.coordinator() as coordinator, run.node(open_backend=open_backend):
        with anyio.fail_after(120):
            await coordinator.ended.wait()
    trained = [member.token_ids for batch in run.trainer.trained for member in batch.members]
    assert len(trained) >= 4 * 8 and set(trained) <= set(engine.sampled)
    split = [
        ids for raw in trained if tokenizer.encode(tokenizer.decode(ids := list(codec.unpack_u32(raw)))).ids != ids
    ]
    assert split, "some would have come out otherwise by way of their text"
