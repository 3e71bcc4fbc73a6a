"""Ranks deployment plans with the integer dispatcher on seeded batches, all plans on the same ones.

Expected counts hide the grain of whole sequences (a replica that holds one to three of the longest), so plans that are
equal for a linear program differ here. A race: after an eighth and a quarter of the batches the slower plans drop out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planning.assignment import Load
from planning.config import Batching, PlannerConfig
from planning.dispatch import BucketCounts, Dispatcher, bucket_counts
from planning.packing import PackedLoad
from planning.types import Candidate, ParallelConfig, ReplicaGroup, replicas_of
from planning.workload import Workload

SURVIVORS = (5, 3)  # after an eighth and a quarter of the batches


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """One joint batch: `lengths` (S, ascending), the tenant number of each sequence, and, padded, their buckets."""

    lengths: np.ndarray
    tenant: np.ndarray
    buckets: BucketCounts | None


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


def sample_batches(
    workload: Workload, planner: PlannerConfig, fixed_uppers: tuple[int, ...] = ()
) -> list[SampledBatch]:
    """`planner.num_evaluation_batches` batches, seeded by `planner.seed`; with fixed buckets unless there are none."""
    rng = np.random.default_rng(planner.seed)
    batches = []
    for _ in range(planner.num_evaluation_batches):
        per_tenant = workload.sample_lengths(rng)
        lengths = np.concatenate(per_tenant)
        order = np.argsort(lengths, kind="stable")
        tenant = np.repeat(np.arange(len(per_tenant)), [len(own) for own in per_tenant])[order]
        padded = planner.batching is Batching.PADDED
        buckets = bucket_counts(lengths, planner.num_buckets, fixed_uppers) if padded else None
        batches.append(SampledBatch(lengths[order], tenant, buckets))
    return batches


def race(
    plans: Sequence[tuple[ReplicaGroup, ...]],
    batches: Sequence[SampledBatch],
    candidates: dict[ParallelConfig, Candidate],
    planner: PlannerConfig,
) -> list[Trial]:
    """The plans that saw all batches, shortest mean makespan first; ties keep the order given."""
    trials = [Trial(groups) for groups in plans]
    dispatchers = [
        Dispatcher(replicas_of(groups), candidates, planner.num_buckets, planner.max_search_moves, planner.batching)
        for groups in plans
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


def _run(trial: Trial, dispatcher: Dispatcher, batch: SampledBatch) -> None:
    num_tenants = int(batch.tenant.max()) + 1
    if batch.buckets is None:
        packed, _ = dispatcher.pack(batch.lengths)
        makespan, gpu_seconds_S = packed.replica_seconds().max(), _packed_gpu_seconds(packed, dispatcher.num_gpus)
    else:
        load, _ = dispatcher.assign(batch.buckets)
        makespan, per_bucket = load.replica_seconds().max(), _bucket_gpu_seconds(load, dispatcher.num_gpus)
        gpu_seconds_S = np.repeat(per_bucket / batch.buckets.counts, batch.buckets.counts)
    shares = np.bincount(batch.tenant, weights=gpu_seconds_S, minlength=num_tenants) / gpu_seconds_S.sum()
    trial.makespans.append(float(makespan))
    trial.tenant_shares.append(shares)


def _bucket_gpu_seconds(load: Load, num_gpus_R: np.ndarray) -> np.ndarray:
    """GPU seconds per bucket (J); which of a bucket's sequences go where is arbitrary, so they share them evenly."""
    replica, bucket = np.arange(len(num_gpus_R))[:, None], np.arange(load.num_sequences.shape[1])
    return np.asarray(num_gpus_R @ load.stage_seconds(replica, bucket, load.num_sequences))


def _packed_gpu_seconds(load: PackedLoad, num_gpus_R: np.ndarray) -> np.ndarray:
    """GPU seconds per sequence, by rising length: its part b*l + c*l^2 of its chunk (DESIGN.md, "Definitions")."""
    work = load.variable[load.home, np.arange(len(load.home))]
    chunk_work = np.bincount(load.chunk, weights=work, minlength=len(load.seconds))
    chunk_seconds = chunk_work + load.fixed[load.chunk_home]
    per_sequence = num_gpus_R[load.home] * work * (chunk_seconds / np.maximum(chunk_work, 1e-300))[load.chunk]
    return np.asarray(per_sequence[::-1])
