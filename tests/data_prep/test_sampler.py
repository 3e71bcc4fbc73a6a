import numpy as np
import pytest

from data_prep import sampler
from data_prep.sampler import epoch_order, step_rows, steps_per_epoch


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (12, 4), (1, 8), (7, 7), (5, 1)])
def test_each_epoch_visits_every_row_once_and_batches_never_cross_it(num_rows, batch_size):
    steps = steps_per_epoch(num_rows, batch_size)
    for epoch in range(3):
        batches = [step_rows(3, epoch * steps + step, num_rows, batch_size) for step in range(steps)]
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (steps - 1)
        assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))


def test_an_only_batch_that_is_incomplete_is_kept():
    assert sorted(step_rows(0, 0, 3, 8).tolist()) == [0, 1, 2]
    assert steps_per_epoch(3, 8) == 1


def test_resuming_in_the_second_epoch_gives_the_rows_of_the_unbroken_run():
    unbroken = [step_rows(5, step, 10, 4).tolist() for step in range(9)]
    resumed = [step_rows(5, step, 10, 4).tolist() for step in (8, 7, 6, 5, 4)]
    assert resumed == unbroken[8:3:-1]
    assert steps_per_epoch(10, 4) == 3


def test_epochs_and_seeds_have_different_orders_also_where_seeds_are_large():
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in (0, 1, 2**32, 2**32 + 1, 2**63) for epoch in range(4)}
    assert len(orders) == 20


def test_the_order_is_the_one_that_earlier_runs_had():
    # A changed order would break the resuming of every run made before the change.
    assert epoch_order(7, 2, 8).tolist() == [1, 3, 5, 4, 7, 2, 0, 6]


def test_every_row_is_equally_likely_to_come_first():
    num_rows, num_seeds = 5, 5000
    counts = np.bincount([epoch_order(seed, 0, num_rows)[0] for seed in range(num_seeds)], minlength=num_rows)
    # Standard deviation of a count is sqrt(5000 * 0.2 * 0.8) = 28; five of them.
    assert abs(counts - num_seeds / num_rows).max() < 140


def test_the_steps_of_an_epoch_sort_its_rows_once_and_give_the_order_itself():
    sampler._kept_order.cache_clear()
    drawn = np.concatenate([step_rows(11, step, 10, 3) for step in range(4)])
    assert sampler._kept_order.cache_info().misses == 1
    assert drawn.tolist() == epoch_order(11, 0, 10).tolist()
    assert drawn.dtype == np.int64


def test_nobody_can_change_the_order_through_the_rows_of_a_step():
    step_rows(12, 0, 10, 10)[:] = 0
    assert step_rows(12, 0, 10, 10).tolist() == epoch_order(12, 0, 10).tolist()
