"""Messages with one thing wrong: refused with a reason, each one, and the next good one is taken.

`python -m benchmarks.mutations` sends a hundred thousand, and some of them over hivemind's streams.
"""

from pathlib import Path
from random import Random

import anyio
import pytest

from benchmarks._mutations_make import broken_bytes, broken_values
from benchmarks._mutations_session import open_session
from echo_swarm.transport.memory import MemoryNetwork

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_thousands_of_wrong_messages_are_refused_and_good_ones_between_them_taken(tmp_path: Path):
    network = MemoryNetwork()
    with anyio.fail_after(300):
        async with open_session(tmp_path, network.host, peers=3, seed=7) as session:
            for _ in range(30):
                await session.batch(100)
    tally = session.tally
    assert not tally.faults, tally.faults[:10]
    assert (tally.sent, tally.good) == (3000, 30)
    # They get to where each rule is looked at, not only to the first.
    reasons = {outcome.partition(": ")[2] for outcome in tally.outcomes}
    assert reasons >= {"malformed", "bad_signature", "no_lease", "unknown_policy", "wrong_prompt", "bad_logprob"}


def test_what_is_made_is_wrong_in_one_place_and_leaves_the_original_alone():
    message = {"id": b"x" * 16, "count": 3, "parts": [{"name": "a", "share": 0.5}], "last": True}
    made = list(broken_values(message))
    assert message == {"id": b"x" * 16, "count": 3, "parts": [{"name": "a", "share": 0.5}], "last": True}
    assert all(repr(broken.value) != repr(message) for broken in made)
    said = {broken.what for broken in made}
    assert said >= {"id left out", "count is -1", "parts.0.share is nan", "parts.0 has a key too many", "last is 1"}
    random = Random(1)
    assert all(broken_bytes(b"some bytes", random).value != b"some bytes" for _ in range(500))
