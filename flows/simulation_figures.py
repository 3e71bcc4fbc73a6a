"""Figures of simulations and of what-if plans, as PNG. Every title says that the seconds are simulated."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from flows.simulate import Experiment
from planning.what_if import WhatIf
from tasks.figure_style import COLOURS, FAINT_INK, INK, new_figure, save, short_number, style, whole_steps

BATCHING_COLOURS = {"padded": COLOURS[0], "packed": COLOURS[1]}
BATCHING_MARKERS = {"padded": "o", "packed": "s"}
Row = Mapping[str, Any]


def draw_simulation(content: Mapping[str, Any], path: Path) -> Figure:
    """The figure of an experiment's JSON content."""
    draw: dict[Experiment, Callable[[Mapping[str, Any]], Figure]] = {
        Experiment.STRATEGIES: _bars,
        Experiment.ABLATION: _bars,
        Experiment.NUM_BUCKETS: _bucket_curve,
        Experiment.NUM_GPUS: lambda shown: _curves(shown, "num_gpus", "GPUs"),
        Experiment.NUM_TENANTS: lambda shown: _curves(shown, "num_tenants", "tenants"),
        Experiment.PLANNER_TIME: _planner_time,
        Experiment.TWO_STAGE: _two_stage,
    }
    return save(draw[Experiment(content["experiment"])](content), path)


def draw_what_if(name: str, answer: WhatIf, path: Path) -> Figure:
    """Step time and GPU seconds over the number of GPUs, with the number beyond which more are useless."""
    caveat = answer.plans[0].caveat
    figure = new_figure(9.5, 4.0, f"{name}: what if there were more GPUs? (simulated{', ' + caveat if caveat else ''})")
    seconds, cost = figure.subplots(1, 2)
    numbers = [plan.num_gpus for plan in answer.plans]
    steps = [plan.predicted_step_seconds for plan in answer.plans]
    seconds.plot(numbers, steps, marker="o", color=COLOURS[0], label="planned step")
    bounds = [plan.lower_bound_seconds for plan in answer.plans]
    seconds.plot(numbers, bounds, linestyle=":", color=FAINT_INK, label="no plan is faster")
    floor = answer.plans[-1].longest_alone_seconds
    seconds.axhline(floor, color=COLOURS[5], linewidth=1.0, linestyle="--", label="longest sequence alone")
    seconds.set_yscale("log")
    cost.plot(numbers, [n * s for n, s in zip(numbers, steps, strict=True)], marker="o", color=COLOURS[1])
    cost.set_ylim(bottom=0)
    style(seconds, "GPUs", "seconds per step")
    style(cost, "GPUs", "GPU seconds per step")
    for axes in (seconds, cost):
        _doubling_axis(axes, numbers)
        axes.axvline(answer.useful_gpus, color=COLOURS[2], linewidth=1.0)
    seconds.yaxis.set_major_formatter(ScalarFormatter())
    seconds.legend(frameon=False, fontsize=8.5)
    cost.annotate(
        f"useful up to {answer.useful_gpus}",
        (answer.useful_gpus, 0.04),
        xycoords=("data", "axes fraction"),
        ha="right",
        fontsize=9,
        color=COLOURS[2],
    )
    return save(figure, path)


def _title(content: Mapping[str, Any], how: str = "simulated") -> str:
    caveat = f", {content['caveat']}" if content["caveat"] else ""
    return f"{content['name']} ({how}{caveat})"


def _bars(content: Mapping[str, Any]) -> Figure:
    rows = content["rows"]
    figure = new_figure(10.5, 1.3 + 0.36 * len(rows), _title(content))
    axes = figure.subplots()
    positions = range(len(rows))[::-1]
    colours = [BATCHING_COLOURS[row["batching"]] for row in rows]
    axes.barh(positions, [row["gpu_seconds_per_step"] for row in rows], color=colours, height=0.68)
    axes.set_yticks(positions, [_label(row) for row in rows])
    style(axes, f"GPU seconds per step on {content['num_gpus']} GPUs, {content['steps']} steps")
    axes.grid(False)
    axes.set_xlim(0, 1.3 * max(row["gpu_seconds_per_step"] for row in rows))
    for position, row in zip(positions, rows, strict=True):
        change = f"{-row['reduction']:+.1f} %" if row is not rows[0] else "the baseline"
        note = f"  {short_number(row['gpu_seconds_per_step'])}   {change}"
        axes.text(row["gpu_seconds_per_step"], position, note, va="center", fontsize=8.5, color=INK)
    for name, colour in BATCHING_COLOURS.items():
        axes.barh([0], [0], color=colour, label=name)
    floor = content["cheapest_gpu_seconds_per_step"]["all"]
    if floor is not None:
        axes.axvline(floor, color=FAINT_INK, linestyle=":", label="cheapest possible")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    return figure


