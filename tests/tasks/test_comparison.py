"""Which variants are compared, their numbers against the right baseline, and the table that shows them."""

from typing import Any

import pytest

from planning.config import Batching, BucketRule, PlannerConfig, Strategy
from planning.errors import InputError
from tasks.comparison import (
    AdapterCheck,
    Variant,
    adapters_line,
    comparison_markdown,
    comparison_rows,
    comparison_to_dict,
    read_variants,
)
from tasks.comparison_figure import comparison_figure

PLANNER = PlannerConfig(batching=Batching.PACKED)


def summary(gpu_seconds: float, predicted: float, plan: str = "<1,1>x2") -> dict[str, Any]:
    """4 steps on 2 GPUs."""
    return {
        "plan": plan,
        "num_gpus": 2,
        "steps": 4,
        "gpu_seconds": gpu_seconds,
        "overhead_gpu_seconds": 5.0,
        "predicted_step_seconds": predicted,
        "measured_step_seconds": gpu_seconds / 8,
        "padding_ratio": 0.1,
        "imbalance": 0.2,
        "tenants": {"a|b": {"last_loss": 1.5}},
    }


def test_what_a_variant_leaves_out_is_as_in_the_run_file() -> None:
    variants = read_variants(["lobra", "task_fused:padded", " task_fused:padded:fixed "], PLANNER)
    assert variants == (
        Variant(Strategy.LOBRA, Batching.PACKED, BucketRule.DYNAMIC),
        Variant(Strategy.TASK_FUSED, Batching.PADDED, BucketRule.DYNAMIC),
        Variant(Strategy.TASK_FUSED, Batching.PADDED, BucketRule.FIXED),
    )
    assert [variant.name for variant in variants] == ["lobra-packed", "task_fused-padded", "task_fused-padded-fixed"]
    assert variants[1].planner(PLANNER) == PlannerConfig(strategy=Strategy.TASK_FUSED)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lobra"], "at least two"),
        (["lobra", "lobra:packed"], "lobra-packed is given twice"),
        (["lobra", "fused"], "'fused' in 'fused' is unknown; choose from lobra, lobra_sequential"),
        (["lobra", "task_fused:dense"], "'dense'.*choose from padded, packed"),
        (["lobra", "lobra:padded:fixed:now"], "too many parts"),
    ],
)
def test_a_wrong_variant_is_named_with_the_known_words(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_variants(texts, PLANNER)


def test_reductions_are_against_task_fused_under_the_same_batching_simulated_and_measured_apart() -> None:
    variants = read_variants(["lobra:padded", "task_fused:padded", "lobra:packed"], PLANNER)
    padded, fused, packed = comparison_rows(variants, [summary(8.0, 1.0), summary(10.0, 2.0), summary(4.0, 0.5)])
    assert (padded.simulated_gpu_seconds, padded.measured_gpu_seconds) == (8.0, 8.0)
    assert (padded.simulated_reduction, padded.measured_reduction) == pytest.approx((0.5, 0.2))
    assert (fused.simulated_reduction, fused.measured_reduction) == (0.0, 0.0)
    assert (packed.simulated_reduction, packed.measured_reduction) == (None, None)


def test_the_table_names_adapters_that_differ_and_survives_odd_names(tmp_path) -> None:
    variants = read_variants(["lobra:padded", "task_fused:padded"], PLANNER)
    rows = comparison_rows(variants, [summary(8.0, 1.0), summary(10.0, 2.0)])
    good = AdapterCheck("a|b", "lobra-padded", "task_fused-padded", 1e-3, 1e-6, True)
    bad = AdapterCheck("other", "lobra-padded", "task_fused-padded", 0.5, 0.3, False)

    comparison = comparison_to_dict("demo", rows, [good, bad])

    assert comparison["adapters_within_tolerance"] is False
    assert "1 OUTSIDE the tolerance" in adapters_line(comparison)
    assert "differs by 3.0e-01 of 1e-04, other" in adapters_line(comparison)
    lines = [line for line in comparison_markdown(comparison).splitlines() if line.startswith("| ")]
    assert lines[2] == "| lobra-padded | 8 (-50.0%) | 8 (-20.0%) | 10.0% | 20.0% | 1 |"
    assert lines[6] == "| lobra-padded | &lt;1,1>x2 | 4 | 1.500 |"
    axes = comparison_figure(comparison, tmp_path / "comparison.png").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lobra-padded", "task_fused-padded"]
    assert [text.get_text().strip() for text in axes.texts] == ["8 (-50%)", "16", "8 (-20%)", "10"]
