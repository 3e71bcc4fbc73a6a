"""`lobra plan --num-gpus N`: the plan on N GPUs, and on 8, 16, ... up to N, for a run file of either kind."""

from pathlib import Path
from typing import Any

from rich.table import Table

from flows.config import read_run_file
from flows.preview import preview
from flows.simulate import is_simulation_file, read_simulation_file, scenario_of
from flows.validation import check_run
from planning.errors import InputError, PlanInfeasibleError
from planning.plan_file import plan_to_dict
from planning.strategies import Phase, strategy_phases
from planning.types import DeploymentPlan, plan_name
from planning.what_if import WhatIf, doubled_gpus, judge


def planned(run_file: Path, num_gpus: int | None = None) -> tuple[Phase, ...]:
    """The phases of a run file, on its own number of GPUs or on another one. Raises InputError as a run would."""
    if is_simulation_file(run_file):
        config = read_simulation_file(run_file)
        if num_gpus is not None:
            config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_gpus": num_gpus})})
        scenario = scenario_of(config)
        return strategy_phases(scenario.workload, scenario.candidates, scenario.num_gpus, scenario.planner)
    run = read_run_file(run_file)
    if num_gpus is not None:
        run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"num_gpus": num_gpus})})
    return preview(run, check_run(run, run_file)).plan()


def _joint_plan(run_file: Path, num_gpus: int) -> DeploymentPlan:
    phases = planned(run_file, num_gpus)
    if len(phases) > 1:
        raise InputError(f"{run_file}: planner.strategy trains tenants one by one; a curve needs lobra or task_fused")
    return phases[0].plan


def what_if(run_file: Path, num_gpus: int) -> WhatIf:
    """Plans on 8, 16, ... and `num_gpus` GPUs; numbers too small for any plan are left out, unless all are."""
    numbers = doubled_gpus(num_gpus)
    plans = []
    for number in numbers[:-1]:
        try:
            plans.append(_joint_plan(run_file, number))
        except PlanInfeasibleError:
            continue  # the curve starts where the longest sequence first fits
    return judge([*plans, _joint_plan(run_file, numbers[-1])])


def what_if_to_dict(answer: WhatIf) -> dict[str, Any]:
    """The plan of the largest number as `lobra plan --json` shows it, with the curve beside it."""
    curve = [
        {
            "num_gpus": plan.num_gpus,
            "plan": plan_to_dict(plan)["plan"],
            "predicted_step_seconds": plan.predicted_step_seconds,
            "gpu_seconds_per_step": plan.num_gpus * plan.predicted_step_seconds,
            "tenants": dict(plan.tenant_gpu_seconds),
        }
        for plan in answer.plans
    ]
    whole = {"curve": curve, "useful_gpus": answer.useful_gpus, "reason": answer.reason}
    return {**plan_to_dict(answer.plans[-1]), "what_if": whole}


def what_if_table(answer: WhatIf) -> Table:
    """One line per number of GPUs."""
    caveat = f" ({answer.plans[0].caveat})" if answer.plans[0].caveat else ""
    columns = ("GPUs", "plan", "step (s)", "gap", "GPU seconds per step")
    table = Table(*columns, title=f"What if{caveat}", caption=answer.reason)
    for plan in answer.plans:
        cost = f"{plan.num_gpus * plan.predicted_step_seconds:.4g}"
        step = f"{plan.predicted_step_seconds:.4g}"
        table.add_row(str(plan.num_gpus), plan_name(plan.groups), step, f"{plan.gap:.1%}", cost)
    return table
