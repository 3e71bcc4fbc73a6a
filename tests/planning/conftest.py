"""Shared numbers: a small world to check by hand, and the paper's workloads where the data lie next to the project."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from planning.candidates import Candidates, propose_candidates
from planning.config import ClusterConfig, PlannerConfig
from planning.profile import read_preset
from planning.types import Candidate, ModelShape, ParallelConfig, Replica, ReplicaGroup, SequenceRef, replicas_of
from planning.workload import TenantWorkload, Workload

PAPER = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "lobra_paper"
SEVEN_B_TENANTS = (
    "databricks-dolly-15k",
    "Evol-Instruct",
    "XSum",
    "CommitPackFt",
    "MeetingBank",
    "python_code_instructions",
)


@pytest.fixture
def small_candidates() -> Candidates:
    """Seconds of small round numbers. <2,1> and <1,2> hold more than <1,1>; <4,1> holds most."""
    return Candidates(
        (
            Candidate(ParallelConfig(1, 1), 16, 0.4, 0.10, 0.002),
            Candidate(ParallelConfig(1, 2), 24, 0.2, 0.05, 0.001),
            Candidate(ParallelConfig(2, 1), 32, 0.5, 0.06, 0.001),
            Candidate(ParallelConfig(4, 1), 64, 0.6, 0.04, 0.0005),
        )
    )


@pytest.fixture
def replicas() -> Callable[..., tuple[Replica, ...]]:
    """`replicas((tp, pp, count), ...)`: replicas in rank order."""

    def build(*groups: tuple[int, int, int]) -> tuple[Replica, ...]:
        return replicas_of(tuple(ReplicaGroup(ParallelConfig(tp, pp), count) for tp, pp, count in groups))

    return build


@pytest.fixture
def sequences() -> Callable[[list[int]], list[SequenceRef]]:
    """Sequences of these lengths; tenants a and b in turn."""

    def build(lengths: list[int]) -> list[SequenceRef]:
        return [SequenceRef("ab"[row % 2], row, num_tokens) for row, num_tokens in enumerate(lengths)]

    return build


@pytest.fixture
def planner() -> PlannerConfig:
    """The defaults, with few batches."""
    return PlannerConfig(num_evaluation_batches=8)


@pytest.fixture
def llama_7b() -> ModelShape:
    return ModelShape(32, 4096, 11008, 32, 32, 128, 32000, bytes_per_parameter=2)


@pytest.fixture
def paper_cluster() -> ClusterConfig:
    return ClusterConfig(num_gpus=16, gpus_per_node=8, memory_per_gpu_gib=40)


@pytest.fixture
def seven_b_candidates(llama_7b: ModelShape, paper_cluster: ClusterConfig) -> Candidates:
    """The paper's 7B model on 16 A100-40GB: the 14 configurations of the shipped profile."""
    return propose_candidates(llama_7b, read_preset("llama2_7b_a100_40gb"), paper_cluster, PlannerConfig(), 240_000_000)


@pytest.fixture(scope="session")
def paper_folder() -> Path:
    if not PAPER.is_dir():
        pytest.skip("the paper's data are not next to the project")
    return PAPER


@pytest.fixture(scope="session")
def paper_workload(paper_folder: Path) -> Callable[..., Workload]:
    """`paper_workload(names)`: 20,000 seeded rows per tenant of the fitted gamma mixtures; all 12 by default."""
    mixtures = json.loads((paper_folder / "length_mixtures.json").read_text())["families"]["gamma"]
    with (paper_folder / "table4.csv").open() as file:
        batch_size = {row["dataset"]: int(row["batch_size"]) for row in csv.DictReader(file)}

    def draw(seed: int, name: str) -> TenantWorkload:
        fit, rng, num_rows = mixtures[name], np.random.default_rng([11, seed]), 20_000
        shape = fit["body_cv"] ** -2
        body = rng.gamma(shape, fit["body_mean_tokens"] / shape, num_rows)
        tail = np.exp(fit["tail_log_median"] + fit["tail_sigma"] * rng.standard_normal(num_rows))
        tokens = np.where(rng.random(num_rows) < fit["tail_weight"], tail, body)
        lengths, counts = np.unique(
            np.ceil(np.clip(tokens, 16, fit["max_tokens"])).astype(np.int64), return_counts=True
        )
        return TenantWorkload(name, lengths, counts, batch_size[name])

    def build(names: tuple[str, ...] = tuple(batch_size)) -> Workload:
        return Workload(tuple(draw(seed, name) for seed, name in enumerate(names)))

    return build


@pytest.fixture
def seven_b_workload(paper_workload: Callable[..., Workload]) -> Workload:
    return paper_workload(SEVEN_B_TENANTS)


@pytest.fixture
def seventy_b_candidates(paper_folder: Path) -> Candidates:
    """The synthetic 70B-like profile, as it stands."""
    profile = json.loads((paper_folder / "synthetic_70b_like.json").read_text())
    usable = []
    for row in profile["max_chunk_tokens"]:
        cost = profile["coefficients_by_tp"][str(row["tp"])]
        scale = profile["num_layers"] / row["pp"] / 1e3
        usable.append(
            Candidate(
                ParallelConfig(row["tp"], row["pp"]),
                row["tokens"],
                cost["a_ms"] * scale,
                cost["b_ms_per_token"] * scale,
                cost["c_ms_per_token2"] * scale,
            )
        )
    return Candidates(tuple(sorted(usable, key=lambda candidate: candidate.config)))
