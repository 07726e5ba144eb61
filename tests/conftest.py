"""Fixtures shared by all tests."""

from collections.abc import Callable, Generator

import pytest

from tests.cgroups import Group, making_groups


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Shared and node code runs on both event loops; folders that need hivemind override this."""
    return request.param


@pytest.fixture
def limited() -> Generator[Callable[[int, float], Group]]:
    """Make groups with so much memory and so many processors; they are gone after the test."""
    with making_groups() as make:
        yield make
