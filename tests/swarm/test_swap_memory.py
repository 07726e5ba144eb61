"""Field case 53, for torch: new weights take the place of the old ones."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from echo_node.backends.base import PolicyFiles
from echo_node.backends.child import start_backend
from echo_node.backends.options import TorchOptions
from tests.backends.swap_memory import GROWTH, grown, lora_versions, whole_versions

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("make", [whole_versions, lora_versions])
async def test_twenty_swaps_leave_memory_where_it_was(
    tmp_path: Path, make: Callable[[Path], list[PolicyFiles]]
) -> None:
    versions = make(tmp_path)
    options = TorchOptions(batch=8, threads=1)
    with anyio.fail_after(120):
        async with start_backend(options, log_path=tmp_path / "log", nice=0) as backend:
            assert await grown(backend, versions) <= GROWTH
