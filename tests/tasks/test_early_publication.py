"""Publication beside training gets in nobody's way; that it publishes is tested with the flow."""

import logging
from pathlib import Path

import pytest

from tasks.early_publication import EarlyPublisher
from tasks.run_folder import RunFolder
from training.checkpoint import Checkpoint
from training.config import BaseModelConfig, TenantConfig
from training.progress import RunProgress, TenantProgress, TenantStatus

EVALUATION = {"every": 2}


def tenant(name: str, evaluation: dict | None = None) -> TenantConfig:
    dataset = {"path": "unused", "prompt_column": "p", "response_column": "r", "evaluation_ratio": 0.1}
    adapter = {"rank": 4, "alpha": 8}
    return TenantConfig(name=name, dataset=dataset, adapter=adapter, batch_size=1, steps=4, evaluation=evaluation)


def checkpoint(folder: Path, **tenants: TenantProgress) -> Checkpoint:
    return Checkpoint(folder, RunProgress(tenants, step=4).to_dict())


@pytest.fixture
def publisher(tmp_path: Path) -> EarlyPublisher:
    tenants = (tenant("done"), tenant("owing", EVALUATION), tenant("busy"))
    return EarlyPublisher(BaseModelConfig(path=tmp_path), tenants, RunFolder(tmp_path))


DONE = TenantProgress(4, 4, TenantStatus.FINISHED)
BUSY = TenantProgress(9, 4)


def test_what_cannot_be_published_early_is_put_off_with_a_warning_and_tried_once(publisher, tmp_path, caplog) -> None:
    damaged = checkpoint(tmp_path / "no such checkpoint", done=DONE, owing=BUSY, busy=BUSY)
    with caplog.at_level(logging.WARNING), publisher:
        publisher.take(damaged)
        publisher.take(damaged)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "an adapter is not published before the end of the run, where it is tried again"
    ]
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize(
    "tenants",
    [
        {"done": DONE, "owing": DONE, "busy": DONE},  # all have ended: the end of the run publishes them
        {"done": BUSY, "owing": DONE, "busy": BUSY},  # its last evaluation may still change its best adapter
        {"done": TenantProgress(9, 4, TenantStatus.QUARANTINED), "owing": BUSY, "busy": BUSY},
    ],
)
def test_nothing_is_published_early_that_is_not_as_it_will_be(tenants, publisher, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING), publisher:
        publisher.take(checkpoint(tmp_path / "no such checkpoint", **tenants))
    assert not caplog.records
