"""One picture of the loss curves, laid over each other."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {"torch": {"color": "#d9622b", "linewidth": 5, "alpha": 0.45}, "jax": {"color": "#1f4e79", "linewidth": 1.6}}


def draw(curves: dict[str, list[float]], path: Path, world_size: int) -> Path:
    """Write the picture and return its path."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, solid_capstyle="round", **STYLES[name])
    axes.set(xlabel="step", ylabel="loss per byte (nats)")
    names = " and ".join(curves)
    axes.set_title(f"Thinker and talker on {world_size} ranks: {names}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return path
