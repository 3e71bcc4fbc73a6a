"""Predicted against measured seconds, where every rank has a core: the demo's tenants on one rank and on two.

Wall seconds are judged on a quiet machine only; CPU seconds do not see other work and leave the cost model's own error.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prefect.testing.utilities import prefect_test_harness

from data_prep.collate import CollatedChunk, collate
from data_prep.histogram import measure_lengths
from data_prep.prepare import PreparedTenant, prepare_tenants
from data_prep.sampler import step_rows
from data_prep.token_file import TokenFile
from flows.config import RunConfig, read_run_file
from flows.finetune import finetune
from flows.preview import prepare_requests, stored_profile_path
from flows.profile import profile_request
from planning.candidates import propose_candidates
from planning.cost import replica_seconds
from planning.dispatch import Dispatcher
from planning.profile import Profile
from planning.types import ParallelConfig, Replica, SequenceRef
from training.adapters import Adapter, initial_tensor
from training.base_model import read_base_model
from training.journal import effective_steps, read_journal
from training.layout import FleetLayout, Stage
from training.megatron_model import ReplicaModel, create_replica_groups
from training.probe import random_chunk
from training.profile_fit import ChunkTiming, fit_cost
from training.profile_store import read_report
from training.profiler import REPETITIONS, ProfileRequest, measurable, probe_grid

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    """The demo's run beside its assets, with a Prefect server."""
    folder = tmp_path_factory.mktemp("demo")
    assets = [sys.executable, str(REPOSITORY / "infra/demo/make_assets.py"), "runs/demo-assets"]
    subprocess.run(
        assets, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    with pytest.MonkeyPatch.context() as patch, prefect_test_harness(server_startup_timeout=120):
        patch.chdir(folder)
        patch.setenv("LOBRA_DATA_ROOTS", "/")
        yield read_run_file(REPOSITORY / "infra/runs/demo.yaml")


@pytest.mark.parametrize(
    ("plan", "memory_gib", "max_tp", "max_pp"),
    [("<1,1>x2", 1.0, 1, 1), ("<2,1>x1", 0.045, 2, 1), ("<1,2>x1", 0.064, 1, 2)],
)
def test_predicted_step_seconds_are_close_to_measured_ones(
    demo: RunConfig, is_quiet: bool, plan: str, memory_gib: float, max_tp: int, max_pp: int
) -> None:
    content = demo.model_dump(mode="json")
    content["name"] = f"tp{max_tp}-pp{max_pp}"
    content["cluster"] |= {"num_gpus": 2, "memory_per_gpu_gib": memory_gib}
    content["planner"] |= {"max_tp": max_tp, "max_pp": max_pp}
    content["profile"] = {"source": "measure"}
    content["training"] |= {"save_every": 1000}
    content["tracking"] |= {"mlflow_uri": f"sqlite:///{Path.cwd()}/mlflow.db"}
    content["data"] |= {"cache_dir": f"cache-{content['name']}"}
    run = RunConfig.model_validate(content)
    folder = Path("runs") / run.name
    summary = finetune(run=run, run_dir=folder)
    steps = effective_steps(read_journal(folder / "steps.jsonl"))
    predicted, measured = (np.array([step[f"{kind}_seconds"] for step in steps]) for kind in ("predicted", "measured"))
    errors = predicted / measured - 1.0
    fit = read_report(stored_profile_path(run))["fit"]
    print(
        f"\n{plan}: {len(steps)} steps of {measured.mean():.3f} s (predicted {predicted.mean():.3f} s), mean absolute "
        f"error {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}; error of the fit {fit['mean_error']:.1%}; "
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
    )
    assert summary["plan"] == plan
    if is_quiet:
        assert np.abs(errors).mean() <= 0.10


class LoneRank:
    """One rank in this process: a <1,1> replica with the tenants' adapters, timed in CPU seconds."""

    def __init__(self, request: ProfileRequest) -> None:
        replica = Replica(0, ParallelConfig(1, 1), 0)
        stage = Stage(request.base, FleetLayout((replica,), request.base.num_layers), 0, "cpu", request.activations)
        self.adapters = {
            tenant.name: Adapter(
                tenant.name, tenant.adapter, stage, lambda key, tenant=tenant: initial_tensor(request.base, tenant, key)
            )
            for tenant in request.tenants
        }
        groups = create_replica_groups(stage.layout, 0, "gloo")
        self.model = ReplicaModel(stage, groups, self.adapters, request.base_model.dtype)

    def cpu_seconds(self, chunks: list[CollatedChunk]) -> float:
        start = time.process_time()
        self.model.forward_backward(chunks)
        seconds = time.process_time() - start
        for adapter in self.adapters.values():
            adapter.clear_gradients()
        return seconds


@pytest.mark.usefixtures("one_rank_world")
def test_the_cost_model_holds_in_cpu_seconds_on_the_steps_that_training_dispatches(demo: RunConfig) -> None:
    run = demo.model_copy(
        update={"cluster": demo.cluster.model_copy(update={"num_gpus": 1, "memory_per_gpu_gib": 0.09})}
    )
    base = read_base_model(run.base_model)
    prepared = prepare_tenants(prepare_requests(run, base, Path("rejects")), 0)
    files = {tenant.tenant: TokenFile(tenant.token_path) for tenant in prepared if isinstance(tenant, PreparedTenant)}
    request = profile_request(run, base, measure_lengths([t for t in prepared if isinstance(t, PreparedTenant)]))
    candidate = measurable(request).usable[0]
    rank = LoneRank(request)
    grid = probe_grid(request, candidate)
    seconds = {probe: [] for probe in grid}
    for _ in range(REPETITIONS + 1):
        for probe in grid:
            chunks = [random_chunk(probe, number, base.vocab_size) for number in range(probe.num_chunks)]
            seconds[probe].append(rank.cpu_seconds(chunks) / probe.num_chunks)
    timings = [
        ChunkTiming(candidate.config, p.num_sequences, p.length, p.batching, float(np.median(taken[1:])), 0)
        for p, taken in seconds.items()
    ]
    fit = fit_cost(timings, base.num_layers)
    profile = Profile("cpu seconds", "", base.num_layers, fit.layer_cost_by_tp)
    candidate = propose_candidates(request.shape, profile, run.cluster, run.planner, 0).usable[0]
    dispatcher = Dispatcher((Replica(0, candidate.config, 0),), {candidate.config: candidate}, 16, 2000)
    errors = []
    for step in range(20):
        rows = {t.name: step_rows(t.seed, step, files[t.name].num_rows, t.batch_size) for t in run.tenants}
        sequences = [
            SequenceRef(name, int(row), int(files[name].num_tokens[row])) for name, own in rows.items() for row in own
        ]
        chunks = dispatcher.dispatch(sequences).chunks[0]
        collated = [collate(chunk, files, dict.fromkeys(files, 1e-3)) for chunk in chunks]
        errors.append(replica_seconds(candidate, chunks) / rank.cpu_seconds(collated) - 1.0)
    print(
        f"\n<1,1>, CPU seconds: {len(errors)} steps, mean absolute error {np.abs(errors).mean():.1%}, bias "
        f"{np.mean(errors):+.1%}, largest {np.abs(errors).max():.1%}; error of the fit: mean {fit.mean_error:.1%}, "
        f"largest {fit.max_error:.1%} at {fit.worst}"
    )
    assert np.abs(errors).mean() <= 0.10
