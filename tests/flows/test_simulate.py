"""`lobra simulate` and what-if plans: shipped run files, JSON, figures, and errors with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from flows.simulate import (
    SimulationConfig,
    chosen_strategies,
    is_simulation_file,
    read_simulation_file,
    run_simulation,
    scenario_of,
)
from flows.simulation_figures import draw_simulation
from flows.what_if import planned, what_if, what_if_to_dict
from planning.config import Strategy
from planning.errors import InputError

RUNS = Path(__file__).resolve().parents[2] / "infra" / "runs"
SHIPPED = sorted(path for path in RUNS.glob("*.yaml") if is_simulation_file(path))


def small(**simulation: Any) -> SimulationConfig:
    content = {
        "name": "small",
        "tenants": [
            {"name": "XSum", "batch_size": 16},
            {"name": "code", "batch_size": 8, "length_model": "CommitPackFt"},
        ],
        "cluster": {"num_gpus": 8},
        "profile": {"source": "preset", "preset": "llama2_7b_a100_40gb"},
        "planner": {"num_evaluation_batches": 4},
        "simulation": {"steps": 3, **simulation},
    }
    return SimulationConfig.model_validate(content)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_simulation_file_is_read_and_has_configurations(path: Path) -> None:
    config = read_simulation_file(path)
    assert config.name == path.stem
    assert scenario_of(config).candidates.usable
    assert config.simulation.values or config.simulation.experiment in ("strategies", "ablation", "two_stage")


def test_shipped_files_cover_every_experiment() -> None:
    assert {read_simulation_file(path).simulation.experiment.value for path in SHIPPED} == {
        "strategies", "ablation", "num_buckets", "num_gpus", "num_tenants", "planner_time", "two_stage"
    }  # fmt: skip


def test_the_demo_is_no_simulation_file() -> None:
    assert not is_simulation_file(RUNS / "demo.yaml")


def test_json_carries_every_row_with_both_reductions() -> None:
    content = run_simulation(small(), tuple(Strategy), 3).content
    json.dumps(content, allow_nan=False)
    assert (content["num_gpus"], content["steps"], content["length_model"]) == (8, 3, "gamma")
    baseline, packed = content["rows"][:2]
    assert (baseline["strategy"], baseline["batching"], baseline["reduction"]) == ("task_fused", "padded", 0.0)
    assert (packed["batching"], packed["reduction_against_packed"], packed["padding_ratio"]) == ("packed", 0.0, 0.0)
    assert {row["strategy"] for row in content["rows"]} == set(Strategy)
    for row in content["rows"]:
        assert row["bound_gpu_seconds_per_step"] <= row["gpu_seconds_per_step"] * (1 + 1e-9)
        expected = 100 * (1 - row["gpu_seconds_per_step"] / baseline["gpu_seconds_per_step"])
        assert row["reduction"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "simulation",
    [
        {"experiment": "strategies"},
        {
            "experiment": "ablation",
            "given_plan": [{"tp": 1, "pp": 1, "replicas": 4}, {"tp": 4, "pp": 1, "replicas": 1}],
        },
        {"experiment": "num_buckets", "values": [2, 4]},
        {"experiment": "num_gpus", "values": [8, 16]},
        {"experiment": "num_tenants", "values": [1, 2]},
        {"experiment": "planner_time", "values": [8, 16]},
        {"experiment": "two_stage"},
    ],
    ids=lambda simulation: simulation["experiment"],
)
def test_every_experiment_gives_rows_a_table_and_a_figure(simulation: dict[str, Any], tmp_path: Path) -> None:
    result = run_simulation(small(**simulation), (Strategy.LOBRA,), 2)
    result.write(tmp_path)
    draw_simulation(result.content, tmp_path / "small.png")
    assert json.loads((tmp_path / "small.json").read_text()) == result.content
    lines = (tmp_path / "small.md").read_text().splitlines()
    assert "simulated" in lines[0]
    assert len(lines) == 6 + len(result.rows)
    assert (tmp_path / "small.png").stat().st_size > 10_000
    assert result.to_tables()[0].row_count == len(result.rows)


def test_a_joint_optimum_per_step_is_never_slower_than_one_plan_for_all() -> None:
    for row in run_simulation(small(experiment="two_stage"), (Strategy.LOBRA,), 3).rows:
        assert row["joint_seconds"] <= row["two_stage_seconds"] * (1 + 1e-9)


def test_an_unvalidated_profile_is_named_in_every_output() -> None:
    config = small().model_copy(
        update={"profile": small().profile.model_copy(update={"preset": "llama2_7b_a100_80gb_analytic"})}
    )
    result = run_simulation(config, (Strategy.TASK_FUSED,), 1)
    assert "unvalidated" in result.content["caveat"]
    assert "unvalidated" in result.to_markdown().splitlines()[0]
    assert "unvalidated" in str(result.to_tables()[0].title)


def write(config: SimulationConfig, path: Path) -> Path:
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def test_a_histogram_file_stands_for_data(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("length,count\n30,5\n20,7\n30,1\n")
    config = small()
    tenant = config.tenants[0].model_copy(update={"histogram": tmp_path / "lengths.csv"})
    workload = scenario_of(config.model_copy(update={"tenants": (tenant,)})).workload
    assert (workload.tenants[0].lengths.tolist(), workload.tenants[0].counts.tolist()) == ([20, 30], [7, 6])
    missing = tenant.model_copy(update={"histogram": tmp_path / "none.csv"})
    with pytest.raises(InputError, match=r"none\.csv.*columns length, count"):
        scenario_of(config.model_copy(update={"tenants": (missing,)}))


def test_more_gpus_shorten_the_step_until_the_longest_sequence_stands_alone(tmp_path: Path) -> None:
    run_file = write(small(), tmp_path / "small.yaml")
    answer = what_if(run_file, 128)
    steps = [plan.predicted_step_seconds for plan in answer.plans]
    assert steps == sorted(steps, reverse=True)
    assert [plan.num_gpus for plan in answer.plans] == [8, 16, 32, 64, 128]
    assert answer.useful_gpus < 128
    assert "longest sequence" in answer.reason
    content = what_if_to_dict(answer)
    assert content["num_gpus"] == 128
    assert len(content["what_if"]["curve"]) == 5
    assert planned(run_file)[0].plan.num_gpus == 8


def test_the_command_line_prints_plan_and_simulation_as_json(tmp_path: Path) -> None:
    run_file, runner = str(write(small(), tmp_path / "small.yaml")), CliRunner()
    plan = json.loads(runner.invoke(app, ["plan", run_file, "--json"]).stdout)
    costs = {"predicted_step_seconds", "lower_bound_seconds", "gap", "solve_seconds", "gpu_seconds_per_step", "tenants"}
    assert set(plan) >= {"plan", "pruned", *costs}
    figure = tmp_path / "curve.png"
    curve = runner.invoke(app, ["plan", run_file, "--json", "--num-gpus", "16", "--figure", str(figure)])
    assert json.loads(curve.stdout)["num_gpus"] == 16
    assert figure.exists()
    simulated = runner.invoke(app, ["simulate", run_file, "--strategies", "lobra", "--steps", "2", "--json"])
    assert json.loads(simulated.stdout)["steps"] == 2
    assert "(simulated)" in runner.invoke(app, ["simulate", run_file, "--strategies", "lobra", "--steps", "1"]).stdout


def test_mistakes_are_named_with_the_known_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'lobre' is unknown; choose from lobra"):
        chosen_strategies("lobra,lobre")
    with pytest.raises(InputError, match=r"simulation\.values is empty"):
        run_simulation(small(experiment="num_gpus"), (), 1)
    bad = yaml.safe_load(write(small(), tmp_path / "small.yaml").read_text())
    bad["simulation"]["stepss"] = 3
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    with pytest.raises(InputError, match=r"unknown key simulation\.stepss; did you mean steps"):
        read_simulation_file(tmp_path / "bad.yaml")
    unknown = small().model_copy(update={"tenants": (small().tenants[0].model_copy(update={"name": "nobody"}),)})
    with pytest.raises(InputError, match="'nobody' is not shipped; choose from databricks"):
        scenario_of(unknown)
