"""What the tenants ask of one joint step: exact lengths, how often each occurs, and the batch sizes.

Batches are drawn with replacement from each tenant's histogram, which gives the same expected counts as the training
sampler's permutations. Sampled sequences carry dummy rows; only their lengths mean something.
"""

from dataclasses import dataclass

import numpy as np

from planning.types import SequenceRef


@dataclass(frozen=True, slots=True, eq=False)
class TenantWorkload:
    """Length histogram of one tenant (`lengths` in tokens, ascending, int64; `counts` rows of that length)."""

    name: str
    lengths: np.ndarray
    counts: np.ndarray
    batch_size: int

    def __post_init__(self) -> None:
        if not len(self.lengths) or len(self.lengths) != len(self.counts):
            raise ValueError(f"tenant {self.name}: lengths and counts must be non-empty and of one size")
        if self.lengths[0] < 1 or (np.diff(self.lengths) <= 0).any() or (self.counts < 1).any() or self.batch_size < 1:
            raise ValueError(f"tenant {self.name}: lengths must ascend from 1 or more; counts and batch size from 1")


@dataclass(frozen=True, slots=True)
class Workload:
    """The tenants that train together."""

    tenants: tuple[TenantWorkload, ...]

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a workload needs at least one tenant, and no name twice; got {names}")

    @property
    def longest_tokens(self) -> int:
        return max(int(tenant.lengths[-1]) for tenant in self.tenants)

    @property
    def longest_tenant(self) -> str:
        """Name of the tenant with the longest sequence, the first one on a tie."""
        return max(self.tenants, key=lambda tenant: int(tenant.lengths[-1])).name

    def expected_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Unique lengths (ascending) and the expected number of sequences of each in a joint step."""
        lengths, position = np.unique(np.concatenate([t.lengths for t in self.tenants]), return_inverse=True)
        weights = np.concatenate([t.batch_size * t.counts / t.counts.sum() for t in self.tenants])
        return lengths, np.bincount(position, weights=weights, minlength=len(lengths))

    def sample_lengths(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Lengths of one joint batch, one array of `batch_size` per tenant."""
        return tuple(
            rng.choice(tenant.lengths, size=tenant.batch_size, p=tenant.counts / tenant.counts.sum())
            for tenant in self.tenants
        )

    def sample_step(self, rng: np.random.Generator) -> list[SequenceRef]:
        """One joint batch, `batch_size` sequences of each tenant; rows are numbered from 0 within the tenant."""
        return [
            SequenceRef(tenant.name, row, num_tokens)
            for tenant, lengths in zip(self.tenants, self.sample_lengths(rng), strict=True)
            for row, num_tokens in enumerate(lengths.tolist())
        ]
