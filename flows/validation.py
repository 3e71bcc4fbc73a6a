"""Everything about a run that can be judged before any work: folders, architecture, paths, profile. No torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from data_prep.tokenizer import load_tokenizer
from flows.config import RunConfig
from planning.config import ProfileSource
from planning.errors import InputError
from training.base_model import BaseModel, BaseModelError, read_base_model
from training.deployment import load_profile
from training.initial_adapter import WEIGHTS_FILE, check_initial_adapter

DATA_ROOTS_VARIABLE = "LOBRA_DATA_ROOTS"


def check_run(run: RunConfig, run_file: Path | None = None) -> BaseModel:
    """Raise InputError for the first thing that would make the run fail later; return the base model otherwise."""
    roots = allowed_roots(run_file)
    check_path("base_model.path", run.base_model.path, roots)
    base = read_base_model(run.base_model)
    base.check_weights()
    load_tokenizer(run.base_model.path)
    if run.profile.source is not ProfileSource.MEASURE:
        load_profile(run.profile, Path(), run.training.activations)
    for index, tenant in enumerate(run.tenants):
        where = f"tenants[{index}] ({tenant.name})"
        check_path(f"{where}.dataset.path", tenant.dataset.path, roots)
        _check_adapter(where, tenant.adapter.rank, tenant.adapter.target_modules, base)
        if tenant.adapter.initial_adapter is not None:
            weights = tenant.adapter.initial_adapter / WEIGHTS_FILE
            check_path(f"{where}.adapter.initial_adapter", weights, roots)
            check_initial_adapter(tenant.name, tenant.adapter, base)
        limit = tenant.dataset.max_length
        if limit is not None and limit > base.max_positions:
            raise InputError(
                f"{where}.dataset.max_length is {limit}, the base model has {base.max_positions} positions; lower it"
            )
    return base


def allowed_roots(run_file: Path | None) -> list[Path]:
    """Folders that data and models may lie in: LOBRA_DATA_ROOTS, else the run file's folder and the working folder."""
    configured = os.environ.get(DATA_ROOTS_VARIABLE)
    if configured:
        return [Path(root).resolve() for root in configured.split(os.pathsep) if root]
    roots = [Path.cwd()] if run_file is None else [Path.cwd(), run_file.parent]
    return [root.resolve() for root in roots]


def check_path(key: str, path: Path, roots: Sequence[Path]) -> None:
    """Raise InputError unless `path`, with symbolic links followed, lies in one of `roots`."""
    resolved = path.resolve()
    if not any(resolved.is_relative_to(root) for root in roots):
        shown = ", ".join(map(str, roots))
        raise InputError(
            f"{key}: {path} lies outside the allowed folders ({shown}); move it there, or have the operator add its "
            f"folder to {DATA_ROOTS_VARIABLE}"
        )


def _check_adapter(where: str, rank: int, targets: Sequence[str], base: BaseModel) -> None:
    for target in targets:
        shape = base.target_shape(target)
        if rank > min(shape.num_in, shape.num_out):
            raise BaseModelError(
                f"{where}.adapter.rank is {rank}, larger than {target} of the base model "
                f"({shape.num_out} x {shape.num_in}); lower it to at most {min(shape.num_in, shape.num_out)}"
            )
