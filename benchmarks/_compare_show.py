"""What `compare_trl` found, for people: a table in Markdown and a plot of both panels."""

from pathlib import Path
from statistics import fmean
from typing import Any

ARMS = {"trl": "TRL GRPOTrainer", "async": "swarm, asynchronous", "sequential": "swarm, sequential"}
"""By the name in the report."""
COLOURS = {"trl": "tab:orange", "async": "tab:blue", "sequential": "tab:green"}


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, by arm: accuracy before and after of each seed and their means, and the times."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        mine = [run for run in runs if run["arm"] == arm]
        if not mine:
            continue
        last = [run["points"][-1] for run in mine]
        found[arm] = {
            "seeds": [run["seed"] for run in mine],
            "accuracy_first": [round(run["points"][0]["accuracy"], 4) for run in mine],
            "accuracy_last": [round(point["accuracy"], 4) for point in last],
            "accuracy_first_mean": round(fmean(run["points"][0]["accuracy"] for run in mine), 4),
            "accuracy_last_mean": round(fmean(point["accuracy"] for point in last), 4),
            "samples": last[0]["samples"],
            "training_s_mean": round(fmean(point["seconds"] for point in last), 1),
            "samples_per_s_mean": round(fmean(point["samples"] / point["seconds"] for point in last), 1),
            "startup_s_mean": round(fmean(run["startup_s"] for run in mine), 1),
        }
    return found


def markdown(figures: dict[str, Any]) -> str:
    """Return the table for benchmarks/README.md."""
    lines = [
        "| | accuracy before | after, mean | after, each seed | samples | training, s | samples/s | start-up, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in figures["summary"].items():
        each = " ".join(f"{accuracy:.3f}" for accuracy in row["accuracy_last"])
        lines.append(
            f"| {ARMS[arm]} | {row['accuracy_first_mean']:.3f} | {row['accuracy_last_mean']:.3f} | {each} | "
            f"{row['samples']} | {row['training_s_mean']:.1f} | {row['samples_per_s_mean']:.0f} | "
            f"{row['startup_s_mean']:.0f} |"
        )
    return "\n".join(lines)


def plot(figures: dict[str, Any], path: Path) -> bool:
    """Write the plot as PNG; False when matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, quantity in zip(panels, ("samples", "seconds"), strict=True):
        for arm in figures["summary"]:
            _draw(panel, [run["points"] for run in figures["runs"] if run["arm"] == arm], quantity, arm)
        panel.grid(alpha=0.3)
    panels[0].set(xlabel="completions trained on", ylabel="held-out greedy accuracy")
    panels[1].set(xlabel="seconds of training (start-up left out)")
    panels[0].legend(loc="lower right")
    figure.suptitle("The demo's task on one machine: each seed thin, mean thick")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _draw(panel: Any, curves: list[list[dict[str, Any]]], quantity: str, arm: str) -> None:
    for points in curves:
        x = [point[quantity] for point in points]
        panel.plot(x, [point["accuracy"] for point in points], color=COLOURS[arm], alpha=0.35, linewidth=1)
    # Point i is the same version in every curve; its samples or seconds may differ a little from seed to seed.
    columns = list(zip(*curves, strict=True))
    x = [fmean(point[quantity] for point in column) for column in columns]
    y = [fmean(point["accuracy"] for point in column) for column in columns]
    panel.plot(x, y, color=COLOURS[arm], linewidth=2.2, marker="o", markersize=4, label=ARMS[arm])
