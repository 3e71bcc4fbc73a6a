"""The controller: plans each step while the fleet trains the one before, collects reports, checkpoints.

It owns the run's progress and the journals; ranks own adapters and optimisers. A fleet that fails is launched again
from the newest checkpoint, up to `max_restarts` times; steps are replayed as they were dispatched, so the adapters are
those of the unbroken run. Phases (one for joint strategies) follow one another; the fleet is launched anew only where
the layout changes.

Between two steps, tenants that are due are evaluated; that may end them, so no step is published before. Which are due
follows from the progress, so a resumed run evaluates first what an interrupted one still owed. Tenants that end while
others go on are checkpointed at once, so that their adapters can be published.
"""

import time
from collections.abc import Callable
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
from training.dispatch_journal import DispatchJournal
from training.evaluation import evaluate, evaluation_results
from training.fleet import Fleet, FleetError
from training.fleet_spec import fleet_spec_for
from training.ledger import Ledger, Observer
from training.progress import RunProgress, TenantProgress, TenantStatus
from training.request import TrainingRequest, TrainingResult
from training.schedule import learning_rate
from training.step_planner import PlannedStep, StepPlanner
from training.step_record import step_record

ABANDON_SECONDS = 8.0  # a stopped run waits this long for the running step
ABANDON_SAVE_SECONDS = 6.0  # and then this long for a checkpoint of the one before


class TenantFailedError(LobraError):
    """A tenant diverged and `training.on_tenant_error` is `fail`."""


class BudgetSpentError(LobraError):
    """The run reached `training.max_gpu_seconds`; everything done is checkpointed."""


