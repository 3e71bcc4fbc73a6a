"""Expected counts and sampling, checked by hand."""

import numpy as np
import pytest

from planning.workload import TenantWorkload, Workload

TWO = Workload(
    (
        TenantWorkload("a", np.array([4, 9]), np.array([3, 1]), 8),
        TenantWorkload("b", np.array([2, 9]), np.array([1, 1]), 6),
    )
)


def test_expected_counts_add_up_over_tenants() -> None:
    lengths, counts = TWO.expected_counts()
    assert lengths.tolist() == [2, 4, 9]
    assert counts.tolist() == [3.0, 6.0, 2.0 + 3.0]


def test_the_longest_sequence_and_its_tenant_are_known() -> None:
    assert (TWO.longest_tokens, TWO.longest_tenant) == (9, "a")


def test_a_sampled_step_has_every_tenants_batch_and_repeats_with_its_seed() -> None:
    step = TWO.sample_step(np.random.default_rng(3))
    assert [(s.tenant, s.row) for s in step] == [("a", row) for row in range(8)] + [("b", row) for row in range(6)]
    assert {s.num_tokens for s in step if s.tenant == "b"} <= {2, 9}
    assert step == TWO.sample_step(np.random.default_rng(3))


def test_samples_follow_the_histogram() -> None:
    rng = np.random.default_rng(0)
    tokens = [s.num_tokens for _ in range(500) for s in TWO.sample_step(rng) if s.tenant == "a"]
    # 4,000 draws with probability 1/4: four standard deviations are 0.027
    assert np.mean(np.array(tokens) == 9) == pytest.approx(0.25, abs=0.027)


@pytest.mark.parametrize(
    ("lengths", "counts", "batch_size"),
    [([], [], 1), ([3, 3], [1, 1], 1), ([5, 3], [1, 1], 1), ([0, 3], [1, 1], 1), ([3], [0], 1), ([3], [1], 0)],
)
def test_a_malformed_histogram_is_refused(lengths: list[int], counts: list[int], batch_size: int) -> None:
    with pytest.raises(ValueError, match="tenant a"):
        TenantWorkload("a", np.array(lengths), np.array(counts), batch_size)


def test_tenant_names_are_unique() -> None:
    with pytest.raises(ValueError, match="no name twice"):
        Workload((TWO.tenants[0], TWO.tenants[0]))
