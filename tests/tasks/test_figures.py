import polars as pl
import pytest
from matplotlib.patches import Rectangle

from planning.types import DeploymentPlan, ParallelConfig, PlanAlternative, ReplicaGroup
from tasks.figure_style import COLOURS, spread_apart, tenant_colours
from tasks.figures import balance_figure, gpu_seconds_figure, loss_figure, padding_figure, plan_figure
from tasks.length_figure import histogram_figure

PNG = b"\x89PNG"


@pytest.fixture
def plan():
    def groups(*sizes):
        return tuple(ReplicaGroup(ParallelConfig(tp, pp), num) for tp, pp, num in sizes)

    return DeploymentPlan(
        groups=groups((1, 1, 2), (2, 1, 1), (4, 4, 1)),
        num_gpus=22,
        predicted_step_seconds=1.2,
        lower_bound_seconds=1.0,
        solve_seconds=0.1,
        tenant_gpu_seconds={"chat": 6.0, "code": 18.0},
        pruned=(),
        alternatives=(
            PlanAlternative(groups((2, 1, 11)), 1.5),
            PlanAlternative(groups((1, 1, 2), (2, 1, 1), (4, 4, 1)), 1.2),
        ),
    )


def assert_is_png(path):
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 5_000


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_length_figure_has_a_panel_per_tenant_with_all_its_sequences(tmp_path):
    histogram = pl.DataFrame({"tenant": ["chat"] * 3 + ["code"], "length": [10, 20, 90, 700], "count": [1, 2, 1, 5]})

    figure = histogram_figure(histogram, [64, 512], tmp_path / "lengths.png")

    assert_is_png(tmp_path / "lengths.png")
    assert [axes.get_ylabel() for axes in figure.axes] == ["chat", "code"]
    assert texts(figure.axes[0]) == ["4 sequences\nmedian 20\nlongest 90"]
    for axes in figure.axes:
        assert sum(axes.patches[0].get_data().values) == pytest.approx(1.0)
        assert [line.get_xdata()[0] for line in axes.lines] == [64, 512]


def test_the_length_figure_can_show_tenants_whose_sequences_are_all_equally_long(tmp_path):
    histogram_figure(pl.DataFrame({"tenant": ["a"], "length": [10], "count": [3]}), [], tmp_path / "lengths.png")

    assert_is_png(tmp_path / "lengths.png")


def test_the_plan_figure_covers_every_gpu_once_and_shows_the_idle_ones(plan, tmp_path):
    gpus, costs, others = plan_figure(plan, tmp_path / "plan.png").axes

    assert_is_png(tmp_path / "plan.png")
    blocks = [patch for patch in gpus.patches if isinstance(patch, Rectangle)]
    assert sum(round(block.get_width() + 0.1) for block in blocks) == plan.num_gpus
    assert texts(gpus).count("idle") == 2
    assert texts(gpus).count("<4,4>") == 2  # GPUs 4 to 15, and 16 to 19 in the next row
    assert "2 GPUs are left idle" in gpus.get_title(loc="left")
    assert [label.get_text() for label in costs.get_yticklabels()] == ["code", "chat"]
    assert [label.get_text() for label in others.get_yticklabels()] == ["this plan", "<2,1>x11"]
    assert "gap 20.0%" in others.get_title(loc="left")


def test_the_loss_figure_has_a_line_per_tenant_and_a_hole_where_a_loss_is_missing(step_record, tmp_path):
    records = [step_record(step, loss=3.0 - 0.1 * step) for step in range(6)]
    records[2]["tenants"]["chat"]["loss"] = None
    del records[5]["tenants"]["code"]

    (axes,) = loss_figure(records, tmp_path / "losses.png").axes

    assert_is_png(tmp_path / "losses.png")
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(lines["chat"].get_xdata()) == [0, 1, 3, 4, 5]
    assert list(lines["code"].get_xdata()) == [0, 1, 2, 3, 4]
    assert list(lines["code"].get_ydata()) == pytest.approx([4.0, 3.9, 3.8, 3.7, 3.6])
    assert texts(axes) == ["chat", "code"]


