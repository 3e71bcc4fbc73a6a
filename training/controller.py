"""The controller: plans each step while the fleet trains the one before, collects reports, accounts, checkpoints.

It owns the step number, the tenants' status and the journals; ranks own adapters and optimisers. Everything is charged:
GPU seconds of a step are reserved GPUs x wall seconds from the end of the last charge to the step's last report;
launch, checkpoints and the stop are overhead. Both together are reserved GPUs x wall time.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from data_prep.token_file import TokenFile
from planning.config import ClusterConfig, PlannerConfig
from planning.dispatch import Dispatcher
from planning.errors import LobraError
from planning.types import Candidate, DeploymentPlan
from training.checkpoint import Checkpoint, CheckpointStore
from training.config import BaseModelConfig, OnTenantError, TenantConfig, TrainingConfig
from training.fleet import Fleet
from training.fleet_spec import FleetSpec
from training.journal import Journal, read_journal
from training.progress import TenantProgress, TenantStatus
from training.step_planner import PlannedStep, StepPlanner
from training.step_record import step_record

Observer = Callable[[dict], None]


class TenantFailedError(LobraError):
    """A tenant diverged and `training.on_tenant_error` is `fail`."""


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """Where training writes."""

    checkpoints: Path
    steps: Path
    plans: Path
    logs: Path


@dataclass(frozen=True)
class TrainingRequest:
    """Everything one joint training needs."""

    files: TrainingFiles
    base_model: BaseModelConfig
    tenants: tuple[TenantConfig, ...]
    token_paths: dict[str, Path]
    plan: DeploymentPlan
    candidates: tuple[Candidate, ...]
    cluster: ClusterConfig
    planner: PlannerConfig
    training: TrainingConfig


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The last checkpoint and how every tenant ended."""

    checkpoint: Checkpoint
    tenants: dict[str, TenantProgress]


