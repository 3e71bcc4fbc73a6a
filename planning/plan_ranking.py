"""Ranks deployment plans with the integer dispatcher on seeded batches, all plans on the same ones.

Expected counts hide the grain of whole sequences (a replica that holds one to three of the longest), so plans that are
equal for a linear program differ here. A race: after an eighth and a quarter of the batches the slower plans drop out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planning.assignment import Load
from planning.config import PlannerConfig
from planning.dispatch import BucketCounts, Dispatcher, bucket_counts
from planning.types import Candidate, ParallelConfig, ReplicaGroup, replicas_of
from planning.workload import Workload

SURVIVORS = (5, 3)  # after an eighth and a quarter of the batches


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """One joint batch in its own buckets; `tenant_part[t, j]` is tenant t's part of bucket j's sequences."""

    buckets: BucketCounts
    tenant_part: np.ndarray


@dataclass(slots=True, eq=False)
class Trial:
    """One plan and what it took on the batches so far: makespans, and each tenant's part of the GPU time (T)."""

    groups: tuple[ReplicaGroup, ...]
    makespans: list[float] = field(default_factory=list)
    tenant_shares: list[np.ndarray] = field(default_factory=list)

    @property
    def mean_seconds(self) -> float:
        return float(np.mean(self.makespans))

    def tenant_gpu_seconds(self, num_gpus: int) -> np.ndarray:
        """Mean GPU seconds per step and tenant (T); they add up to `num_gpus` times the mean makespan."""
        return np.asarray(num_gpus * (np.array(self.makespans)[:, None] * np.array(self.tenant_shares)).mean(axis=0))


def sample_batches(workload: Workload, planner: PlannerConfig) -> list[SampledBatch]:
    """`planner.num_evaluation_batches` batches, seeded by `planner.seed`."""
    rng = np.random.default_rng(planner.seed)
    return [_sampled(workload.sample_lengths(rng), planner) for _ in range(planner.num_evaluation_batches)]


def race(
    plans: Sequence[tuple[ReplicaGroup, ...]],
    batches: Sequence[SampledBatch],
    candidates: dict[ParallelConfig, Candidate],
    planner: PlannerConfig,
) -> list[Trial]:
    """The plans that saw all batches, shortest mean makespan first; ties keep the order given."""
    trials = [Trial(groups) for groups in plans]
    dispatchers = [
        Dispatcher(replicas_of(groups), candidates, planner.num_buckets, planner.max_search_moves) for groups in plans
    ]
    running = list(range(len(plans)))
    num_batches = len(batches)
    for stop, survivors in ((num_batches // 8, SURVIVORS[0]), (num_batches // 4, SURVIVORS[1]), (num_batches, None)):
        for k in running:
            for batch in batches[len(trials[k].makespans) : stop]:
                _run(trials[k], dispatchers[k], batch)
        if stop:
            running = sorted(running, key=lambda k: trials[k].mean_seconds)[:survivors]
    return [trials[k] for k in running]


def _sampled(lengths_per_tenant: tuple[np.ndarray, ...], planner: PlannerConfig) -> SampledBatch:
    buckets = bucket_counts(np.concatenate(lengths_per_tenant), planner.num_buckets)
    tenant_counts = np.array(
        [
            np.bincount(np.searchsorted(buckets.uppers, lengths), minlength=len(buckets.uppers))
            for lengths in lengths_per_tenant
        ]
    )
    return SampledBatch(buckets, tenant_counts / buckets.counts)


def _run(trial: Trial, dispatcher: Dispatcher, batch: SampledBatch) -> None:
    load, _ = dispatcher.assign(batch.buckets)
    trial.makespans.append(float(load.replica_seconds().max()))
    trial.tenant_shares.append(_tenant_shares(load, dispatcher.num_gpus, batch))


def _tenant_shares(load: Load, num_gpus_R: np.ndarray, batch: SampledBatch) -> np.ndarray:
    """Each tenant's expected part of the GPU time; which of a bucket's sequences go where is arbitrary."""
    replica, bucket = np.arange(len(num_gpus_R))[:, None], np.arange(len(batch.buckets.counts))
    gpu_seconds_J = num_gpus_R @ load.stage_seconds(replica, bucket, load.num_sequences)
    return np.asarray(batch.tenant_part @ gpu_seconds_J / gpu_seconds_J.sum())
