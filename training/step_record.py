"""The record of one step in steps.jsonl: what was predicted, what was measured, what each tenant did and costs."""

import math
from collections.abc import Sequence

from planning.cost import replica_seconds
from planning.metrics import imbalance, step_overhead_seconds, tenant_shares
from planning.types import Chunk
from training.step_planner import PlannedStep, StepPlanner


def step_record(planned: PlannedStep, reports: Sequence[dict], planner: StepPlanner, gpu_seconds: float) -> dict:
    """Combine a step plan with the ranks' reports. `gpu_seconds` is the step's whole bill, idle time included."""
    replicas, candidates = planner.replicas, planner.candidates
    chunks: list[tuple[Chunk, ...]] = [()] * len(replicas)
    for wave in planned.plan.waves:
        for job in wave.jobs:
            for member in job.members:
                chunks[member.replica] = member.chunks
    busy_seconds = [0.0] * len(replicas)
    for report in reports:
        busy_seconds[report["replica"]] = max(busy_seconds[report["replica"]], report["busy_seconds"])
    predicted = [replica_seconds(candidates[replica.config], chunks[replica.index]) for replica in replicas]
    shares = tenant_shares(chunks, replicas, candidates)
    sequences = [sequence for group in chunks for chunk in group for sequence in chunk.sequences]
    updates = reports[0]["updates"]
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    num_computed_tokens = sum(chunk.num_computed_tokens for group in chunks for chunk in group)
    tenants = {}
    for name, num_supervised_tokens in planned.plan.supervised_tokens.items():
        own = [sequence.num_tokens for sequence in sequences if sequence.tenant == name]
        tenants[name] = {
            "loss": _finite(sum(report["losses"].get(name, 0.0) for report in reports)),
            "num_sequences": len(own),
            "num_tokens": sum(own),
            "num_supervised_tokens": num_supervised_tokens,
            "gpu_seconds": shares[name] * gpu_seconds,
            "grad_norm": _finite(updates[name]["grad_norm"]),
            "learning_rate": updates[name]["learning_rate"],
            "skipped": updates[name]["skipped"],
        }
    return {
        "event": "step",
        "step": planned.plan.step,
        "tenants": tenants,
        "gpu_seconds": gpu_seconds,
        "measured_seconds": gpu_seconds / planner.plan.num_gpus,
        "predicted_seconds": max(predicted) + step_overhead_seconds(replicas, candidates),
        "lower_bound_seconds": planned.lower_bound_seconds,
        "replica_seconds": busy_seconds,
        "predicted_replica_seconds": predicted,
        "sync_seconds": min(report["sync_seconds"] for report in reports),  # of the rank that waits for nobody
        "imbalance": imbalance(busy_seconds),
        "padding_ratio": 1.0 - num_tokens / num_computed_tokens,
        "dispatch_milliseconds": planned.dispatch_milliseconds,
        "num_tokens": num_tokens,
        "num_computed_tokens": num_computed_tokens,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a value that is not finite is recorded as null."""
    return value if math.isfinite(value) else None
