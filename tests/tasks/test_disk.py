"""The estimate of a run's disk space, by hand, and the refusal of a run that does not fit."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.disk import DiskFullError, check_free_disk
from training.base_model import BaseModel
from training.config import AdapterConfig, EvaluationConfig, TenantConfig, TrainingConfig

# q_proj of 2 layers with rank 4: 2 x 4 x (16 + 16) = 256 parameters.
ADAPTER_BYTES = 4 * 256
NEEDED = 2000 + (2 + 1) * 3 * ADAPTER_BYTES + ADAPTER_BYTES


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return BaseModel(tmp_path, "llama", 2, 16, 32, 4, 4, 4, 99, 64, 1e-5, 1e4, None, False)


@pytest.fixture
def tenant(tmp_path: Path) -> TenantConfig:
    (tmp_path / "rows.jsonl").write_bytes(bytes(2000))
    return TenantConfig(
        name="chat",
        dataset={"path": tmp_path / "rows.jsonl", "prompt_column": "p", "response_column": "r"},
        adapter=AdapterConfig(rank=4, alpha=8, target_modules=("q_proj",)),
        batch_size=1,
        steps=1,
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """`free(n)`: every disk has n bytes left."""
    return lambda num: monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=num))


def test_token_files_checkpoints_and_adapters_must_fit(base, tenant, free, tmp_path: Path) -> None:
    free(NEEDED)
    check_free_disk((tenant,), base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")
    free(NEEDED - 1)
    with pytest.raises(DiskFullError, match=r"needs about 0.0 MiB below .*3 checkpoints of .*lower training.keep_ch"):
        check_free_disk((tenant,), base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")


def test_a_tenant_whose_best_adapter_is_kept_needs_a_fourth_tensor_in_every_checkpoint(
    base, tenant, tmp_path: Path, free
) -> None:
    held_out = tenant.dataset.model_copy(update={"evaluation_ratio": 0.1})
    for publish, needed in (("last", NEEDED), ("best", NEEDED + (2 + 1) * ADAPTER_BYTES)):
        update = {"dataset": held_out, "evaluation": EvaluationConfig(every=5, publish=publish)}
        evaluated = tenant.model_copy(update=update)
        free(needed)
        check_free_disk([evaluated], base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")
        free(needed - 1)
        with pytest.raises(DiskFullError):
            check_free_disk([evaluated], base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")


def test_compressed_data_counts_four_times_and_a_missing_file_not_at_all(base, tenant, free, tmp_path: Path) -> None:
    packed = (tmp_path / "rows.jsonl").rename(tmp_path / "rows.jsonl.gz")
    gone = tenant.model_copy(update={"dataset": tenant.dataset.model_copy(update={"path": tmp_path / "gone.jsonl"})})
    zipped = tenant.model_copy(update={"dataset": tenant.dataset.model_copy(update={"path": packed})})
    for own, num_token_bytes in ((gone, 0), (zipped, 8000)):
        free(NEEDED - 2000 + num_token_bytes)
        check_free_disk((own,), base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")
        free(NEEDED - 2000 + num_token_bytes - 1)
        with pytest.raises(DiskFullError):
            check_free_disk((own,), base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")


def test_what_a_resumed_run_has_written_need_not_be_free(base, tenant, free, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").write_bytes(bytes(5000))
    free(NEEDED - 5000)
    check_free_disk((tenant,), base, TrainingConfig(), tmp_path / "cache", tmp_path / "run")
