"""The figures of a run: plan, losses, balance of the replicas, padding, GPU seconds. Each writes a PNG file.

`records` are the steps of steps.jsonl that count, in order (`training.journal.effective_steps`). Every function returns
the matplotlib figure that it saved.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from planning.types import DeploymentPlan, Replica
from tasks.figure_style import (
    FAINT_INK,
    IDLE,
    INK,
    REPLICA_BLUES,
    horizontal_bars,
    label_line_ends,
    new_figure,
    save,
    short_number,
    style,
    tenant_colours,
    tenant_line_styles,
    whole_steps,
)

Records = Sequence[Mapping[str, Any]]
Array = npt.NDArray[np.float64]

GPUS_PER_ROW = 16
MAX_LABELLED_LINES = 12
NUM_ALTERNATIVES = 5
NAME_WIDTH = 22  # characters per line of an alternative's name
SMOOTHED_FROM_STEPS = 40
ROW_FILL = 0.9  # part of a row that the longest busy time fills
OTHER_PLAN = WAITING = "#CDD1D8"
BUSY = REPLICA_BLUES[0]


def plan_figure(plan: DeploymentPlan, path: Path) -> Figure:
    """Replicas as blocks over the reserved GPUs, what each tenant is expected to cost, and the plans that lost."""
    num_rows = -(-plan.num_gpus // GPUS_PER_ROW)
    figure = new_figure(9.5, 3.6 + 0.7 * num_rows, f"Deployment plan: {plan} on {plan.num_gpus} GPUs")
    grid = figure.add_gridspec(2, 2, height_ratios=[0.7 * num_rows + 0.2, 2.4])
    _draw_gpus(figure.add_subplot(grid[0, :]), plan)
    _draw_tenant_costs(figure.add_subplot(grid[1, 0]), plan.tenant_gpu_seconds, "Expected cost of a step")
    _draw_alternatives(figure.add_subplot(grid[1, 1]), plan)
    return save(figure, path)


def loss_figure(records: Records, path: Path, evaluations: Records = ()) -> Figure:
    """Loss of every tenant over the steps; long runs are smoothed, with the single steps behind in a lighter tone.

    Rings are evaluation losses, at the step that trains from the evaluated adapter.
    """
    tenants = _tenants(records)
    colours, line_styles = tenant_colours(tenants), tenant_line_styles(tenants)
    figure = new_figure(8.5, 4.6, "Training loss by tenant")
    axes = figure.subplots()
    style(axes, "step", "loss (nats per supervised token)")
    ends = {}
    for tenant in tenants:
        steps, losses = _series(records, tenant, "loss")
        if len(steps) >= SMOOTHED_FROM_STEPS:
            axes.plot(steps, losses, color=colours[tenant], linewidth=0.8, alpha=0.3)
            losses = _smoothed(losses)
        axes.plot(steps, losses, line_styles[tenant], color=colours[tenant], linewidth=2.0, label=tenant)
        if len(steps):
            axes.plot(steps[-1:], losses[-1:], "o", color=colours[tenant], markersize=4.5)
            ends[tenant] = (float(steps[-1]), float(losses[-1]))
        held_out = _series(evaluations, tenant, "loss")
        if len(held_out[0]):
            axes.plot(*held_out, "o", color=colours[tenant], markersize=5, fillstyle="none")
    whole_steps(axes)
    if len(ends) <= MAX_LABELLED_LINES:
        label_line_ends(axes, ends, colours)
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, ncols=-(-len(ends) // 24))
    return save(figure, path)


def balance_figure(records: Records, path: Path) -> Figure:
    """Busy seconds of every replica in every step, predicted and measured; what it then waits for the slowest; and
    the imbalance that results."""
    predicted_RS = _replica_seconds(records, "predicted_replica_seconds")
    measured_RS = _replica_seconds(records, "replica_seconds")
    num_replicas, num_steps = measured_RS.shape
    first_step = records[0]["step"]
    rows_height = min(0.75 * num_replicas, 10.0)
    figure = new_figure(8.5, rows_height + 3.0, "Balance of the replicas")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[rows_height + 0.6, 1.4])
    longest_seconds = max(np.nanmax(predicted_RS), np.nanmax(measured_RS))
    edges = first_step - 0.5 + np.arange(num_steps + 1)
    slowest_S = np.nanmax(measured_RS, axis=0)
    for replica, (predicted_S, measured_S) in enumerate(zip(predicted_RS, measured_RS, strict=True)):
        base = num_replicas - 1 - replica
        for seconds_S, colour in ((np.where(np.isnan(measured_S), np.nan, slowest_S), WAITING), (measured_S, BUSY)):
            top.stairs(base + ROW_FILL * seconds_S / longest_seconds, edges, baseline=base, fill=True, color=colour)
        top.stairs(base + ROW_FILL * predicted_S / longest_seconds, edges, baseline=None, color=INK, linewidth=1.3)
    style(top, title=f"Busy seconds of each step (a full row is {short_number(longest_seconds / ROW_FILL)} s)")
    top.grid(False)
    top.spines["left"].set_visible(False)
    top.tick_params(axis="y", length=0)
    every = -(-num_replicas // 24)
    top.set_yticks(
        [num_replicas - 0.55 - replica for replica in range(0, num_replicas, every)],
        [f"replica {replica}" for replica in range(0, num_replicas, every)],
    )
    top.set_ylim(0, num_replicas)
    top.set_xlim(edges[0], edges[-1])
    keys = [
        Patch(color=BUSY, label="busy, measured"),
        Patch(color=WAITING, label="waiting for the slowest"),
        Line2D([], [], color=INK, linewidth=1.3, label="busy, predicted"),
    ]
    figure.legend(handles=keys, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    _draw_imbalance(bottom, first_step + np.arange(num_steps), {"predicted": predicted_RS, "measured": measured_RS})
    return save(figure, path)


def padding_figure(records: Records, path: Path) -> Figure:
    """Padding ratio of every step, and over all steps together."""
    steps = np.array([record["step"] for record in records])
    num_computed = np.array([record["num_computed_tokens"] for record in records], dtype=np.float64)
    num_real = np.array([record["num_tokens"] for record in records], dtype=np.float64)
    overall = 1.0 - num_real.sum() / num_computed.sum()
    figure = new_figure(8.5, 2.8, f"Padding: {overall:.1%} of all computed tokens")
    axes = figure.subplots()
    style(axes, "step", "padding ratio")
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    axes.stairs(1.0 - num_real / num_computed, edges, fill=True, color=BUSY)
    axes.axhline(overall, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(edges[0], edges[-1])
    whole_steps(axes)
    return save(figure, path)


def gpu_seconds_figure(records: Records, path: Path) -> Figure:
    """GPU seconds of every tenant: stacked over the steps (the top is the bill of the step), and in total."""
    totals, seconds = _gpu_seconds(records)
    colours = tenant_colours(totals)
    steps = np.array([record["step"] for record in records])
    title = f"GPU seconds by tenant: {short_number(sum(totals.values()))} in {len(steps)} steps"
    figure = new_figure(9.5, 4.2, title)
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
    style(left, "step", "GPU seconds of the step", "Each step")
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(steps))
    for tenant in sorted(totals, key=lambda tenant: totals[tenant]):
        above = below + seconds[tenant]
        left.stairs(above, edges, baseline=below, fill=True, color=colours[tenant], label=tenant)
        below = above
    left.set_xlim(edges[0], edges[-1])
    whole_steps(left)
    _draw_tenant_costs(right, totals, "All steps")
    return save(figure, path)


def _draw_gpus(axes: Axes, plan: DeploymentPlan) -> None:
    """One cell per GPU in rows of GPUS_PER_ROW; a replica that passes a row's end goes on in the next."""
    sizes = sorted({group.config.num_gpus for group in plan.groups})
    for replica in plan.replicas:
        _draw_replica(axes, replica, REPLICA_BLUES[min(sizes.index(replica.config.num_gpus), len(REPLICA_BLUES) - 1)])
    for gpu in range(plan.num_used_gpus, plan.num_gpus):
        row, column = divmod(gpu, GPUS_PER_ROW)
        cell = Rectangle((column + 0.05, row + 0.08), 0.9, 0.84, facecolor=IDLE, edgecolor="#BDBDBD", hatch="////")
        axes.add_patch(cell)
        axes.text(column + 0.5, row + 0.5, "idle", ha="center", va="center", fontsize=8, color=FAINT_INK)
    num_columns, num_rows = min(plan.num_gpus, GPUS_PER_ROW), -(-plan.num_gpus // GPUS_PER_ROW)
    axes.set_xlim(0, num_columns)
    axes.set_ylim(num_rows, 0)
    num_idle = plan.num_gpus - plan.num_used_gpus
    idle = f"; {num_idle} GPUs are left idle" if num_idle else ""
    style(axes, title=f"Each block is one replica, <tensor parallel, pipeline parallel>{idle}")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
    last_gpus = [min((row + 1) * GPUS_PER_ROW, plan.num_gpus) - 1 for row in range(num_rows)]
    labels = [f"GPU {row * GPUS_PER_ROW} to {last}" for row, last in enumerate(last_gpus)]
    axes.set_yticks([row + 0.5 for row in range(num_rows)], labels)


def _draw_replica(axes: Axes, replica: Replica, colour: str) -> None:
    for row in range(replica.ranks[0] // GPUS_PER_ROW, replica.ranks[-1] // GPUS_PER_ROW + 1):
        first = max(replica.first_rank, row * GPUS_PER_ROW) - row * GPUS_PER_ROW
        last = min(replica.ranks.stop, (row + 1) * GPUS_PER_ROW) - row * GPUS_PER_ROW
        axes.add_patch(Rectangle((first + 0.05, row + 0.08), last - first - 0.1, 0.84, facecolor=colour, linewidth=0))
        for gpu in range(first + 1, last):
            for low, high in ((0.08, 0.24), (0.76, 0.92)):
                axes.plot([gpu, gpu], [row + low, row + high], color="white", linewidth=1.0)
        name = axes.text((first + last) / 2, row + 0.5, str(replica.config), ha="center", va="center")
        name.set(color="white", fontweight="bold", fontsize=9)


def _draw_tenant_costs(axes: Axes, gpu_seconds: Mapping[str, float], title: str) -> None:
    """A bar per tenant, the dearest on top, with its share."""
    dearest_first = dict(sorted(gpu_seconds.items(), key=lambda item: -item[1]))
    total = sum(gpu_seconds.values())
    notes = [f"{short_number(value)} ({value / total:.0%})" for value in dearest_first.values()]
    style(axes, "GPU seconds", title=title)
    horizontal_bars(axes, dearest_first, tenant_colours(gpu_seconds), notes)


def _draw_alternatives(axes: Axes, plan: DeploymentPlan) -> None:
    """Predicted step seconds of the chosen plan and of the best others, against the lower bound of any plan."""
    this_plan = "this plan"
    seconds = {this_plan: plan.predicted_step_seconds}
    for other in sorted(plan.alternatives, key=lambda other: other.predicted_step_seconds):
        name = " + ".join(f"{group.config}x{group.num_replicas}" for group in other.groups)
        if name != str(plan) and len(seconds) <= NUM_ALTERNATIVES:
            seconds[fill(name, NAME_WIDTH)] = other.predicted_step_seconds
    colours = dict.fromkeys(seconds, OTHER_PLAN) | {this_plan: REPLICA_BLUES[1]}
    style(axes, "predicted step seconds (dashed: lower bound)", title=f"This plan and others; gap {plan.gap:.1%}")
    horizontal_bars(axes, seconds, colours, [short_number(value) for value in seconds.values()])
    axes.axvline(plan.lower_bound_seconds, ymax=0.96, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))


def _draw_imbalance(axes: Axes, steps: Array, seconds: Mapping[str, Array]) -> None:
    """Slowest replica / mean - 1 of every step, for busy seconds (replica, step) of each kind."""
    looks = {"predicted": (INK, 1.3), "measured": (BUSY, 2.0)}
    means = []
    for kind, seconds_RS in seconds.items():
        imbalance_S = np.nanmax(seconds_RS, axis=0) / np.nanmean(seconds_RS, axis=0) - 1.0
        axes.plot(steps, imbalance_S, color=looks[kind][0], linewidth=looks[kind][1], label=kind)
        means.append(f"{kind} {imbalance_S.mean():.1%}")
    style(axes, "step", "imbalance", f"Slowest replica against the mean of all; on average {', '.join(means)}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0.0)
    whole_steps(axes)


def _replica_seconds(records: Records, key: str) -> Array:
    """Seconds (replica, step); NaN where a step's plan has fewer replicas than another's."""
    num_replicas = max(len(record[key]) for record in records)
    seconds_RS = np.full((num_replicas, len(records)), np.nan)
    for step, record in enumerate(records):
        seconds_RS[: len(record[key]), step] = record[key]
    return seconds_RS


def _gpu_seconds(records: Records) -> tuple[dict[str, float], dict[str, Array]]:
    """Each tenant's GPU seconds: in total, and step by step (0 where it was not in the step)."""
    absent = {"gpu_seconds": 0.0}
    seconds = {
        tenant: np.array([record["tenants"].get(tenant, absent)["gpu_seconds"] for record in records])
        for tenant in _tenants(records)
    }
    return {tenant: float(values.sum()) for tenant, values in seconds.items()}, seconds


def _tenants(records: Records) -> list[str]:
    return sorted({tenant for record in records for tenant in record["tenants"]})


def _series(records: Records, tenant: str, key: str) -> tuple[Array, Array]:
    """Steps and values of one tenant, without the steps that have none."""
    own = [(record["step"], record["tenants"][tenant][key]) for record in records if tenant in record["tenants"]]
    known = [(step, value) for step, value in own if value is not None]
    return np.array([step for step, _ in known]), np.array([value for _, value in known])


def _smoothed(values: Array) -> Array:
    """Mean over a window that covers a twentieth of the run, cut at its ends."""
    half = max(1, len(values) // 40)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])
