"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Shared and node code runs on both event loops; folders that need hivemind override this."""
    return request.param
