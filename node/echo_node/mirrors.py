"""The run's HTTP mirrors as this node uses them, and what a person is told of sources that were of no use."""

from echo_node.activity import Activity
from echo_node.config import NodeConfig
from echo_swarm.checkpoint.fetch_report import FetchReport
from echo_swarm.checkpoint.mirror import Mirrors
from echo_swarm.checkpoint.reach import Reach, is_mirror, reach_of_run
from echo_swarm.identity import PeerId
from echo_swarm.invite import Invite
from echo_swarm.manifest import RunManifest


def mirrors_of(config: NodeConfig, invite: Invite) -> Mirrors | None:
    """Return what mirrors of that run may be; they are named once the run is known. None when none may be asked."""
    if not config.use_mirrors:
        return None
    return Mirrors(invite.run, Reach.LOOPBACK if config.private_mirrors else reach_of_run(invite.boot))


def take_mirrors(mirrors: Mirrors | None, run: RunManifest, activity: Activity) -> None:
    """Follow what the run's manifest says, and tell what is new."""
    if mirrors is None:
        return
    before = mirrors.urls
    ignored = mirrors.set(run.mirrors)
    if mirrors.urls != before:
        named = ", ".join(mirrors.urls)
        activity.say(f"versions may also come from {named}" if named else "the run names no mirrors any more")
        if ignored:
            activity.say(f"not asked, since no plain http or https URL: {', '.join(map(repr, ignored))}")


class SourceNews:
    """Says which sources lied, once for each file, and which mirrors failed, once for each reason."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._told: dict[PeerId, str] = {}

    def tell(self, report: FetchReport, name: str) -> None:
        """Tell what happened while `name` was fetched."""
        for liar, what in report.liars.items():
            kind = "mirror" if is_mirror(liar) else "peer"
            if self._told.get(liar) == name:
                continue  # An attempt before this one.
            self._told[liar] = name
            self._activity.say(f"{kind} {liar} sent wrong bytes of {name} ({what}); not asked again")
        for source, why in report.failures.items():
            reason = why.partition(";")[0]
            if is_mirror(source) and source not in report.liars and self._told.get(source) != reason:
                self._told[source] = reason
                self._activity.say(f"mirror {source} was of no use for {name}: {why}")
