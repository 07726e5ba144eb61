"""What vLLM is told to take of a GPU."""

import pytest

from echo_node.backends.base import OutOfMemory
from echo_node.backends.gpu_memory import memory_share

GIB = 1 << 30


def test_a_free_gpu_gives_what_is_wanted() -> None:
    assert memory_share(0.85, [(140 * GIB, 141 * GIB)]) == 0.85
    assert memory_share(0.85, []) == 0.85


def test_a_gpu_that_a_desktop_uses_gives_what_is_free_but_for_a_rest() -> None:
    assert memory_share(0.85, [(int(6.5 * GIB), 8 * GIB)]) == 0.687
    assert memory_share(0.5, [(int(6.5 * GIB), 8 * GIB)]) == 0.5


def test_of_several_the_fullest_counts() -> None:
    assert memory_share(0.85, [(24 * GIB, 24 * GIB), (13 * GIB, 24 * GIB)]) == 0.5


def test_a_full_one_is_named_with_its_figures() -> None:
    with pytest.raises(OutOfMemory, match="1024 MiB of the GPU's 8192 MiB are free"):
        memory_share(0.85, [(GIB, 8 * GIB)])
