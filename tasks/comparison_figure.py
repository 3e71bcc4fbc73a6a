"""The figure of a comparison: simulated and measured GPU seconds of every variant, side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tasks.figure_style import FAINT_INK, INK, REPLICA_BLUES, new_figure, save, short_number, style

SIMULATED, MEASURED = "#B9CDE3", REPLICA_BLUES[1]
BAR_HEIGHT = 0.36


def comparison_figure(comparison: Mapping[str, Any], path: Path) -> Figure:
    """Two bars per variant, each with its reduction against task_fused under the same batching."""
    rows = comparison["variants"]
    figure = new_figure(9.0, 1.5 + 0.75 * len(rows), f"{comparison['name']}: GPU seconds by strategy")
    axes = figure.subplots()
    positions = np.arange(len(rows))[::-1]
    longest = max(max(row["simulated_gpu_seconds"], row["measured_gpu_seconds"]) for row in rows)
    for kind, colour, offset in (("simulated", SIMULATED, 0.5), ("measured", MEASURED, -0.5)):
        values = [row[f"{kind}_gpu_seconds"] for row in rows]
        axes.barh(positions + offset * BAR_HEIGHT, values, BAR_HEIGHT, color=colour, label=kind)
        for position, row, value in zip(positions, rows, values, strict=True):
            reduction = row[f"{kind}_reduction"]
            note = f" ({-reduction:+.0%})" if reduction else ""
            text = f"  {short_number(value)}{note}"
            axes.text(value, position + offset * BAR_HEIGHT, text, va="center", fontsize=9, color=INK)
    style(axes, "GPU seconds of all steps, without overhead; in brackets: against task_fused under the same batching")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.set_yticks(positions, [row["variant"] for row in rows])
    axes.set_xlim(0, 1.2 * longest)
    axes.xaxis.label.set_color(FAINT_INK)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return save(figure, path)
