"""Predicted against measured step seconds, where every rank has a core: the demo's tenants on two ranks.

Each world is profiled and trained right after another, because other work on the machine slows both.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prefect.testing.utilities import prefect_test_harness

from flows.config import RunConfig, read_run_file
from flows.finetune import finetune
from flows.preview import stored_profile_path
from training.journal import effective_steps, read_journal
from training.profile_store import read_report

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
    [("<1,1>x2", 1.0, 1, 1), ("<2,1>x1", 0.04, 2, 1), ("<1,2>x1", 0.06, 1, 2)],
)
def test_predicted_step_seconds_are_close_to_measured_ones(
    demo: RunConfig, plan: str, memory_gib: float, max_tp: int, max_pp: int
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
    assert np.abs(errors).mean() <= 0.10
