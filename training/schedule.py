"""The learning rate of one tenant's step, by the formulas of transformers' `get_scheduler`.

    warm-up   rate * n / w                                   n < w
    constant  rate
    linear    rate * (N - n) / (N - w)
    cosine    rate * (1 + cos(pi * (n - w) / (N - w))) / 2

n: steps that the tenant has done, N: all its steps, w: its warm-up steps. A step whose update was skipped counts as
done, so the rate depends on nothing that happened: a plan made ahead, a replayed step and another layout have the same
one, and the last step ends the schedule. No torch, no state.
"""

import math

from planning.errors import InputError
from training.config import OptimiserConfig, Schedule, TenantConfig


def learning_rate(optimiser: OptimiserConfig, num_done: int, num_steps: int) -> float:
    """The rate of the step after `num_done` of a tenant's `num_steps` steps."""
    return optimiser.learning_rate * _factor(optimiser, num_done, num_steps)


def check_warmup(tenant: TenantConfig, num_rows: int) -> None:
    """Raise InputError unless a tenant whose steps follow from its data has one left after warm-up."""
    num_steps, warmup_steps = tenant.num_steps(num_rows), tenant.optimiser.warmup_steps
    if warmup_steps >= num_steps:
        raise InputError(
            f"tenant {tenant.name!r}: optimiser.warmup_steps is {warmup_steps}, but {tenant.epochs} epochs over "
            f"{num_rows} rows are {num_steps} steps; lower it below that"
        )


def _factor(optimiser: OptimiserConfig, num_done: int, num_steps: int) -> float:
    warmup_steps = optimiser.warmup_steps
    if num_done < warmup_steps:
        return num_done / warmup_steps
    num_decaying = num_steps - warmup_steps
    match optimiser.schedule:
        case Schedule.CONSTANT:
            return 1.0
        case Schedule.LINEAR:
            return (num_steps - num_done) / num_decaying
        case Schedule.COSINE:
            return 0.5 * (1.0 + math.cos(math.pi * (num_done - warmup_steps) / num_decaying))
