"""Adapters as versions of registered models, in a real MLflow store."""

from dataclasses import replace
from pathlib import Path

import mlflow.artifacts
import pytest
from mlflow.tracking import MlflowClient
from pydantic import ValidationError

from data_prep.names import folder_name
from tasks.registry import TRAINED_AT, model_name
from tasks.tracking import Tracker
from tasks.tracking_config import TrackingConfig

CHAT = f"lobra.{folder_name('chat')}"


@pytest.fixture
def register(config, identity, tmp_path: Path):
    """`register(run_dir, trained_at, content)`: a run of its own that publishes the adapter of tenant chat."""

    def publish(run_dir: str, trained_at: str, content: str = "weights") -> None:
        own = replace(identity, run_dir=tmp_path / run_dir)
        adapter = own.run_dir / "adapter"
        adapter.mkdir(parents=True, exist_ok=True)
        (adapter / "adapter_model.safetensors").write_text(content)
        with Tracker(config, own) as tracker:
            tracker.log_artifact_dir("chat", adapter, "adapter")
            tracker.register_adapter("chat", "adapter", {"rank": "8", TRAINED_AT: trained_at})

    return publish


def test_every_run_adds_a_version_and_the_alias_follows_the_newest(config, register, monkeypatch) -> None:
    register("one", "2026-01-01T00:00:00", "old")
    register("two", "2026-01-02T00:00:00", "new")

    client = MlflowClient(config.mlflow_uri)
    assert len(client.search_model_versions(f"name = '{CHAT}'")) == 2
    champion = client.get_model_version_by_alias(CHAT, "champion")
    assert (champion.version, champion.tags["rank"]) == (2, "8")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.mlflow_uri)  # as the README does
    folder = mlflow.artifacts.download_artifacts(f"models:/{CHAT}@champion")
    assert Path(folder, "adapter_model.safetensors").read_text() == "new"


def test_a_repeated_attempt_makes_no_second_version(config, register) -> None:
    register("one", "2026-01-01T00:00:00")
    register("one", "2026-01-01T00:00:00")

    assert [v.version for v in MlflowClient(config.mlflow_uri).search_model_versions(f"name = '{CHAT}'")] == [1]


def test_an_old_run_that_is_registered_late_does_not_take_the_alias(config, register) -> None:
    register("new", "2026-01-02T00:00:00")
    register("old", "2026-01-01T00:00:00")

    client = MlflowClient(config.mlflow_uri)
    assert len(client.search_model_versions(f"name = '{CHAT}'")) == 2
    assert client.get_model_version_by_alias(CHAT, "champion").version == 1


def test_a_models_name_is_the_same_in_every_run_and_one_that_mlflow_takes() -> None:
    assert model_name("team/nightly: v2", "Zoë & co") == f"team-nightly-v2.{folder_name('Zoë & co')}"


@pytest.mark.parametrize("alias", ["latest", "v3", "a b", ""])
def test_an_alias_that_mlflow_refuses_is_refused_before_the_run(alias: str) -> None:
    with pytest.raises(ValidationError):
        TrackingConfig(registry_alias=alias)
