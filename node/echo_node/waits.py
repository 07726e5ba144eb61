"""The coordinator's reasons for having no work, in words that tell whether that is normal."""

from echo_swarm.identity import PeerId
from echo_swarm.work import WaitReason

_WORDS = {
    WaitReason.NONE: "work",
    WaitReason.STALENESS_LIMIT: "the trainer (the staleness limit is reached; this is normal)",
    WaitReason.PAUSED: "the run to be resumed (its owner paused it)",
    WaitReason.STARTING: "the run to start (its first version is being prepared)",
    WaitReason.STOPPING: "the coordinator to come back (it is shutting down)",
    WaitReason.QUOTA: "earlier work to be judged (quota; it grows with accepted work)",
    WaitReason.SET_ASIDE: "a probe to fit or a suspension to end (what it computes is far from the trainer, or of "
    "another version; `status INVITE` says more)",
    WaitReason.FINISHED: "the end (the run is finished)",
}


def without_name(text: str, peer: PeerId) -> str:
    """Return an error's text without the 52 characters of the peer that everybody knows it is about."""
    return text.removeprefix(f"{peer}: ").replace(f"/p2p/{peer}", "").replace(peer, "it")


def describe_wait(reason: WaitReason) -> str:
    """Return what a node without work waits for."""
    return _WORDS[reason]
