"""Errors of ours as they are, not inside the groups that task groups make of them."""

from collections.abc import Generator
from contextlib import contextmanager

from echo_swarm.errors import EchoError


@contextmanager
def bare_errors() -> Generator[None]:
    """Raise the first EchoError of a group instead of the group, unless something else is in it too."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = _leaves(group)
        if all(isinstance(error, EchoError) for error in leaves):
            raise leaves[0] from None
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(error)
        else:
            found.append(error)
    return found