class _GpuClock:
    """Splits wall time without gaps: each charge covers everything since the one before."""

    def __init__(self, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._last = time.perf_counter()

    def charge(self) -> float:
        """GPU seconds since the last charge."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds * self._num_gpus


def train(request: TrainingRequest, observe: Observer = lambda _record: None) -> TrainingResult:
    """Train all tenants to their last step, from the newest checkpoint if there is one.

    `observe` sees every record of steps.jsonl as it is written. Raises FleetError, CheckpointError or
    TenantFailedError; what was checkpointed stays, and calling again resumes.
    """
    with ExitStack() as stack:
        controller = _Controller(request, observe, stack)
        try:
            return controller.run()
        except BaseException as error:
            controller.record_abort(error)
            raise


class _Controller:
    def __init__(self, request: TrainingRequest, observe: Observer, stack: ExitStack) -> None:
        self.request = request
        self.observe = observe
        self.stack = stack
        self.clock = _GpuClock(request.cluster.num_gpus)
        token_files = {name: TokenFile(path) for name, path in request.token_paths.items()}
        self.store = CheckpointStore(request.files.checkpoints, request.training.keep_checkpoints)
        self.replay = {record["step"]: record for record in read_journal(request.files.plans)}
        self.steps = stack.enter_context(Journal(request.files.steps))
        self.plans = stack.enter_context(Journal(request.files.plans))
        checkpoint = self.store.latest(self._report_damage)
        self.checkpoint = checkpoint
        self.step = checkpoint.step if checkpoint else 0
        self.progress = {
            tenant.name: TenantProgress.from_dict(checkpoint.state["tenants"][tenant.name])
            if checkpoint
            else TenantProgress(num_steps=tenant.num_steps(token_files[tenant.name].num_rows))
            for tenant in request.tenants
        }
        by_config = {candidate.config: candidate for candidate in request.candidates}
        dispatcher = Dispatcher(
            request.plan.replicas, by_config, request.planner.num_buckets, request.planner.max_search_moves
        )
        self.planner = StepPlanner(request.plan, request.candidates, dispatcher, token_files)
        self.executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="step-planner"))

    def run(self) -> TrainingResult:
        if not self._active(self.step):  # everything was trained before: no fleet needed
            assert self.checkpoint is not None
            return TrainingResult(self.checkpoint, self.progress)
        fleet = self.stack.enter_context(Fleet(self._spec(), generation=1))
        fleet.launch(self.request.training.launch_timeout_seconds)
        num_steps = {name: progress.num_steps for name, progress in self.progress.items()}
        self._record(
            {"event": "launch", "step": self.step, "num_steps": num_steps, "overhead_gpu_seconds": self.clock.charge()}
        )
        planned, wait_seconds = self._plan(self.step, self._active(self.step)), 0.0
        while planned is not None:
            planned, wait_seconds = self._train_step(fleet, planned, wait_seconds)
            if planned is None or self.step % self.request.training.save_every == 0:
                self._save(fleet)
        fleet.stop()
        self._record({"event": "stop", "step": self.step, "overhead_gpu_seconds": self.clock.charge()})
        checkpoint = self.store.latest(self._report_damage)
        assert checkpoint is not None
        return TrainingResult(checkpoint, self.progress)

    def _train_step(self, fleet: Fleet, planned: PlannedStep, wait_seconds: float) -> tuple[PlannedStep | None, float]:
        """Train one step; returns the next step's plan, made meanwhile, and how long the fleet waited for it."""
        if self.step not in self.replay:
            self.plans.append(planned.to_record())
        fleet.begin_step(planned.plan)
        expected = self._active(self.step + 1)
        upcoming: Future[PlannedStep | None] = self.executor.submit(self._plan, self.step + 1, expected)
        reports = fleet.finish_step()
        record = step_record(planned, reports, self.request.plan, self.planner.candidates, self.clock.charge())
        record["plan_wait_seconds"] = wait_seconds
        record["num_steps"] = max(progress.num_steps for progress in self.progress.values())
        self._record(record)
        self.step += 1
        self._advance(record)
        start = time.perf_counter()
        following = upcoming.result()
        active = self._active(self.step)
        if active != expected:  # the report changed who trains: the plan made meanwhile is void
            following = self._plan(self.step, active)
        return following, time.perf_counter() - start

    def _plan(self, step: int, tenants: list[TenantConfig]) -> PlannedStep | None:
        """The plan of a step for its active tenants; None when there are none. Dispatches on record are replayed."""
        if not tenants:
            return None
        if step in self.replay:
            journalled = PlannedStep.from_record(self.replay[step])
            if journalled.tenants == {tenant.name for tenant in tenants}:
                return journalled
        return self.planner.plan_step(step, tenants)

    def _active(self, step: int) -> list[TenantConfig]:
        return [tenant for tenant in self.request.tenants if self.progress[tenant.name].is_active(step)]

    def _advance(self, record: dict) -> None:
        """Tenants' progress after a step; quarantine those whose updates stay non-finite."""
        limit = self.request.training.max_nonfinite_steps
        for name, result in record["tenants"].items():
            self.progress[name] = self.progress[name].after_step(self.step, result["skipped"], limit)
            if self.progress[name].status is TenantStatus.QUARANTINED:
                self._record({"event": "quarantine", "step": self.step, "tenant": name})
                if self.request.training.on_tenant_error is OnTenantError.FAIL:
                    raise TenantFailedError(
                        f"tenant {name!r}: {self.progress[name].reason} at step {self.step}; lower its learning rate, "
                        "check its data, or set training.on_tenant_error: skip to go on without it"
                    )

    def _save(self, fleet: Fleet) -> None:
        state = {"step": self.step, "tenants": {name: progress.to_dict() for name, progress in self.progress.items()}}
        self.plans.sync()
        folder = self.store.save(state, fleet.save)
        self._record(
            {
                "event": "checkpoint",
                "step": self.step,
                "folder": folder.name,
                "overhead_gpu_seconds": self.clock.charge(),
            }
        )
        self.steps.sync()

    def _spec(self) -> FleetSpec:
        request = self.request
        return FleetSpec(
            replicas=request.plan.replicas,
            base_model=request.base_model,
            tenants=request.tenants,
            token_paths=request.token_paths,
            checkpoint=self.checkpoint.folder if self.checkpoint else None,
            num_updates={name: progress.num_updates for name, progress in self.progress.items()},
            backend=request.cluster.backend,
            step_timeout_seconds=request.training.step_timeout_seconds,
            log_dir=request.files.logs,
        )

    def record_abort(self, error: BaseException) -> None:
        """Charge the time of a run that ends early."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._record(
            {"event": "abort", "step": self.step, "reason": reason, "overhead_gpu_seconds": self.clock.charge()}
        )

    def _record(self, record: dict) -> None:
        record = {"schema_version": 1, "time": time.time(), **record}
        self.steps.append(record)
        self.observe(record)

    def _report_damage(self, folder: Path, reason: str) -> None:
        self._record({"event": "damaged_checkpoint", "folder": folder.name, "reason": reason})
