"""The flow `finetune`: tenants' files in, adapters out.

Runs from the command line (`lobra run`), by itself (`python -m flows.finetune RUN.yaml`) and as a Prefect deployment.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

import tasks.deploy
import tasks.prepare
import tasks.profile
import tasks.publish
import tasks.train
from data_prep.prepare import PreparedTenant
from flows.config import RunConfig, read_run_file
from flows.preview import deployment_request, prepare_requests, stored_profile_path
from flows.profile import profile_request
from flows.validation import check_run
from planning.config import ProfileSource
from planning.phase_file import describe
from planning.strategies import Phase
from tasks.disk import check_free_disk
from tasks.initial_adapters import freeze_initial_adapters
from tasks.publish import PublishRequest
from tasks.run_folder import RunFolder, open_run_folder
from tasks.tracking import RunIdentity, Tracker
from training.config import TenantConfig
from training.deployment import propose, split_outcomes
from training.request import TrainingFiles, TrainingRequest


@flow(name="finetune", flow_run_name="{run.name}", validate_parameters=True)
def finetune(run: RunConfig, run_dir: Path | None = None, fresh: bool = False, replan: bool = False) -> dict[str, Any]:
    """Train all tenants of a run jointly and publish their adapters; returns the content of summary.json.

    Without `run_dir` the folder is runs/<flow run id>, so that a retry of the flow run resumes. `replan` has a resumed
    run planned anew, perhaps on another cluster; its adapters stay within the numerics contract.
    """
    base = check_run(run)
    with open_run_folder(run_dir or Path("runs") / str(flow_run.id), resolved(run), fresh, replan) as folder:
        check_free_disk(run.tenants, base, run.training, run.data.cache_dir, folder.path)
        freeze_initial_adapters(run.tenants, folder)
        requests = prepare_requests(run, base, folder.path)
        outcomes = tasks.prepare.prepare(requests, run.data.num_workers, run.training.allows_failures, folder)
        prepared, _ = split_outcomes(outcomes, allow_failures=True)
        histogram = tasks.prepare.measure(prepared, folder)
        if run.profile.source is ProfileSource.MEASURE and not folder.profile.exists():
            tasks.profile.measure_profile(profile_request(run, base, histogram), stored_profile_path(run))
        profile = tasks.deploy.profile(run.profile, stored_profile_path(run), run.training.activations, folder)
        deployment = deployment_request(run, base, [tenant.tenant for tenant in prepared])
        candidates = propose(deployment, profile)
        phases = tasks.deploy.plan(deployment, candidates, histogram, folder)
        request = TrainingRequest(
            files=TrainingFiles(folder.checkpoints, folder.steps, folder.step_plans, folder.logs, folder.control),
            base_model=run.base_model,
            tenants=deployment.tenants,
            token_paths={tenant.tenant: tenant.token_path for tenant in prepared},
            phases=phases,
            candidates=candidates.usable,
            cluster=run.cluster,
            planner=run.planner,
            training=run.training,
            evaluation_paths=evaluation_paths(deployment.tenants, prepared),
        )
        with Tracker(run.tracking, identity(run, folder, phases)) as tracker:
            result = tasks.train.train(request, folder, tracker)
            left = PublishRequest(
                strategy=run.planner.strategy,
                base_model=run.base_model,
                tenants=deployment.tenants,
                phases=phases,
                outcomes=outcomes,
                histogram=histogram,
                result=result,
            )
            return tasks.publish.publish(left, folder, tracker)


def evaluation_paths(tenants: Sequence[TenantConfig], prepared: Sequence[PreparedTenant]) -> dict[str, Path]:
    """The held-out rows of the tenants that are evaluated."""
    held_out = {tenant.tenant: tenant.evaluation_path for tenant in prepared}
    evaluated = [tenant.name for tenant in tenants if tenant.evaluation is not None]
    return {name: path for name in evaluated if (path := held_out[name]) is not None}


def resolved(run: RunConfig) -> dict[str, Any]:
    """The configuration that a resumed run must share: everything but what changes no adapter."""
    free = {
        "max_restarts",
        "max_gpu_seconds",
        "keep_checkpoints",
        "trace_steps",
        "launch_timeout_seconds",
        "step_timeout_seconds",
    }
    return run.model_dump(mode="json", exclude={"tracking": True, "data": {"num_workers"}, "training": free})


def identity(run: RunConfig, folder: RunFolder, phases: Sequence[Phase]) -> RunIdentity:
    """How MLflow knows the run."""
    content = json.dumps(resolved(run), sort_keys=True)
    return RunIdentity(
        run_name=run.name,
        run_dir=folder.path,
        config_hash=hashlib.sha256(content.encode()).hexdigest(),
        params={
            "strategy": run.planner.strategy.value,
            "batching": run.planner.batching.value,
            "plan": describe(phases),
            "num_gpus": str(run.cluster.num_gpus),
            "num_tenants": str(len(run.tenants)),
            "num_buckets": str(run.planner.num_buckets),
            "base_model": str(run.base_model.path),
            "gap": f"{phases[0].plan.gap:.4f}",
        },
        tags={"prefect.flow_run_id": str(flow_run.id)} if flow_run.id else {},
        tenants=tuple(tenant.name for tenant in run.tenants),
        tenant_params={
            tenant.name: {
                "rank": str(tenant.adapter.rank),
                "alpha": str(tenant.adapter.alpha),
                "target_modules": ",".join(tenant.adapter.target_modules),
                "learning_rate": str(tenant.optimiser.learning_rate),
                "schedule": tenant.optimiser.schedule.value,
                "warmup_steps": str(tenant.optimiser.warmup_steps),
                "batch_size": str(tenant.batch_size),
                "seed": str(tenant.seed),
                "initial_adapter": str(tenant.adapter.initial_adapter or ""),
            }
            for tenant in run.tenants
        },
    )


if __name__ == "__main__":
    finetune(run=read_run_file(Path(sys.argv[1])))
