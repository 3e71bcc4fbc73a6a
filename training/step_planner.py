"""Plans one step: draws every active tenant's sequences, dispatches them, checks the plan. No torch, no state.

The result depends on the step number and the active tenants alone, so a plan made again is the same plan.
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
    ) -> None:
        self.plan = plan
        self.replicas = plan.replicas
        self.candidates = candidates
        self.dispatcher = dispatcher
        self.token_files = token_files

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
