"""What a node may be: which flags go with a role, and which program it is."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from echo_node.config import NodeConfig
from echo_swarm.errors import UsageError
from echo_swarm.invite import Invite
from echo_swarm.work import Role

ROLES = (Role.INFERENCE, Role.SEEDER)
"""Those that `join` knows; the coordinator has a program of its own."""


def check_role(role: str, *, sampling: Mapping[str, object], outbound_only: bool, hold: Sequence[str] | None) -> None:
    """Check what a person asked for.

    Args:
        role: as the person wrote it.
        sampling: the flags that only a sampling node has, and whether (or to what) they were set.
        outbound_only: whether it may not listen.
        hold: kinds of files for a seeder.

    Raises:
        UsageError: there is no such role, or a flag does not go with it.

    """
    if role not in ROLES:
        raise UsageError(f"--role {role}: the roles are {' and '.join(ROLES)}")
    if role == Role.INFERENCE:
        if hold:
            raise UsageError("--hold goes with --role seeder; a sampling node holds what its backend loads")
        return
    for flag, given in sampling.items():
        if given:
            raise UsageError(f"{flag} does not go with --role seeder, which samples nothing; leave it out")
    if outbound_only:
        raise UsageError("--outbound-only does not go with --role seeder: others must be able to reach it")


def take_part(config: NodeConfig, invite: Invite, console: Console) -> None:
    """Do what the role says until the run is finished or a signal comes. Raises EchoError."""
    # Only the one that is asked for: a seeder has nothing to do with backends.
    if config.role is Role.SEEDER:
        from echo_node.seed import seed as run
    else:
        from echo_node.join import join as run
    run(config, invite, console)
