"""One tenant's adapter in a run folder: found by tenant and step, exported. No Prefect, no torch."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from data_prep.files import create_folder
from data_prep.names import folder_name
from flows.config import RunConfig, explain
from planning.errors import InputError
from tasks.run_folder import RunFolder, read_json
from training.adapter_probe import ProbeResult, probe_adapters, probe_item
from training.base_model import read_base_model
from training.checkpoint import Checkpoint, CheckpointStore, published_file
from training.config import BaseModelConfig, TenantConfig
from training.peft_export import ExportError, export_adapter


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """A tenant's adapter as a checkpoint holds it."""

    base_model: BaseModelConfig
    tenant: TenantConfig
    checkpoint: Checkpoint

    @property
    def weights(self) -> Path:
        return published_file(self.checkpoint.folder, folder_name(self.tenant.name))


def find_trained(run_dir: Path, tenant: str, step: int | None) -> TrainedAdapter:
    """The adapter of `tenant` in the checkpoint of `step`, or in the newest whole one.

    Raises InputError, with what there is, when run, tenant or checkpoint are not found.
    """
    folder = RunFolder(run_dir)
    run = _read_config(folder)
    by_name = {own.name: own for own in run.tenants}
    if tenant not in by_name:
        raise InputError(f"{run_dir} has no tenant {tenant!r}; its tenants: {', '.join(by_name)}")
    store = CheckpointStore(folder.checkpoints, run.training.keep_checkpoints)
    checkpoint = store.latest() if step is None else store.at(step)
    if checkpoint is None:
        raise InputError(f"{run_dir} holds no whole checkpoint; wait for the first one, or run it")
    trained = TrainedAdapter(run.base_model, by_name[tenant], checkpoint)
    if not trained.weights.exists():
        raise InputError(f"tenant {tenant!r} was not trained in {run_dir}; its data was refused, see summary.json")
    return trained


def export_trained(trained: TrainedAdapter, out: Path) -> ProbeResult | None:
    """Write the PEFT folder `out`, whole or not at all; the result of its logits probe, None without a base model.

    Raises ExportError when the adapter must not be used, InputError when `out` holds anything.
    """
    with create_folder(out) as partial:
        export_adapter(trained.checkpoint, trained.base_model, trained.tenant, partial)
        if not trained.base_model.path.is_dir():
            return None
        num_layers = read_base_model(trained.base_model).num_layers
        item = probe_item(partial, trained.weights, trained.tenant, num_layers)
        result = probe_adapters(trained.base_model, [item])[0]
        if not result.has_passed:
            raise ExportError(f"adapter of tenant {trained.tenant.name!r}: {result.reason}")
        return result


def _read_config(folder: RunFolder) -> RunConfig:
    if not folder.config.exists():
        raise InputError(f"{folder.path}: not a run folder (no config.json); give the folder that `lobra run` named")
    try:
        return RunConfig.model_validate(read_json(folder.config))
    except ValidationError as error:
        lines = "\n".join(explain(error, RunConfig))
        raise InputError(f"{folder.config} is of another version of this product:\n{lines}") from error
