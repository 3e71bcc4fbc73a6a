"""transformers is the oracle of learning rates."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from planning.errors import InputError
from training.config import OptimiserConfig, Schedule, TenantConfig
from training.schedule import check_warmup, learning_rate


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (2, 1), (10, 0), (10, 3), (10, 9), (997, 100)])
def test_rates_of_all_steps_are_those_of_transformers(schedule: Schedule, num_steps: int, warmup_steps: int) -> None:
    config = OptimiserConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup_steps)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    name = "constant_with_warmup" if schedule is Schedule.CONSTANT else schedule.value
    scheduler = get_scheduler(name, adamw, warmup_steps, num_steps)
    for step in range(num_steps):
        assert learning_rate(config, step, num_steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        adamw.step()
        scheduler.step()
    assert learning_rate(config, num_steps - 1, num_steps) > 0


def tenant(warmup_steps: int, **length: int) -> TenantConfig:
    return TenantConfig(
        name="anna",
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter={"rank": 4, "alpha": 8},
        optimiser={"warmup_steps": warmup_steps},
        batch_size=4,
        **length,
    )


def test_a_warmup_that_leaves_no_step_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"warmup_steps is 5, but there are 5 steps; lower it below that"):
        tenant(5, steps=5)
    check_warmup(tenant(5, epochs=2), num_rows=11)
    with pytest.raises(InputError, match=r"'anna'.*warmup_steps is 6, but 2 epochs over 11 rows are 6 steps"):
        check_warmup(tenant(6, epochs=2), num_rows=11)
