"""A rank records the steps that it was asked to, and only those."""

import gzip
import json
from pathlib import Path

from planning.step_plan import Job, JobMember, StepPlan, Wave
from planning.types import Chunk, SequenceRef
from tests.training.oracle import fleet_spec, make_worker, tenant
from training.config import OptimiserConfig
from training.step_trace import trace_path

LENGTHS = [12, 20, 9]


def test_the_asked_for_steps_are_recorded_with_their_phases(
    base_model_folder, token_path, run_ranks, tmp_path: Path
) -> None:
    t = tenant("anna", 4, 8, ("q_proj", "down_proj"), OptimiserConfig(learning_rate=1e-3), 1)
    paths = {t.name: token_path(tmp_path, t.name, LENGTHS, seed=1)}
    spec = fleet_spec(base_model_folder("llama"), paths, ((1, 1),), (t,))
    spec = spec.model_copy(update={"log_dir": tmp_path, "trace_steps": (1, 3)})

    def on_rank(rank: int) -> None:
        worker = make_worker(spec, rank)
        for step in range(3):
            chunk = Chunk((SequenceRef(t.name, step, LENGTHS[step]),), None)
            plan = StepPlan(step, (Wave((Job((JobMember(0, (chunk,)),)),)),), {t.name: 5})
            worker.train(plan, {t.name: 1e-3})

    run_ranks(1, on_rank)
    assert list(tmp_path.glob("*trace*")) == [trace_path(tmp_path, 1, 0)]
    with gzip.open(trace_path(tmp_path, 1, 0), "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"forward and backward", "gradient sync", "update", "_AddLowRankBackward", "aten::addmm_"} <= names
