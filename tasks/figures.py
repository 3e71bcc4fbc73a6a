"""The figures of a run: lengths, plan, losses, balance of the replicas, GPU seconds. Each writes a PNG file.

`records` are the steps of steps.jsonl that count, in order (`training.journal.effective_steps`). Every function returns
the matplotlib figure that it saved.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from planning.types import DeploymentPlan, Replica
from tasks.figure_style import (
    COLOURS,
    FAINT_INK,
    IDLE,
    INK,
    label_line_ends,
    new_figure,
    save,
    style,
    tenant_colours,
    whole_steps,
)

Records = Sequence[Mapping[str, Any]]

GPUS_PER_ROW = 16
NUM_LENGTH_BINS = 48
MAX_LABELLED_LINES = 12
NUM_ALTERNATIVES = 5
SMOOTHED_FROM_STEPS = 40


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


def plan_figure(plan: DeploymentPlan, path: Path) -> Figure:
    """Replicas as blocks over the reserved GPUs, what each tenant is expected to cost, and the plans that lost."""
    num_rows = -(-plan.num_gpus // GPUS_PER_ROW)
    figure = new_figure(9.0, 3.3 + 0.75 * num_rows, f"Deployment plan: {plan}")
    top, bottom = figure.subfigures(2, 1, height_ratios=[0.55 + 0.75 * num_rows, 2.6])
    _draw_gpus(top.subplots(), plan)
    left, right = bottom.subplots(1, 2)
    _draw_tenant_costs(left, plan.tenant_gpu_seconds, "Expected GPU seconds of a step")
    _draw_alternatives(right, plan)
    return save(figure, path)


def loss_figure(records: Records, path: Path) -> Figure:
    """Loss of every tenant over the steps; long runs are smoothed, with the single steps behind in a lighter tone."""
    tenants = _tenants(records)
    colours = tenant_colours(tenants)
    figure = new_figure(8.5, 4.6, "Training loss by tenant")
    axes = figure.subplots()
    style(axes, "step", "loss (nats per supervised token)")
    ends = {}
    for tenant in tenants:
        steps, losses = _series(records, tenant, "loss")
        if len(steps) >= SMOOTHED_FROM_STEPS:
            axes.plot(steps, losses, color=colours[tenant], linewidth=0.8, alpha=0.3)
            losses = _smoothed(losses)
        axes.plot(steps, losses, color=colours[tenant], linewidth=2.0, label=tenant)
        if len(steps):
            axes.plot(steps[-1:], losses[-1:], "o", color=colours[tenant], markersize=4.5)
            ends[tenant] = (float(steps[-1]), float(losses[-1]))
    axes.set_ylim(bottom=0.0)
    whole_steps(axes)
    if len(ends) <= MAX_LABELLED_LINES:
        label_line_ends(axes, ends, colours)
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, ncols=-(-len(ends) // 24))
    return save(figure, path)


def balance_figure(records: Records, path: Path) -> Figure:
    """Busy seconds of every replica in every step, predicted and measured, and the imbalance that results."""
    predicted_RS = np.array([record["predicted_replica_seconds"] for record in records]).T
    measured_RS = np.array([record["replica_seconds"] for record in records]).T
    steps = np.array([record["step"] for record in records])
    num_replicas = len(measured_RS)
    figure = new_figure(8.5, 3.6 + 0.3 * min(num_replicas, 16) * 2, "Balance of the replicas")
    rows = 0.3 * min(num_replicas, 16) + 0.5
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[rows, rows, 1.5])
    longest_seconds = max(predicted_RS.max(), measured_RS.max())
    extent = (steps[0] - 0.5, steps[-1] + 0.5, num_replicas - 0.5, -0.5)
    for axes, seconds_RS, title in ((top, predicted_RS, "Predicted"), (middle, measured_RS, "Measured")):
        image = axes.imshow(
            seconds_RS,
            aspect="auto",
            extent=extent,
            cmap="cividis",
            vmin=0.0,
            vmax=longest_seconds,
            interpolation="none",
        )
        style(axes, y_label="replica", title=f"{title} busy seconds")
        axes.grid(False)
        axes.set_yticks(range(0, num_replicas, -(-num_replicas // 16)))
    bar = figure.colorbar(image, ax=[top, middle], pad=0.01)
    bar.set_label("busy seconds", color=FAINT_INK, fontsize=9.5)
    bar.ax.tick_params(colors=FAINT_INK, labelsize=9)
    style(bottom, "step", "imbalance", "Slowest replica against the mean (0 % is perfect)")
    for seconds_RS, label, colour, width in (
        (predicted_RS, "predicted", COLOURS[4], 1.6),
        (measured_RS, "measured", COLOURS[0], 2.0),
    ):
        bottom.plot(
            steps, seconds_RS.max(axis=0) / seconds_RS.mean(axis=0) - 1.0, label=label, color=colour, linewidth=width
        )
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bottom.set_ylim(bottom=0.0)
    bottom.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    whole_steps(bottom)
    return save(figure, path)


def gpu_seconds_figure(records: Records, path: Path) -> Figure:
    """GPU seconds of every tenant: stacked over the steps (the top is the bill of the step), and in total."""
    tenants = _tenants(records)
    colours = tenant_colours(tenants)
    steps = np.array([record["step"] for record in records])
    seconds = {
        tenant: np.array([record["tenants"].get(tenant, {"gpu_seconds": 0.0})["gpu_seconds"] for record in records])
        for tenant in tenants
    }
    figure = new_figure(
        9.5, 4.2, f"GPU seconds by tenant: {sum(map(np.sum, seconds.values())):,.0f} in {len(steps)} steps"
    )
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
    style(left, "step", "GPU seconds of the step", "Every step")
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(steps))
    for tenant in tenants:
        left.stairs(below + seconds[tenant], edges, baseline=below, fill=True, color=colours[tenant], label=tenant)
        below = below + seconds[tenant]
    left.set_xlim(edges[0], edges[-1])
    whole_steps(left)
    _draw_tenant_costs(right, {tenant: float(seconds[tenant].sum()) for tenant in tenants}, "All steps")
    return save(figure, path)


def _draw_gpus(axes: Axes, plan: DeploymentPlan) -> None:
    """One cell per GPU in rows of GPUS_PER_ROW; a replica that passes a row's end goes on in the next."""
    configs = [group.config for group in plan.groups]
    colours = {config: COLOURS[index % len(COLOURS)] for index, config in enumerate(configs)}
    for gpu in range(plan.num_used_gpus, plan.num_gpus):
        row, column = divmod(gpu, GPUS_PER_ROW)
        axes.add_patch(
            Rectangle(
                (column + 0.05, row + 0.08), 0.9, 0.84, facecolor=IDLE, edgecolor="#BDBDBD", hatch="////", linewidth=0.8
            )
        )
        axes.text(column + 0.5, row + 0.5, "idle", ha="center", va="center", fontsize=8, color=FAINT_INK)
    for replica in plan.replicas:
        _draw_replica(axes, replica, colours[replica.config])
    num_rows = -(-plan.num_gpus // GPUS_PER_ROW)
    axes.set_xlim(0, min(plan.num_gpus, GPUS_PER_ROW))
    axes.set_ylim(num_rows, 0)
    style(axes, "GPU", title="One block is one replica <tensor, pipeline parallel>")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks(
        [column + 0.5 for column in range(min(plan.num_gpus, GPUS_PER_ROW))], range(min(plan.num_gpus, GPUS_PER_ROW))
    )
    axes.set_yticks([row + 0.5 for row in range(num_rows)], [f"from {row * GPUS_PER_ROW}" for row in range(num_rows)])


def _draw_replica(axes: Axes, replica: Replica, colour: str) -> None:
    for row in range(replica.ranks[0] // GPUS_PER_ROW, replica.ranks[-1] // GPUS_PER_ROW + 1):
        first = max(replica.first_rank, row * GPUS_PER_ROW) - row * GPUS_PER_ROW
        last = min(replica.ranks.stop, (row + 1) * GPUS_PER_ROW) - row * GPUS_PER_ROW
        corner = "round,pad=0,rounding_size=0.12"
        axes.add_patch(
            FancyBboxPatch(
                (first + 0.05, row + 0.08), last - first - 0.1, 0.84, boxstyle=corner, facecolor=colour, linewidth=0
            )
        )
        for gpu in range(first + 1, last):
            axes.plot([gpu, gpu], [row + 0.2, row + 0.8], color="white", linewidth=0.8, alpha=0.5)
        axes.text(
            (first + last) / 2,
            row + 0.5,
            str(replica.config),
            ha="center",
            va="center",
            color="white",
            fontweight="bold",
            fontsize=9.5,
        )


def _draw_tenant_costs(axes: Axes, gpu_seconds: Mapping[str, float], title: str) -> None:
    """A bar per tenant, the dearest on top, with its share."""
    colours = tenant_colours(gpu_seconds)
    dearest_last = sorted(gpu_seconds, key=lambda tenant: gpu_seconds[tenant])
    total = sum(gpu_seconds.values())
    values = [gpu_seconds[tenant] for tenant in dearest_last]
    axes.barh(dearest_last, values, color=[colours[tenant] for tenant in dearest_last], height=0.68)
    style(axes, "GPU seconds", title=title)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0.0, 1.3 * max(values, default=1.0))
    for position, value in enumerate(values):
        axes.text(value, position, f"  {value:,.3g} ({value / total:.0%})", va="center", fontsize=8.5, color=INK)


def _draw_alternatives(axes: Axes, plan: DeploymentPlan) -> None:
    """Predicted step seconds of the chosen plan and of the best others, against the lower bound of any plan."""
    others = sorted(plan.alternatives, key=lambda alternative: alternative.predicted_step_seconds)
    seconds = {str(plan): plan.predicted_step_seconds}
    for alternative in others:
        name = " + ".join(f"{group.config}x{group.num_replicas}" for group in alternative.groups)
        if len(seconds) <= NUM_ALTERNATIVES:
            seconds.setdefault(name, alternative.predicted_step_seconds)
    names = list(seconds)[::-1]
    axes.barh(
        names,
        [seconds[name] for name in names],
        height=0.68,
        color=[COLOURS[0] if name == str(plan) else "#C4C9D1" for name in names],
    )
    axes.axvline(plan.lower_bound_seconds, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    style(
        axes,
        "predicted seconds of a step (dashed: lower bound of any plan)",
        title=f"This plan and others; gap {plan.gap:.1%}",
    )
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0.0, 1.2 * max(seconds.values()))
    for position, name in enumerate(names):
        axes.text(seconds[name], position, f"  {seconds[name]:.3g}", va="center", fontsize=8.5, color=INK)


def _tenants(records: Records) -> list[str]:
    return sorted({tenant for record in records for tenant in record["tenants"]})


def _series(records: Records, tenant: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one tenant, without the steps that have none."""
    own = [(record["step"], record["tenants"][tenant][key]) for record in records if tenant in record["tenants"]]
    known = [(step, value) for step, value in own if value is not None]
    return np.array([step for step, _ in known]), np.array([value for _, value in known])


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window that covers a twentieth of the run, cut at its ends."""
    half = max(1, len(values) // 40)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _round_lengths() -> list[int]:
    """10, 20, 50, 100, ... for ticks on a logarithmic axis."""
    return [digit * 10**power for power in range(1, 7) for digit in (1, 2, 5)]
