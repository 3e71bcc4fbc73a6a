"""Evaluation between two steps: loss and perplexity of the adapters as they are, on the tenants' held-out rows.

    loss = sum over all supervised tokens of a tenant's evaluation rows / their number,  perplexity = exp(loss)

A forward-only dispatch of all tenants that are due, on the same replicas and within the same capacities as training; it
changes no adapter, moment or gradient. When and what follows from it: `progress`, `evaluation_history`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planning.step_plan import StepPlan
from training.fleet import Fleet
from training.progress import RunProgress

MAX_EXPONENT = 700.0  # exp of more does not fit into a float


def evaluate(fleet: Fleet, plans: Sequence[StepPlan], step: int) -> dict[str, float | None]:
    """Each tenant's evaluation loss after `step` steps of the run; None where it is not finite."""
    losses = {tenant: 0.0 for plan in plans for tenant in plan.supervised_tokens}
    for plan in plans:
        for report in fleet.evaluate(replace(plan, step=step)):
            for tenant, loss in report["losses"].items():
                losses[tenant] += loss
    return {tenant: loss if math.isfinite(loss) else None for tenant, loss in losses.items()}


def perplexity(loss: float | None) -> float | None:
    """exp(loss); None where there is no loss, or the result is too large to be told."""
    return None if loss is None or loss > MAX_EXPONENT else math.exp(loss)


def evaluation_results(progress: RunProgress, num_tokens: Mapping[str, int]) -> dict[str, dict]:
    """What steps.jsonl records of the tenants just evaluated; `num_tokens` are their supervised tokens."""
    results = {}
    for name, count in num_tokens.items():
        history = progress.tenants[name].evaluations
        results[name] = {
            "loss": history.last_loss,
            "perplexity": perplexity(history.last_loss),
            "num_supervised_tokens": count,
            "tenant_step": history.last_step,
            "is_best": history.is_at_best,
        }
    return results
