"""Ranks deployment plans with the integer dispatcher on seeded batches, all plans on the same ones.

Expected counts hide the grain of whole sequences (a replica that holds one to three of the longest), so plans that are
equal for a linear program differ here. A race: the slower half drops out after 4 batches, again after 8, and so on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planning.assignment import Load
from planning.config import Batching, PlannerConfig
from planning.dispatch import BucketCounts, Dispatcher, bucket_counts
from planning.packing import PackedLoad
from planning.types import Candidate, ParallelConfig, ReplicaGroup, replicas_of
from planning.workload import Workload

FIRST_BATCHES = 4
NUM_FINALISTS = 2


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


class PlanRace:
    """Runs plans on the same batches; what a plan took on a batch is measured once."""

    def __init__(
        self, batches: Sequence[SampledBatch], candidates: Mapping[ParallelConfig, Candidate], planner: PlannerConfig
    ) -> None:
        self._batches, self._candidates, self._planner = batches, candidates, planner
        self._trials: dict[tuple[ReplicaGroup, ...], Trial] = {}

    def run(self, plans: Sequence[tuple[ReplicaGroup, ...]]) -> Trial:
        """The plan with the shortest mean step; the first one on a tie. The last `NUM_FINALISTS` see all batches."""
        trials = [self._trials.setdefault(groups, Trial(groups)) for groups in dict.fromkeys(plans)]
        seen = FIRST_BATCHES
        while len(trials) > NUM_FINALISTS and seen < len(self._batches):
            trials = self._fastest(trials, seen)[: max(NUM_FINALISTS, len(trials) // 2)]
            seen *= 2
        return self._fastest(trials, len(self._batches))[0]

    @property
    def finished(self) -> list[Trial]:
        """All plans that saw all batches, shortest mean step first."""
        whole = [trial for trial in self._trials.values() if len(trial.makespans) == len(self._batches)]
        return sorted(whole, key=lambda trial: trial.mean_seconds)

    def _fastest(self, trials: list[Trial], num_batches: int) -> list[Trial]:
        for trial in trials:
            dispatcher = Dispatcher(
                replicas_of(trial.groups),
                self._candidates,
                self._planner.num_buckets,
                self._planner.max_search_moves,
                self._planner.batching,
            )
            for batch in self._batches[len(trial.makespans) : num_batches]:
                _run(trial, dispatcher, batch)
        return sorted(trials, key=lambda trial: float(np.mean(trial.makespans[:num_batches])))


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
