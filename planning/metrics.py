"""Who used the GPUs, and how evenly (DESIGN.md, "Definitions that reports and tests share")."""

from collections.abc import Mapping, Sequence

from planning.cost import chunk_seconds
from planning.types import Candidate, Chunk, ParallelConfig, Replica


def tenant_shares(
    chunks_per_replica: Sequence[Sequence[Chunk]],
    replicas: Sequence[Replica],
    candidates: Mapping[ParallelConfig, Candidate],
) -> dict[str, float]:
    """Each tenant's part of a step's GPU seconds; the parts add up to 1, names are sorted, an empty step gives {}.

    A chunk's seconds divide over its sequences in proportion to b*l + c*l^2; in a padded chunk every l is the
    padded length, so they divide evenly. A sequence's part counts once per GPU that ran it.
    """
    gpu_seconds: dict[str, float] = {}
    for replica, chunks in zip(replicas, chunks_per_replica, strict=True):
        candidate = candidates[replica.config]
        for chunk in chunks:
            work = [candidate.sequence_seconds(num_tokens) for num_tokens in chunk.computed_lengths]
            per_work = replica.config.num_gpus * chunk_seconds(candidate, chunk) / sum(work)
            for sequence, own in zip(chunk.sequences, work, strict=True):
                gpu_seconds[sequence.tenant] = gpu_seconds.get(sequence.tenant, 0.0) + own * per_work
    total = sum(gpu_seconds.values())
    return {tenant: gpu_seconds[tenant] / total for tenant in sorted(gpu_seconds)}


def step_overhead_seconds(replicas: Sequence[Replica], candidates: Mapping[ParallelConfig, Candidate]) -> float:
    """Seconds of a step beside its chunks: sync, update and messages, as long as the slowest replica's."""
    return max(candidates[replica.config].step_overhead_seconds for replica in replicas)


def imbalance(busy_seconds: Sequence[float]) -> float:
    """Longest busy time / mean - 1 over the replicas; 0 when all are idle."""
    mean = sum(busy_seconds) / len(busy_seconds)
    return max(busy_seconds) / mean - 1.0 if mean else 0.0
