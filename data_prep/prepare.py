"""Every tenant's data file becomes a token file, in this process or on Dask workers.

A tenant whose input is wrong fails alone. One tenant is one piece of work: a huge file is not split.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from distributed import Client, LocalCluster, as_completed

from data_prep.cache import Manifest, find_or_build
from data_prep.config import DatasetConfig
from data_prep.errors import DatasetError
from data_prep.rejects import describe_rejects, publish_rejects
from data_prep.types import OVERLONG
from planning.errors import InputError

CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """One tenant's data set, the tokenizer to read it with, and where results go."""

    tenant: str
    dataset: DatasetConfig
    tokenizer_folder: Path
    cache_dir: Path
    run_dir: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "dataset": self.dataset.model_dump(mode="json"),
            "tokenizer_folder": str(self.tokenizer_folder),
            "cache_dir": str(self.cache_dir),
            "run_dir": str(self.run_dir),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(
            tenant=values["tenant"],
            dataset=DatasetConfig.model_validate(values["dataset"]),
            tokenizer_folder=Path(values["tokenizer_folder"]),
            cache_dir=Path(values["cache_dir"]),
            run_dir=Path(values["run_dir"]),
        )


@dataclass(frozen=True, slots=True)
class PreparedTenant:
    """A tenant's token file with its SHA-256, and what was left out of it; `num_rows` are rows kept."""

    tenant: str
    token_path: Path
    sha256: str
    num_rows: int
    num_rejects: int
    reject_reasons: dict[str, int]
    rejects_path: Path
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "token_path": str(self.token_path), "rejects_path": str(self.rejects_path)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        paths = {name: Path(values[name]) for name in ("token_path", "rejects_path")}
        return cls(**{**values, **paths})


@dataclass(frozen=True, slots=True)
class TenantFailure:
    """A tenant that cannot be trained, and why; the reason holds no text of rows."""

    tenant: str
    reason: str


Outcome = PreparedTenant | TenantFailure


def prepare_tenant(request: PrepareRequest) -> PreparedTenant:
    """Tokenises a tenant's data, or finds it in the cache, and writes its rejects into the run folder.

    Raises DatasetError, with the tenant's name, when the input cannot be used, too many rows are rejected, or no row
    is left.
    """
    try:
        entry, manifest = find_or_build(request.dataset, request.tokenizer_folder, request.cache_dir)
        rejects_path = publish_rejects(entry.rejects_path, request.dataset.path, request.run_dir, request.tenant)
        _check_rejects(request.dataset, manifest, rejects_path)
    except DatasetError as error:
        raise DatasetError(f"tenant {request.tenant!r}: {error}") from error
    return PreparedTenant(
        tenant=request.tenant,
        token_path=entry.token_path,
        sha256=manifest.tokens_sha256,
        num_rows=manifest.num_rows,
        num_rejects=manifest.num_rejects,
        reject_reasons=manifest.reject_reasons,
        rejects_path=rejects_path,
        num_tokens=manifest.num_tokens,
    )


def prepare_tenants(
    requests: Sequence[PrepareRequest], num_workers: int, on_done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Outcomes in the order of the requests; `on_done` sees each as it completes.

    Work runs on the Dask cluster at DASK_SCHEDULER_ADDRESS if that is set, else on `num_workers` local Dask
    processes, or in this process when that is 0.
    """
    report = on_done or (lambda _: None)
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    if num_workers == 0 and not address:
        outcomes = []
        for request in requests:
            outcomes.append(_outcome(request))
            report(outcomes[-1])
        return outcomes
    with _client(address, num_workers) as client:
        futures = client.map(_outcome, requests, pure=False)
        by_key: dict[str, Outcome] = {}
        for future, outcome in as_completed(futures, loop=client.loop, with_results=True):
            by_key[future.key] = outcome
            report(outcome)
        return [by_key[future.key] for future in futures]


def _outcome(request: PrepareRequest) -> Outcome:
    try:
        return prepare_tenant(request)
    except InputError as error:
        return TenantFailure(request.tenant, str(error))


@contextmanager
def _client(address: str | None, num_workers: int) -> Iterator[Client]:
    if address:
        try:
            client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except OSError as error:
            raise InputError(
                f"DASK_SCHEDULER_ADDRESS: no Dask scheduler answers at {address}; start it, or unset the variable"
            ) from error
        with client:
            yield client
        return
    with (
        LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _check_rejects(dataset: DatasetConfig, manifest: Manifest, rejects_path: Path) -> None:
    num_all = manifest.num_rows + manifest.num_rejects
    all_rows, why = f"of {num_all} rows of {dataset.path}", describe_rejects(rejects_path)
    if manifest.num_rows == 0:
        raise DatasetError(
            f"{num_all} {all_rows} were rejected, no row is left: {why}; repair them, see {rejects_path}"
        )
    if manifest.num_broken > dataset.max_reject_ratio * num_all:
        raise DatasetError(
            f"{manifest.num_broken} {all_rows} were rejected, more than dataset.max_reject_ratio "
            f"{dataset.max_reject_ratio} allows: {why}; repair them, see {rejects_path}, or raise "
            "dataset.max_reject_ratio"
        )
    if manifest.num_overlong > dataset.max_drop_ratio * num_all:
        raise DatasetError(
            f"{manifest.num_overlong} {all_rows} are {OVERLONG} {dataset.max_length}, more than "
            f"dataset.max_drop_ratio {dataset.max_drop_ratio} allows; shorten them, see {rejects_path}, or raise "
            "dataset.max_length or dataset.max_drop_ratio"
        )
