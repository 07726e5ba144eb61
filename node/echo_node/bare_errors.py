"""Errors of ours as they are, not inside the groups that task groups make of them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

from echo_swarm.errors import EchoError

E = TypeVar("E", bound=BaseException)


@contextmanager
def bare_errors() -> Generator[None]:
    """Raise the first EchoError of a group instead of the group, unless something else is in it too."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = leaves(group)
        if all(isinstance(error, EchoError) for error in found):
            raise found[0] from None
        raise


def leaves(group: BaseExceptionGroup[E]) -> list[E]:
    """Return the errors of a group and of the groups in it."""
    found: list[E] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
