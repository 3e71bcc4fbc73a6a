"""The figure of the tenants' sequence lengths, with bucket borders."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tasks.figure_style import FAINT_INK, INK, new_figure, save, style, tenant_colours

NUM_LENGTH_BINS = 48


def histogram_figure(histogram: pl.DataFrame, bucket_borders: Sequence[int], path: Path) -> Figure:
    """Lengths of every tenant (`tenant, length, count`), one above the other; bucket borders (tokens) as lines."""
    tenants = histogram["tenant"].unique(maintain_order=True).to_list()
    colours = tenant_colours(tenants)
    figure = new_figure(8.0, 1.3 + 0.75 * len(tenants), "Sequence lengths by tenant")
    shortest, longest = int(histogram["length"].min()), int(histogram["length"].max())  # type: ignore[arg-type]
    edges = np.geomspace(shortest * 0.9, longest * 1.1, NUM_LENGTH_BINS + 1)
    panels = figure.subplots(len(tenants), 1, sharex=True, squeeze=False)[:, 0]
    for axes, tenant in zip(panels, tenants, strict=True):
        own = histogram.filter(pl.col("tenant") == tenant).sort("length")
        lengths, counts = own["length"].to_numpy(), own["count"].to_numpy()
        shares, _ = np.histogram(lengths, bins=edges, weights=counts / counts.sum())
        axes.stairs(shares, edges, fill=True, color=colours[tenant], alpha=0.85)
        for border in bucket_borders:
            axes.axvline(border, color=INK, linewidth=0.7, linestyle=(0, (4, 3)), alpha=0.6)
        median = lengths[np.searchsorted(counts.cumsum(), counts.sum() / 2)]
        style(axes)
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
        axes.set_ylabel(
            tenant, rotation=0, ha="right", va="center", color=colours[tenant], fontsize=10, fontweight="bold"
        )
        note = f"{counts.sum():,} sequences\nmedian {median:,}\nlongest {lengths.max():,}"
        axes.text(1.01, 0.5, note, transform=axes.transAxes, va="center", fontsize=8.5, color=FAINT_INK)
    panels[-1].set_xscale("log")
    panels[-1].set_xlim(edges[0], edges[-1])
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    panels[-1].xaxis.set_minor_formatter(NullFormatter())
    panels[-1].set_xticks([tokens for tokens in _round_lengths() if edges[0] <= tokens <= edges[-1]])
    note = "; dashed: bucket borders" if bucket_borders else ""
    panels[-1].set_xlabel(f"tokens per sequence (height: share of the tenant's sequences{note})", color=FAINT_INK)
    return save(figure, path)


def _round_lengths() -> list[int]:
    """10, 20, 50, 100, ... for ticks on a logarithmic axis."""
    return [digit * 10**power for power in range(1, 7) for digit in (1, 2, 5)]