def _label(row: Row) -> str:
    replicas = row["plan"] if ";" not in row["plan"] else "a plan per tenant"
    shortened = replicas if len(replicas) <= 44 else replicas[:41] + "..."
    buckets = "" if row["buckets"] == "-" else f", {row['buckets']}"
    return f"{row['strategy']}{buckets}\n{shortened}"


def _curves(content: Mapping[str, Any], key: str, what: str) -> Figure:
    figure = new_figure(10.5, 4.2, _title(content))
    cost, reduction = figure.subplots(1, 2)
    rows = [row for row in content["rows"] if "fixed" not in row["buckets"]]
    for strategy, style_of_line in (("task_fused", "--"), ("lobra", "-")):
        for batching, colour in BATCHING_COLOURS.items():
            own = [row for row in rows if (row["strategy"], row["batching"]) == (strategy, batching)]
            x = [row[key] for row in own]
            look = {"linestyle": style_of_line, "color": colour, "marker": BATCHING_MARKERS[batching]}
            cost.plot(x, [row["gpu_seconds_per_step"] for row in own], label=f"{strategy}, {batching}", **look)
            if strategy == "lobra":
                reduction.plot(x, [row["reduction"] for row in own], label=f"{batching}, against padded", **look)
                if batching == "packed":
                    against = [row["reduction_against_packed"] for row in own]
                    reduction.plot(
                        x, against, label="packed, against packed", color=COLOURS[2], marker="^", clip_on=False
                    )
    style(cost, what, "GPU seconds per step")
    style(reduction, what, "reduction against task_fused (%)")
    for axes in (cost, reduction):
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row[key] for row in rows}))
        axes.legend(frameon=False, fontsize=8.5)
    return figure


def _bucket_curve(content: Mapping[str, Any]) -> Figure:
    rows = [row for row in content["rows"] if row["strategy"] == "lobra"]
    figure = new_figure(9.5, 4.0, _title(content))
    cost, padding = figure.subplots(1, 2)
    numbers = [int(row["buckets"].split()[1]) for row in rows]
    cost.plot(numbers, [row["gpu_seconds_per_step"] for row in rows], marker="o", color=COLOURS[0])
    padding.plot(numbers, [100 * row["padding_ratio"] for row in rows], marker="o", color=COLOURS[3])
    style(cost, "dynamic buckets", "GPU seconds per step")
    style(padding, "dynamic buckets", "padding tokens (%)")
    for axes in (cost, padding):
        axes.set_ylim(bottom=0)
        _doubling_axis(axes, numbers)
    return figure


def _planner_time(content: Mapping[str, Any]) -> Figure:
    rows = content["rows"]
    figure = new_figure(9.5, 4.0, _title(content, "planner time measured, steps simulated"))
    seconds, gap = figure.subplots(1, 2)
    numbers = [row["num_gpus"] for row in rows]
    seconds.plot(numbers, [row["solve_seconds"] for row in rows], marker="o", color=COLOURS[0])
    gap.plot(numbers, [row["gap"] for row in rows], marker="o", color=COLOURS[1])
    style(seconds, "GPUs", "seconds to plan")
    style(gap, "GPUs", "gap to the lower bound (%)")
    for axes in (seconds, gap):
        axes.set_ylim(bottom=0)
        _doubling_axis(axes, numbers)
    return figure


def _two_stage(content: Mapping[str, Any]) -> Figure:
    rows = content["rows"]
    figure = new_figure(9.5, 3.8, _title(content))
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["two_stage_seconds"] for row in rows], marker="o", color=COLOURS[0], label="one plan")
    joint = [row["joint_seconds"] for row in rows]
    axes.plot(steps, joint, marker="s", color=COLOURS[1], label="the best plan for each step")
    style(axes, "step", "seconds per step")
    axes.set_ylim(0, 1.08 * max(row["two_stage_seconds"] for row in rows))
    whole_steps(axes)
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def _doubling_axis(axes: Axes, numbers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(numbers), [str(number) for number in numbers])
    axes.minorticks_off()
