"""One line of progress, for logs and terminals without cursor."""

from echo_swarm.render import short_peer, spaced
from echo_swarm.status import RunStatus


def progress_line(status: RunStatus) -> str:
    """Return version, reward, evaluation, rate, lag, who contributes and what the trainer does."""
    reward = status.recent_updates[-1].reward_mean if status.recent_updates else None
    last = status.evaluations[-1] if status.evaluations else None
    lag = max(status.staleness, default=0)
    who = " ".join(f"{short_peer(node.peer_id)}:{node.accepted}" for node in status.nodes)
    return (
        f"version {status.policy_version if status.policy_version is not None else '-'}"
        f"  reward {'-' if reward is None else f'{reward:.3f}'}"
        f"  held-out {'-' if last is None else f'{last.accuracy:.3f} (v{last.policy_version})'}"
        f"  {status.trajectories_per_s:.0f} trajectories/s  lag ≤ {lag}"
        f"  nodes {who or '-'}  trainer {spaced(status.trainer.state)}"
    )
