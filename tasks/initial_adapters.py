"""The adapters that tenants continue from belong to a run's frozen configuration, by their contents. No Prefect."""

from collections.abc import Sequence

from data_prep.files import file_sha256
from planning.errors import InputError
from tasks.run_folder import RunFolder, read_json, write_json
from training.config import TenantConfig
from training.initial_adapter import WEIGHTS_FILE


def freeze_initial_adapters(tenants: Sequence[TenantConfig], folder: RunFolder) -> None:
    """Note the SHA-256 of every tenant's initial adapter in initial_adapters.json.

    Raises InputError when a resumed run finds another one than it started with.
    """
    paths = {tenant.name: tenant.adapter.initial_adapter for tenant in tenants}
    found = {name: file_sha256(path / WEIGHTS_FILE) for name, path in paths.items() if path is not None}
    if not folder.initial_adapters.exists():
        write_json(folder.initial_adapters, {"schema_version": 1, "sha256": found})
        return
    before = read_json(folder.initial_adapters)["sha256"]
    for name, sha256 in found.items():
        if before[name] != sha256:
            raise InputError(
                f"tenant {name!r}: adapter.initial_adapter {paths[name]} changed since this run started; put the old "
                "files back to resume it, or add --fresh to start anew"
            )
