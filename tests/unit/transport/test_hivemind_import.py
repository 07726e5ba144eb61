"""hivemind is heavy and optional: it is imported when a host is opened, and its absence is told."""

import subprocess
import sys

import pytest

from echo_swarm.errors import HeldBack, UsageError
from echo_swarm.extras import install_command
from echo_swarm.identity import Identity
from echo_swarm.transport.hivemind import open_hivemind_host, unreachable

WITHOUT_HIVEMIND = """
import sys
import echo_swarm.transport.hivemind as module
import echo_swarm.directory.dht
assert not {"hivemind", "torch"} & set(sys.modules), "imported too early"
sys.modules["hivemind"] = None
import anyio
from echo_swarm.errors import LocalFault
from echo_swarm.identity import Identity

async def main():
    try:
        async with module.open_hivemind_host(Identity.generate()):
            print("opened")
    except LocalFault as e:
        print(e)

anyio.run(main)
"""


def test_without_hivemind_the_error_says_what_to_install() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_HIVEMIND], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert install_command("hivemind") in result.stdout


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_on_trio_the_host_is_refused_with_an_alternative(anyio_backend: str) -> None:
    with pytest.raises(UsageError, match="asyncio only"):
        async with open_hivemind_host(Identity.generate()):
            pytest.fail("opened")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("failed to dial 12D3: all dials failed\n * [/ip4/127.0.0.1/tcp/1] connect: connection refused", "connection"),
        ("failed to dial: dial backoff", "tried a moment ago"),
        ("peer id mismatch: expected A, but remote key matches B", "another identity"),
        ("failed to negotiate protocol: protocols not supported: [/x]", "protocol not supported"),
        ("routing: not found", "no address known"),
        ("context deadline exceeded", "timed out"),
        ("something\nnew", "something"),
    ],
)
def test_the_helpers_errors_become_a_few_words(text: str, reason: str) -> None:
    error = unreachable("whom", text)
    assert str(error).startswith(f"whom: {reason}")
    assert isinstance(error, HeldBack) == ("backoff" in text)
    assert len(str(unreachable("", text * 100))) <= 162
