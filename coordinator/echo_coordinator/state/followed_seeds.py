"""Whose work a run takes: everybody's, or only that of backends whose draws an audit follows from the seed.

Enforced in two places, since a node names its backend twice: at the hello, which is answered with `backend_refused`, so
that it gets no lease; and in each completion, where it may say something else than it said at the hello.
"""

from collections.abc import Callable
from dataclasses import dataclass

from echo_coordinator.state.intake_rules import Judgement
from echo_swarm.errors import RemoteError
from echo_swarm.trajectory import DRAW_BY_SEED, Reason, Trajectory
from echo_swarm.work import BACKEND_REFUSED, BackendReport, seeds_not_followed


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSeeds:
    """The decision. `required`: `audits.require_followed_seeds`."""

    required: bool

    def takes(self, backend: str) -> bool:
        """Whether work of a backend of this name may be trained on."""
        return not self.required or backend in DRAW_BY_SEED

    def refuse(self, report: BackendReport | None) -> None:
        """Raise RemoteError at the hello of a node with a backend that is not taken. None: it has no backend."""
        if report is not None and not self.takes(report.backend):
            raise RemoteError(BACKEND_REFUSED, seeds_not_followed(report.backend))

    def before(self, look: Callable[[Trajectory], Judgement]) -> Callable[[Trajectory], Judgement]:
        """Return what judges the backend that a completion for training names, and then the rest of it by `look`."""

        def looked(trajectory: Trajectory) -> Judgement:
            backend = trajectory.policy.backend
            if self.takes(backend):
                return look(trajectory)
            return Judgement(reason=Reason.UNKNOWN_POLICY, detail=seeds_not_followed(backend))

        return looked if self.required else look
