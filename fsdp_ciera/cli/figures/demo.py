"""The demo's picture: how many bytes the gathers moved, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STOCK_COLOR, CIERA_COLOR = "#9aa5b1", "#1f6feb"


def draw_bytes(summary: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: bytes by category and by phase, stock beside ciera, and the loss of both runs.

    Raises `ImportError` where matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (categories, phases, losses) = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(4, 4, 3))
    _bars(categories, summary["stats"]["by_category"], "by category")
    _bars(phases, summary["stats"]["by_phase"], "by phase of the gather")
    steps = range(1, len(summary["losses"]["stock"]) + 1)
    losses.plot(steps, summary["losses"]["stock"], color=STOCK_COLOR, linewidth=5, label="stock FSDP2")
    losses.plot(steps, summary["losses"]["ciera"], color=CIERA_COLOR, linewidth=1.5, label="fsdp_ciera")
    losses.set_title(f"loss: largest difference {summary['max_abs_loss_diff']:g}", fontsize=11)
    losses.set_xlabel("step")
    losses.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    for axes in (categories, phases, losses):
        axes.spines[["top", "right"]].set_visible(False)
    ratio = summary["ratio_without_cold_gathers"]
    figure.suptitle(
        f"Parameter all-gathers of {summary['steps']} steps, {summary['world_size']} ranks, {summary['model']}: "
        f"{ratio:.2f}x fewer bytes after the first gathers",
        fontsize=12,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axes: Any, breakdown: Mapping[str, Mapping[str, int]], title: str) -> None:
    keys = sorted((k for k in breakdown if k != "overhead"), key=lambda k: breakdown[k]["raw_bytes"])
    positions = range(len(keys))
    raw = [breakdown[key]["raw_bytes"] / 1e6 for key in keys]
    wire = [breakdown[key]["wire_bytes"] / 1e6 for key in keys]
    axes.barh([p + 0.2 for p in positions], raw, height=0.38, color=STOCK_COLOR, label="stock FSDP2")
    axes.barh([p - 0.2 for p in positions], wire, height=0.38, color=CIERA_COLOR, label="fsdp_ciera")
    for position, before, after in zip(positions, raw, wire, strict=True):
        axes.text(after, position - 0.2, f" {before / after:.2f}x fewer" if after else "", va="center", fontsize=9)
    axes.set_yticks(list(positions), [key.replace("_", " ") for key in keys])
    axes.set_xlabel("MB sent by rank 0")
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, loc="lower right")
