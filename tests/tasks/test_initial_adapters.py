"""A resumed run notices that an adapter which a tenant continues from has changed."""

from pathlib import Path

import pytest

from planning.errors import InputError
from tasks.initial_adapters import freeze_initial_adapters
from tasks.run_folder import RunFolder
from training.config import TenantConfig


def tenant(name: str, initial_adapter: Path | None) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter={"rank": 4, "alpha": 8, "initial_adapter": initial_adapter},
        batch_size=4,
        steps=1,
    )


def test_a_changed_initial_adapter_is_refused_and_an_equal_one_resumes(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"before")
    tenants, folder = [tenant("new", None), tenant("continued", tmp_path)], RunFolder(tmp_path)
    freeze_initial_adapters(tenants, folder)
    freeze_initial_adapters(tenants, folder)
    weights.write_bytes(b"after")
    with pytest.raises(InputError, match=r"tenant 'continued': adapter\.initial_adapter .* changed since.*--fresh"):
        freeze_initial_adapters(tenants, folder)
