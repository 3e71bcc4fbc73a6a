"""How the figures look: colours, axes, labels. matplotlib's object-oriented API only, so nothing global changes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Paul Tol's "vibrant" scheme and the darker half of his "muted" one: told apart with every common colour blindness,
# and dark enough for text on white.
COLOURS = (
    "#0077BB",
    "#EE7733",
    "#009988",
    "#AA3377",
    "#33BBEE",
    "#CC3311",
    "#332288",
    "#997700",
    "#117733",
    "#EE3377",
    "#44AA99",
    "#882255",
)
LINE_STYLES = ("-", "--", ":", "-.")  # the second dozen of tenants is dashed, and so on
REPLICA_BLUES = ("#5E92C4", "#3A72A8", "#25547F", "#153A5B", "#0A2239")  # the more GPUs, the darker
INK = "#2B2B2B"
FAINT_INK = "#6B6B6B"
IDLE = "#E3E5E8"
GRID = "#E2E2E2"
DOTS_PER_INCH = 150


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of `width` x `height` inches with a title at its left."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def save(figure: Figure, path: Path) -> Figure:
    """Write the figure as PNG and hand it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
    return figure


def style(axes: Axes, x_label: str = "", y_label: str = "", title: str = "") -> None:
    """Thin axes at left and bottom, a faint grid behind the data, and a heading at the left."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT_INK)
    axes.tick_params(which="both", colors=FAINT_INK, labelsize=9)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=FAINT_INK, fontsize=9.5)
    axes.set_ylabel(y_label, color=FAINT_INK, fontsize=9.5)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)


def whole_steps(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def tenant_colours(tenants: Iterable[str]) -> dict[str, str]:
    """A colour per tenant, the same in every figure of one run; after twelve tenants they begin again."""
    return {tenant: COLOURS[index % len(COLOURS)] for index, tenant in enumerate(sorted(set(tenants)))}


def tenant_line_styles(tenants: Iterable[str]) -> dict[str, str]:
    """A line style per tenant, which tells tenants of equal colour apart."""
    ordered = enumerate(sorted(set(tenants)))
    return {tenant: LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)] for index, tenant in ordered}


def horizontal_bars(axes: Axes, values: Mapping[str, float], colours: Mapping[str, str], notes: Sequence[str]) -> None:
    """A bar per name, the first on top, with a note at its end."""
    positions = range(len(values))[::-1]
    axes.barh(positions, list(values.values()), color=[colours[name] for name in values], height=0.68)
    axes.set_yticks(positions, list(values))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0.0, 1.35 * max(values.values(), default=1.0))
    for position, value, note in zip(positions, values.values(), notes, strict=True):
        axes.text(value, position, f"  {note}", va="center", fontsize=8.5, color=INK)


def short_number(value: float) -> str:
    """Three digits, or all whole digits of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_apart(positions: Sequence[float], min_distance: float) -> list[float]:
    """Positions of labels, in the order given, moved as little as possible until none is nearer than `min_distance`."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    groups: list[tuple[float, list[int]]] = []
    for index in order:
        centre, members = positions[index], [index]
        while groups and centre - groups[-1][0] < min_distance * (len(members) + len(groups[-1][1])) / 2:
            other_centre, others = groups.pop()
            centre = (centre * len(members) + other_centre * len(others)) / (len(members) + len(others))
            members = others + members
        groups.append((centre, members))
    placed = [0.0] * len(positions)
    for centre, members in groups:
        for rank, index in enumerate(members):
            placed[index] = centre + (rank - (len(members) - 1) / 2) * min_distance
    return placed


def label_line_ends(axes: Axes, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str]) -> None:
    """Write each line's name at its end, in its colour, instead of a legend. Call when the limits of y are final."""
    low, high = axes.get_ylim()
    heights = spread_apart([y for _, y in ends.values()], 0.055 * (high - low))
    for (name, (x, _)), height in zip(ends.items(), heights, strict=True):
        axes.annotate(
            name,
            (x, height),
            xytext=(7, 0),
            textcoords="offset points",
            color=colours[name],
            va="center",
            fontsize=9.5,
            fontweight="bold",
            annotation_clip=False,
        )
