"""Every tenant's data file becomes a token file, in this process or on Dask workers.

A tenant whose input is wrong fails alone. On a cluster this process reads the files, several at once, and the workers
encode their rows in batches, so that a huge file keeps all of them busy.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from distributed import Client, LocalCluster

from data_prep.cache import Manifest, find_or_build
from data_prep.config import DatasetConfig
from data_prep.errors import DatasetError
from data_prep.rejects import describe_rejects, publish_rejects
from data_prep.render import RenderProcess
from data_prep.types import OVERLONG
from data_prep.workers import EncodeBatches, encode_here, encode_on_cluster, release_workers
from planning.errors import InputError

CONNECT_SECONDS = 30.0
FILES_AT_ONCE = 8


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
    """A tenant's token file with its SHA-256, and what was left out of it; `num_rows` are rows to train on.

    `evaluation_path` is a token file of the rows held out, None unless `evaluation_ratio` asks for some. Rows that were
    cut to `max_length` are counted in `num_truncated`, and are among the rows.
    """

    tenant: str
    token_path: Path
    sha256: str
    num_rows: int
    num_rejects: int
    reject_reasons: dict[str, int]
    rejects_path: Path
    num_tokens: int
    num_truncated: int = 0
    evaluation_path: Path | None = None
    num_evaluation_rows: int = 0
    evaluation_sha256: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        names = ("token_path", "rejects_path", "evaluation_path")
        return cls(**{**values, **{name: Path(values[name]) for name in names if values.get(name) is not None}})


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
    with RenderProcess() as renderer:
        return _prepare(request, partial(encode_here, renderer))


def _prepare(request: PrepareRequest, encode: EncodeBatches) -> PreparedTenant:
    try:
        entry, manifest = find_or_build(request.dataset, request.tokenizer_folder, request.cache_dir, encode)
        rejects_path = publish_rejects(entry.rejects_path, request.dataset.path, request.run_dir, request.tenant)
        _check_rows(request.dataset, manifest, rejects_path)
    except DatasetError as error:
        raise DatasetError(f"tenant {request.tenant!r}: {error}") from error
    return PreparedTenant(
        tenant=request.tenant,
        token_path=entry.token_path,
        sha256=manifest.sha256[entry.token_path.name],
        num_rows=manifest.num_rows,
        num_rejects=manifest.num_rejects,
        reject_reasons=manifest.reject_reasons,
        rejects_path=rejects_path,
        num_tokens=manifest.num_tokens,
        num_truncated=manifest.num_truncated,
        evaluation_path=entry.evaluation_path if manifest.num_evaluation_rows else None,
        num_evaluation_rows=manifest.num_evaluation_rows,
        evaluation_sha256=manifest.sha256[entry.evaluation_path.name] if manifest.num_evaluation_rows else None,
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
        with RenderProcess() as renderer:
            return _outcomes(requests, partial(encode_here, renderer), 1, report)
    with _client(address, num_workers) as client:
        try:
            return _outcomes(requests, partial(encode_on_cluster, client), FILES_AT_ONCE, report)
        finally:
            release_workers(client)


def _outcomes(
    requests: Sequence[PrepareRequest], encode: EncodeBatches, num_threads: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    with ThreadPoolExecutor(num_threads, thread_name_prefix="prepare") as threads:
        futures = [threads.submit(_outcome, request, encode) for request in requests]
        try:
            for future in as_completed(futures):
                report(future.result())
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _outcome(request: PrepareRequest, encode: EncodeBatches) -> Outcome:
    try:
        return _prepare(request, encode)
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
            env={"TOKENIZERS_PARALLELISM": "false"},  # one core per worker
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _check_rows(dataset: DatasetConfig, manifest: Manifest, rejects_path: Path) -> None:
    num_all = manifest.num_all_rows
    all_rows, why = f"of {num_all} rows of {dataset.path}", describe_rejects(rejects_path)
    if manifest.num_rejects == num_all:
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
    if dataset.evaluation_ratio > 0 and 0 in (manifest.num_rows, manifest.num_evaluation_rows):
        change = "lower" if manifest.num_rows == 0 else "raise"
        raise DatasetError(
            f"dataset.evaluation_ratio {dataset.evaluation_ratio} holds out {manifest.num_evaluation_rows} of "
            f"{num_all - manifest.num_rejects} usable rows of {dataset.path} and leaves {manifest.num_rows} to train "
            f"on; {change} it, or give more rows"
        )
