"""Plans one step: draws every active tenant's sequences, dispatches them, checks the plan. No torch.

The result depends on the step number and the active tenants alone, so a plan made again is the same plan. An evaluation
takes all held-out rows of its tenants, so its plans depend on the tenants only and are made once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_prep.sampler import step_rows
from data_prep.token_file import TokenFile
from planning.dispatch import Dispatcher
from planning.step_plan import StepPlan, check_plan, step_plan_from
from planning.types import Candidate, DeploymentPlan, ParallelConfig, SequenceRef
from training.config import TenantConfig

EVALUATION_SEQUENCES = 1024  # of one evaluation plan at most, so that dispatching stays quick
MAX_KEPT_EVALUATIONS = 16


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step plan, the LP bound of its dispatch and how long dispatching took."""

    plan: StepPlan
    lower_bound_seconds: float
    dispatch_milliseconds: float

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(self.plan.supervised_tokens)

    def to_record(self) -> dict:
        return {
            "step": self.plan.step,
            "lower_bound_seconds": self.lower_bound_seconds,
            "dispatch_milliseconds": self.dispatch_milliseconds,
            "plan": self.plan.to_json(),
        }

    @classmethod
    def from_record(cls, record: dict) -> "PlannedStep":
        plan = StepPlan.from_json(record["plan"])
        return cls(plan, record["lower_bound_seconds"], record["dispatch_milliseconds"])


class StepPlanner:
    """Draws and dispatches for a fixed deployment."""

    def __init__(
        self,
        plan: DeploymentPlan,
        candidates: Mapping[ParallelConfig, Candidate],
        dispatcher: Dispatcher,
        token_files: Mapping[str, TokenFile],
        evaluation_files: Mapping[str, TokenFile],
    ) -> None:
        self.plan = plan
        self.replicas = plan.replicas
        self.candidates = candidates
        self.dispatcher = dispatcher
        self.token_files = token_files
        self.evaluation_files = evaluation_files
        self._evaluations: dict[tuple[str, ...], tuple[StepPlan, ...]] = {}

    def plan_step(self, step: int, sample_step: int, tenants: Sequence[TenantConfig]) -> PlannedStep:
        """The plan of `step`, which is step `sample_step` of each of the active `tenants`.

        Raises PlanError if it loses or misplaces a sequence.
        """
        start = time.perf_counter()
        sequences, supervised_tokens = [], {}
        for tenant in tenants:
            tokens = self.token_files[tenant.name]
            rows = step_rows(tenant.seed, sample_step, tokens.num_rows, tenant.batch_size)
            sequences += [SequenceRef(tenant.name, int(row), int(tokens.num_tokens[row])) for row in rows]
            supervised_tokens[tenant.name] = int(tokens.num_supervised_tokens[rows].sum())
        dispatch = self.dispatcher.dispatch(sequences)
        plan = step_plan_from(step, dispatch, supervised_tokens)
        milliseconds = (time.perf_counter() - start) * 1000
        check_plan(plan, sequences, self.replicas, self.candidates)
        return PlannedStep(plan, dispatch.lower_bound_seconds, milliseconds)

    def plan_evaluation(self, tenants: tuple[str, ...]) -> tuple[StepPlan, ...]:
        """Plans that together hold every evaluation row of `tenants` once; losses of all of them add up to the mean.

        Raises PlanError if a sequence is lost or misplaced.
        """
        if tenants not in self._evaluations:
            if len(self._evaluations) >= MAX_KEPT_EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations)))
            self._evaluations[tenants] = self._evaluation_plans(tenants)
        return self._evaluations[tenants]

    def num_evaluation_tokens(self, tenant: str) -> int:
        """Supervised tokens of a tenant's evaluation rows: the denominator of its evaluation loss."""
        return int(self.evaluation_files[tenant].num_supervised_tokens.sum())

    def _evaluation_plans(self, tenants: tuple[str, ...]) -> tuple[StepPlan, ...]:
        sequences = [
            SequenceRef(tenant, row, num_tokens)
            for tenant in tenants
            for row, num_tokens in enumerate(self.evaluation_files[tenant].num_tokens.tolist())
        ]
        supervised_tokens = {tenant: self.num_evaluation_tokens(tenant) for tenant in tenants}
        num_plans = -(-len(sequences) // EVALUATION_SEQUENCES)
        plans = []
        for number in range(num_plans):
            part = sequences[number::num_plans]  # in turn: every plan gets short and long ones for its replicas
            plan = step_plan_from(0, self.dispatcher.dispatch(part), supervised_tokens)
            check_plan(plan, part, self.replicas, self.candidates)
            plans.append(plan)
        return tuple(plans)