def test_a_long_run_is_smoothed_with_its_single_steps_behind(step_record, tmp_path):
    records = [step_record(step, loss=2.0 + (-1) ** step) for step in range(60)]

    (axes,) = loss_figure(records, tmp_path / "losses.png").axes

    smoothed = next(line for line in axes.lines if line.get_label() == "chat")
    single = axes.lines[0]
    assert max(single.get_ydata()) == 3.0
    assert max(smoothed.get_ydata()[5:-5]) < 2.5


def test_the_balance_figure_shows_busy_waiting_and_predicted_of_every_replica(step_record, tmp_path):
    records = [step_record(step) for step in range(4)]

    replicas, imbalance = balance_figure(records, tmp_path / "balance.png").axes

    assert_is_png(tmp_path / "balance.png")
    assert [label.get_text() for label in replicas.get_yticklabels()] == ["replica 0", "replica 1"]
    waiting, busy, predicted = (
        patch.get_data().values for patch in replicas.patches[3:]
    )  # of replica 1, at the bottom
    assert list(waiting) == pytest.approx([0.9] * 4)  # the longest busy time fills 0.9 of a row: here 0.9 s
    assert list(busy) == pytest.approx([0.6] * 4)
    assert list(predicted) == pytest.approx([0.9] * 4)
    lines = {line.get_label(): line.get_ydata() for line in imbalance.lines}
    assert list(lines["measured"]) == pytest.approx([0.2] * 4)  # 0.9 / 0.75 - 1
    assert list(lines["predicted"]) == pytest.approx([0.0] * 4)


def test_the_balance_figure_leaves_a_hole_where_a_later_plan_has_fewer_replicas(step_record, tmp_path):
    records = [step_record(step) for step in range(3)]
    records[2] |= {"replica_seconds": [0.4], "predicted_replica_seconds": [0.4]}

    replicas, imbalance = balance_figure(records, tmp_path / "balance.png").axes

    waiting, busy, _ = (patch.get_data().values for patch in replicas.patches[3:])
    assert list(busy) == pytest.approx([0.6, 0.6, float("nan")], nan_ok=True)
    assert list(waiting) == pytest.approx([0.9, 0.9, float("nan")], nan_ok=True)
    measured = next(line for line in imbalance.lines if line.get_label() == "measured")
    assert list(measured.get_ydata()) == pytest.approx([0.2, 0.2, 0.0])


def test_the_padding_figure_weighs_steps_by_their_computed_tokens(step_record, tmp_path):
    records = [step_record(0) | {"num_tokens": 50, "num_computed_tokens": 100}]
    records += [step_record(1) | {"num_tokens": 900, "num_computed_tokens": 900}]

    figure = padding_figure(records, tmp_path / "padding.png")

    assert_is_png(tmp_path / "padding.png")
    assert list(figure.axes[0].patches[0].get_data().values) == [0.5, 0.0]
    assert figure.get_suptitle() == "Padding: 5.0% of all computed tokens"


def test_the_gpu_second_figure_stacks_the_tenants_up_to_the_bill_of_the_step(step_record, tmp_path):
    records = [step_record(step) for step in range(3)]
    del records[2]["tenants"]["code"]

    steps, totals = gpu_seconds_figure(records, tmp_path / "gpu_seconds.png").axes

    assert_is_png(tmp_path / "gpu_seconds.png")
    tops = {patch.get_label(): list(patch.get_data().values) for patch in steps.patches}
    assert tops == {"chat": [1.0, 1.0, 1.0], "code": [3.0, 3.0, 1.0]}
    code = next(patch for patch in steps.patches if patch.get_label() == "code")
    assert list(code.get_data().baseline) == tops["chat"]
    assert [label.get_text() for label in totals.get_yticklabels()] == ["code", "chat"]
    assert [text.strip() for text in texts(totals)] == ["4 (57%)", "3 (43%)"]


def test_a_tenant_has_the_same_colour_whatever_the_order_and_two_tenants_differ():
    assert tenant_colours(["b", "a"]) == tenant_colours(["a", "b", "b"])
    assert len(set(tenant_colours(map(str, range(len(COLOURS)))).values())) == len(COLOURS)


def test_labels_that_would_overlap_move_apart_and_the_others_stay():
    assert spread_apart([1.0, 5.0, 5.0], 1.0) == pytest.approx([1.0, 4.5, 5.5])
    assert spread_apart([2.0, 2.0, 2.1], 1.0) == pytest.approx([1.0333, 2.0333, 3.0333], abs=1e-3)
    assert spread_apart([], 1.0) == []