def train(
    request: TrainingRequest,
    observe: Observer = lambda _record: None,
    checkpointed: Callable[[Checkpoint], None] = lambda _checkpoint: None,
) -> TrainingResult:
    """Train all tenants to their last step, from the newest checkpoint if there is one.

    `observe` sees every record of steps.jsonl as it is written. `checkpointed` sees every whole checkpoint, in a thread
    beside training; the checkpoint stays at least until it returns, and it must not raise.

    Raises FleetError, CheckpointError, TenantFailedError or BudgetSpentError; what was checkpointed stays, and calling
    again resumes. KeyboardInterrupt and Prefect's termination signal checkpoint the last completed step, end the fleet
    and go on to the caller.
    """
    with ExitStack() as stack:
        controller = _Controller(request, observe, checkpointed, stack)
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
    def __init__(
        self,
        request: TrainingRequest,
        observe: Observer,
        checkpointed: Callable[[Checkpoint], None],
        stack: ExitStack,
    ) -> None:
        files = request.files
        self.request = request
        self.token_files = {name: TokenFile(path) for name, path in request.token_paths.items()}
        self.evaluation_files = {name: TokenFile(path) for name, path in request.evaluation_paths.items()}
        self.by_name = {tenant.name: tenant for tenant in request.tenants}
        self.dispatches = DispatchJournal(files.plans)
        stack.enter_context(self.dispatches.journal)
        self.ledger = Ledger(files.steps, request.cluster.num_gpus, observe)
        stack.enter_context(self.ledger.journal)
        self.executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="step-planner"))
        self.store = CheckpointStore(files.checkpoints, request.training.keep_checkpoints)
        journals = (self.dispatches.journal, self.ledger.journal)
        self.writer = stack.enter_context(CheckpointWriter(self.store, journals, checkpointed))
        self._running: _RunningStep | None = None
        self._is_evaluating = False
        self._has_unsaved_end = False  # a tenant ended since the last checkpoint
        self.progress, self.checkpoint = self._restore()

    def run(self) -> TrainingResult:
        """All phases, through restarts of the fleet."""
        num_restarts = num_launches = 0
        while self._enter_next_phase():
            num_launches += 1
            num_updates = {name: tenant.num_updates for name, tenant in self.progress.tenants.items()}
            replicas = self._phase.plan.replicas
            fleet = Fleet(fleet_spec_for(self.request, replicas, self.checkpoint, num_updates), num_launches)
            try:
                self._live(fleet)
            except FleetError as error:
                num_restarts += 1
                if not fleet.is_ready or num_restarts > self.request.training.max_restarts:
                    raise
                self.ledger.overhead("restart", self.progress.step, reason=str(error))
                self._running, self._is_evaluating, self._has_unsaved_end = None, False, False
                self.writer.forget()
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
        planner = StepPlanner(plan, by_config, dispatcher, self.token_files, self.evaluation_files)
        self._evaluate_due(fleet, planner)
        planned, wait_seconds = self._plan(planner, self.progress.step, self._active()), 0.0
        while planned is not None:
            planned, wait_seconds = self._train_step(fleet, planner, planned, wait_seconds)
            self.writer.check()
            self._check_budget(fleet)
            is_periodic = planned is not None and self.progress.step % self.request.training.save_every == 0
            if is_periodic or (self._has_unsaved_end and not self.writer.is_busy):
                self._save(fleet)

    def _train_step(
        self, fleet: Fleet, planner: StepPlanner, planned: PlannedStep, wait_seconds: float
    ) -> tuple[PlannedStep | None, float]:
        """Train one step; returns the next step's plan, made meanwhile, and how long the fleet waited for it."""
        self.dispatches.append(planned)
        self._running = _RunningStep(planner, planned, wait_seconds)
        fleet.begin_step(planned.plan, self._learning_rates(planned))
        following = planned.plan.step + 1
        expected = self._active(following)
        after = self.progress.after_step(dict.fromkeys(planned.tenants, False), 1)
        if due := after.due(self.request.phases, self.by_name):
            self.executor.submit(planner.plan_evaluation, due)  # made now, used after the step
        upcoming: Future[PlannedStep | None] = self.executor.submit(self._plan, planner, following, expected)
        self._complete_step(fleet.finish_step())
        start = time.perf_counter()
        upcoming_plan = upcoming.result()
        wait_seconds = time.perf_counter() - start
        self._evaluate_due(fleet, planner)
        start = time.perf_counter()
        if self._active() != expected:  # report or evaluation changed who trains: the plan made meanwhile is void
            upcoming_plan = self._plan(planner, following, self._active())
        return upcoming_plan, wait_seconds + time.perf_counter() - start

    def _evaluate_due(self, fleet: Fleet, planner: StepPlanner) -> None:
        """Evaluate the tenants that are due, keep the best adapters, and end tenants that stopped improving."""
        due, before = self.progress.due(self.request.phases, self.by_name), self.progress
        if not due:
            return
        self._is_evaluating = True
        losses = evaluate(fleet, planner.plan_evaluation(due), before.step)
        after = before.after_evaluation(losses, self.by_name)
        if improved := [name for name in due if after.tenants[name].keeps_last(self.by_name[name].evaluation)]:
            fleet.keep_best(improved)
        self.progress, self._is_evaluating = after, False  # only now: what is kept is never older than what is said
        results = evaluation_results(after, {name: planner.num_evaluation_tokens(name) for name in due})
        self.ledger.overhead("evaluation", before.step, tenants=results)
        self._record_ended_tenants(before)

    def _plan(self, planner: StepPlanner, step: int, names: tuple[str, ...]) -> PlannedStep | None:
        """The plan of a step for its active tenants; None when there are none. Dispatches on record are replayed."""
        if not names:
            return None
        if (replayed := self.dispatches.replayed(step, names)) is not None:
            return replayed
        return planner.plan_step(step, step - self.progress.phase_start, [self.by_name[name] for name in names])

    def _learning_rates(self, planned: PlannedStep) -> dict[str, float]:
        progress = {name: self.progress.tenants[name] for name in planned.tenants}
        return {
            name: learning_rate(self.by_name[name].optimiser, tenant.num_done, tenant.num_steps)
            for name, tenant in progress.items()
        }

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
            reason = {"reason": tenant.reason} if tenant.reason else {}
            self.ledger.record({"event": tenant.status.value, "step": self.progress.step, "tenant": name, **reason})
            self._has_unsaved_end |= tenant.status.is_success
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
            self.writer.begin(fleet, self._state())
            self._has_unsaved_end = False
            self.ledger.overhead("checkpoint", self.progress.step)

    def _save_last_step(self, fleet: Fleet) -> None:
        """Checkpoint the last completed step of an interrupted run, in bounded time; the run ends either way."""
        with suppress(LobraError):
            reports = fleet.finish_step_within(ABANDON_SECONDS) if self._running is not None else None
            if reports is not None:
                self._complete_step(reports)
            elif self._running is not None or self._is_evaluating:
                self.writer.abandon_step(fleet, self._state(), ABANDON_SAVE_SECONDS)
                return
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
            if self._active() or self.progress.due(self.request.phases, self.by_name):
                return True
            self.progress = replace(self.progress, phase=self.progress.phase + 1, phase_start=self.progress.step)
        return False

    def _restore(self) -> tuple[RunProgress, Checkpoint | None]:
        """Progress of the newest whole checkpoint, or of a run not yet begun. Raises InputError for another run's."""
        checkpoint = self.store.latest_of(self.request.identity, self.ledger.damaged_checkpoint)
        if checkpoint is not None:
            return RunProgress.from_dict(checkpoint.state), checkpoint
        num_steps = {name: t.num_steps(self.token_files[name].num_rows) for name, t in self.by_name.items()}
        return RunProgress({name: TenantProgress(num) for name, num in num_steps.items()}), None

    def _state(self) -> dict:
        """What a checkpoint keeps of the controller."""
        return {"run": self.request.identity, **self.progress.to_dict()}
