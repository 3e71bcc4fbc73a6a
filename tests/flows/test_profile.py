"""The flow `profile`, and runs that use what it measures."""

from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import get_client

from flows.config import RunConfig
from flows.finetune import finetune
from flows.preview import preview, stored_profile_path
from flows.profile import profile
from flows.validation import check_run
from planning.errors import InputError
from planning.phase_file import describe
from planning.profile import read_profile
from training.profile_store import read_report

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def measuring_run(tiny_run: Callable[..., RunConfig]) -> RunConfig:
    return tiny_run(
        profile={"source": "measure"},
        cluster={"num_gpus": 1, "memory_per_gpu_gib": 0.01, "backend": "gloo"},
    )


@pytest.mark.slow
def test_a_run_measures_what_is_not_stored_and_trains_with_it(measuring_run: RunConfig, workspace: Path) -> None:
    base = check_run(measuring_run)
    with pytest.raises(InputError, match=r"lobra profile RUN\.yaml"):
        preview(measuring_run, base)
    folder = workspace / "runs" / "measured"
    summary = finetune(run=measuring_run, run_dir=folder)
    assert {tenant["status"] for tenant in summary["tenants"].values()} == {"finished"}
    stored = stored_profile_path(measuring_run)
    used, measured = read_profile(folder / "profile.json"), read_profile(stored)
    assert (used.layer_cost_by_tp, used.measured) == (measured.layer_cost_by_tp, measured.measured)
    assert describe(preview(measuring_run, base).plan()) == "<1,1>x1"

    before = stored.read_bytes()
    assert profile(run=measuring_run) == str(stored)
    assert stored.read_bytes() == before


@pytest.mark.slow
def test_the_flow_measures_again_when_forced_and_shows_the_result(measuring_run: RunConfig, workspace: Path) -> None:
    stored = stored_profile_path(measuring_run)
    stored.parent.mkdir(parents=True)
    stored.write_text("{}")
    assert profile(run=measuring_run, force=True) == str(stored)
    assert read_profile(stored).num_layers == 2
    assert stored.with_suffix(".parquet").exists()
    assert [(c["tp"], c["pp"]) for c in read_report(stored)["configurations"]] == [(1, 1)]
    with get_client(sync_client=True) as client:
        assert "profile" in {artifact.key for artifact in client.read_artifacts()}
