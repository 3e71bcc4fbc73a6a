"""The controller: plans each step while the fleet trains the one before, collects reports, checkpoints.

It owns the run's progress and the journals; ranks own adapters and optimisers. A fleet that fails is launched again
from the newest checkpoint, up to `max_restarts` times; steps are replayed as they were dispatched, so the adapters are
those of the unbroken run. Phases (one for joint strategies) follow one another; the fleet is launched anew only where
the layout changes.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from data_prep.token_file import TokenFile
from planning.dispatch import dispatcher_for
from planning.errors import LobraError
from planning.strategies import Phase
from training.checkpoint import Checkpoint, CheckpointStore
from training.checkpoint_writer import CheckpointWriter
from training.config import OnTenantError
from training.control_file import cancelled_tenants
from training.fleet import Fleet, FleetError
from training.fleet_spec import FleetSpec
from training.journal import Journal, read_journal
from training.ledger import Ledger, Observer
from training.progress import RunProgress, TenantProgress, TenantStatus
from training.request import TrainingRequest, TrainingResult
from training.step_planner import PlannedStep, StepPlanner
from training.step_record import step_record

ABANDON_SECONDS = 8.0  # a stopped run waits this long for the running step
ABANDON_SAVE_SECONDS = 6.0  # and then this long for a checkpoint of the one before


class TenantFailedError(LobraError):
    """A tenant diverged and `training.on_tenant_error` is `fail`."""


class BudgetSpentError(LobraError):
    """The run reached `training.max_gpu_seconds`; everything done is checkpointed."""


def train(request: TrainingRequest, observe: Observer = lambda _record: None) -> TrainingResult:
    """Train all tenants to their last step, from the newest checkpoint if there is one.

    `observe` sees every record of steps.jsonl as it is written. Raises FleetError, CheckpointError, TenantFailedError
    or BudgetSpentError; what was checkpointed stays, and calling again resumes. KeyboardInterrupt and Prefect's
    termination signal checkpoint the last completed step, end the fleet and go on to the caller.
    """
    with ExitStack() as stack:
        controller = _Controller(request, observe, stack)
        try:
            return controller.run()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            controller.ledger.overhead("abort", controller.progress.step, reason=reason)
            raise


@dataclass(frozen=True, slots=True)
class _RunningStep:
    """The step that the fleet trains, by which planner, and how long the fleet waited for its plan."""

    planner: StepPlanner
    planned: PlannedStep
    wait_seconds: float


class _Controller:
    def __init__(self, request: TrainingRequest, observe: Observer, stack: ExitStack) -> None:
        files = request.files
        self.request = request
        self.token_files = {name: TokenFile(path) for name, path in request.token_paths.items()}
        self.by_name = {tenant.name: tenant for tenant in request.tenants}
        self.replay = {record["step"]: record for record in read_journal(files.plans)}
        self.ledger = Ledger(files.steps, request.cluster.num_gpus, observe)
        stack.enter_context(self.ledger.journal)
        self.plans = stack.enter_context(Journal(files.plans))
        self.executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="step-planner"))
        self.store = CheckpointStore(files.checkpoints, request.training.keep_checkpoints)
        self.writer = stack.enter_context(CheckpointWriter(self.store, (self.plans, self.ledger.journal)))
        self._running: _RunningStep | None = None
        self.progress, self.checkpoint = self._restore()

    def run(self) -> TrainingResult:
        """All phases, through restarts of the fleet."""
        num_restarts = num_launches = 0
        while self._enter_next_phase():
            num_launches += 1
            fleet = Fleet(self._fleet_spec(), num_launches)
            try:
                self._live(fleet)
            except FleetError as error:
                num_restarts += 1
                if not fleet.is_ready or num_restarts > self.request.training.max_restarts:
                    raise
                self.ledger.overhead("restart", self.progress.step, reason=str(error))
                self._running = None
            self.progress, self.checkpoint = self._restore()
        assert self.checkpoint is not None, "a run without a step was let through"
        return TrainingResult(self.checkpoint, self.progress.tenants)

    def _live(self, fleet: Fleet) -> None:
        """One life of the fleet: train until all is done or the layout changes, then checkpoint and stop."""
        with fleet:
            fleet.launch(self.request.training.launch_timeout_seconds)
            num_steps = {name: tenant.num_steps for name, tenant in self.progress.tenants.items()}
            self.ledger.overhead("launch", self.progress.step, num_steps=num_steps)
            try:
                while self._enter_next_phase() and self._phase.plan.replicas == fleet.spec.replicas:
                    self._train_phase(fleet)
                self._save(fleet)
                self.writer.finish()
            except BaseException as error:
                if not isinstance(error, Exception):  # stopped from outside: KeyboardInterrupt, TerminationSignal
                    self._save_last_step(fleet)
                raise
            fleet.stop()
        self.ledger.overhead("stop", self.progress.step)

    def _train_phase(self, fleet: Fleet) -> None:
        plan = self._phase.plan
        by_config = {candidate.config: candidate for candidate in self.request.candidates}
        dispatcher = dispatcher_for(plan, by_config, self.request.planner)
        planner = StepPlanner(plan, by_config, dispatcher, self.token_files)
        planned, wait_seconds = self._plan(planner, self.progress.step, self._active()), 0.0
        while planned is not None:
            planned, wait_seconds = self._train_step(fleet, planner, planned, wait_seconds)
            self.writer.check()
            self._check_budget(fleet)
            if planned is not None and self.progress.step % self.request.training.save_every == 0:
                self._save(fleet)

    def _train_step(
        self, fleet: Fleet, planner: StepPlanner, planned: PlannedStep, wait_seconds: float
    ) -> tuple[PlannedStep | None, float]:
        """Train one step; returns the next step's plan, made meanwhile, and how long the fleet waited for it."""
        self._journal_plan(planned)
        self._running = _RunningStep(planner, planned, wait_seconds)
        fleet.begin_step(planned.plan)
        following = planned.plan.step + 1
        expected = self._active(following)
        upcoming: Future[PlannedStep | None] = self.executor.submit(self._plan, planner, following, expected)
        self._complete_step(fleet.finish_step())
        start = time.perf_counter()
        upcoming_plan = upcoming.result()
        if self._active() != expected:  # the report changed who trains: the plan made meanwhile is void
            upcoming_plan = self._plan(planner, following, self._active())
        return upcoming_plan, time.perf_counter() - start

    def _plan(self, planner: StepPlanner, step: int, names: tuple[str, ...]) -> PlannedStep | None:
        """The plan of a step for its active tenants; None when there are none. Dispatches on record are replayed."""
        if not names:
            return None
        if step in self.replay:
            journalled = PlannedStep.from_record(self.replay[step])
            if journalled.tenants == set(names):
                return journalled
        return planner.plan_step(step, step - self.progress.phase_start, [self.by_name[name] for name in names])

    def _journal_plan(self, planned: PlannedStep) -> None:
        step, record = planned.plan.step, planned.to_record()
        if step not in self.replay or self.replay[step]["plan"] != record["plan"]:
            self.plans.append(record)
            self.replay[step] = record

    def _complete_step(self, reports: list[dict]) -> None:
        """Account and record the running step, and move on: tenants finish, are quarantined or cancelled."""
        assert self._running is not None
        running, self._running = self._running, None
        record = step_record(running.planned, reports, running.planner, self.ledger.charge())
        record["plan_wait_seconds"] = running.wait_seconds
        record["phase"] = self.progress.phase
        record["num_steps"] = self.progress.total_steps(self.request.phases)
        skipped = {name: result["skipped"] for name, result in record["tenants"].items()}
        before = self.progress
        self.progress = before.after_step(skipped, self.request.training.max_nonfinite_steps)
        self.ledger.record(record)
        for name in cancelled_tenants(self.request.files.control, tuple(self.by_name)):
            self.progress = self.progress.without_tenant(name, "cancelled by control.json")
        self._record_ended_tenants(before)

    def _record_ended_tenants(self, before: RunProgress) -> None:
        for name, tenant in self.progress.tenants.items():
            if tenant.status is before.tenants[name].status:
                continue
            self.ledger.record({"event": tenant.status.value, "step": self.progress.step, "tenant": name})
            is_failure = tenant.status is TenantStatus.QUARANTINED
            if is_failure and self.request.training.on_tenant_error is OnTenantError.FAIL:
                raise TenantFailedError(
                    f"tenant {name!r}: {tenant.reason} at step {self.progress.step}; lower its learning rate, check "
                    "its data, or set training.on_tenant_error: skip to go on without it"
                )

    def _check_budget(self, fleet: Fleet) -> None:
        limit = self.request.training.max_gpu_seconds
        if limit is not None and self.ledger.spent_gpu_seconds >= limit and self._active():
            self._save(fleet)
            self.writer.finish()
            raise BudgetSpentError(
                f"training.max_gpu_seconds {limit:g} is spent after step {self.progress.step}; everything done is "
                "checkpointed: raise it and run again to go on"
            )

    def _save(self, fleet: Fleet) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        if self.writer.saved_step != self.progress.step:
            self.writer.begin(fleet, self.progress.to_dict())
            self.ledger.overhead("checkpoint", self.progress.step)

    def _save_last_step(self, fleet: Fleet) -> None:
        """Checkpoint the last completed step of an interrupted run, in bounded time; the run ends either way."""
        with suppress(LobraError):
            if self._running is not None:
                reports = fleet.finish_step_within(ABANDON_SECONDS)
                if reports is None:
                    self.writer.abandon_step(fleet, self.progress.to_dict(), ABANDON_SAVE_SECONDS)
                    return
                self._complete_step(reports)
            self._save(fleet)
            self.writer.finish()

    @property
    def _phase(self) -> Phase:
        return self.request.phases[self.progress.phase]

    def _active(self, step: int | None = None) -> tuple[str, ...]:
        return self.progress.active(self.request.phases, self.progress.step if step is None else step)

    def _enter_next_phase(self) -> bool:
        """Go to the first phase that has a step left; False when none has."""
        while self.progress.phase < len(self.request.phases):
            if self._active():
                return True
            self.progress = replace(self.progress, phase=self.progress.phase + 1, phase_start=self.progress.step)
        return False

    def _restore(self) -> tuple[RunProgress, Checkpoint | None]:
        """Progress of the newest whole checkpoint, or of a run not yet begun."""
        damaged: list[tuple[str, str]] = []
        checkpoint = self.store.latest(lambda folder, reason: damaged.append((folder.name, reason)))
        for folder, reason in damaged:
            self.ledger.record({"event": "damaged_checkpoint", "folder": folder, "reason": reason})
        if checkpoint is not None:
            return RunProgress.from_dict(checkpoint.state), checkpoint
        num_rows = {name: tokens.num_rows for name, tokens in self.token_files.items()}
        tenants = {name: TenantProgress(tenant.num_steps(num_rows[name])) for name, tenant in self.by_name.items()}
        return RunProgress(tenants), None

    def _fleet_spec(self) -> FleetSpec:
        request = self.request
        return FleetSpec(
            replicas=self._phase.plan.replicas,
            base_model=request.base_model,
            tenants=request.tenants,
            token_paths=request.token_paths,
            checkpoint=self.checkpoint.folder if self.checkpoint else None,
            num_updates={name: tenant.num_updates for name, tenant in self.progress.tenants.items()},
            backend=request.cluster.backend,
            step_timeout_seconds=request.training.step_timeout_seconds,
            log_dir=request.files.logs,
            activations=request.training.activations,
        )
