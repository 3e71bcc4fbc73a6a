"""Where batches of rows are encoded: in this process, or on Dask workers. The results are the same, in the same order.

The file is read here, in a stream; at most a few batches per worker wait at any time. A worker keeps the encoders of
the data sets that it works on, and one render process, until `release_workers`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
from distributed import Client, Future

from data_prep.config import DatasetConfig
from data_prep.encode import Encoder
from data_prep.errors import DatasetError
from data_prep.render import RenderProcess
from data_prep.token_file import record_batch
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.types import Record, Reject

BATCH_ROWS = 512
BATCH_BYTES = 2**20
BATCHES_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """What a batch is encoded with; the fingerprint tells apart tokenizers that were in the same folder."""

    dataset: DatasetConfig
    tokenizer_folder: Path
    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a file, as read."""

    items: tuple[Record | Reject, ...]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """What became of a batch, with sequences as they stand in token files."""

    train: pa.RecordBatch
    evaluation: pa.RecordBatch
    rejects: tuple[Reject, ...]
    num_truncated: int


EncodeBatches = Callable[[EncodeJob, Iterable[RowBatch]], Iterator[EncodedBatch]]


def row_batches(items: Iterable[Record | Reject]) -> Iterator[RowBatch]:
    """Batches that depend on the file alone, so that its token file is the same wherever it is made."""
    batch: list[Record | Reject] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += item.num_bytes if isinstance(item, Record) else len(item.snippet)
        if len(batch) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield RowBatch(tuple(batch))
            batch, num_bytes = [], 0
    if batch:
        yield RowBatch(tuple(batch))


def encode_here(renderer: RenderProcess, job: EncodeJob, batches: Iterable[RowBatch]) -> Iterator[EncodedBatch]:
    """Encodes in this process; raises DatasetError as Encoder does."""
    encoder = Encoder(_tokenizer(job.tokenizer_folder, job.tokenizer_fingerprint), job.dataset, renderer)
    for batch in batches:
        yield _encode(encoder, batch)


def encode_on_cluster(client: Client, job: EncodeJob, batches: Iterable[RowBatch]) -> Iterator[EncodedBatch]:
    """Encodes on the workers of a Dask cluster; raises DatasetError as Encoder does, for the first such row."""
    num_waiting = BATCHES_PER_WORKER * max(1, len(client.nthreads()))
    futures: deque[Future[EncodedBatch | DatasetError]] = deque()
    try:
        for batch in batches:
            futures.append(client.submit(_encode_on_worker, job, batch, pure=False))
            if len(futures) == num_waiting:
                yield _unless_error(futures.popleft().result())
        while futures:
            yield _unless_error(futures.popleft().result())
    finally:
        client.cancel(list(futures))


def release_workers(client: Client) -> None:
    """Ends the workers' render processes and frees their tokenizers."""
    client.run(_release)


@lru_cache(maxsize=2)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    return load_tokenizer(folder)


@lru_cache(maxsize=1)
def _renderer() -> RenderProcess:
    return RenderProcess()


@lru_cache(maxsize=64)
def _encoder(job: EncodeJob) -> Encoder:
    return Encoder(_tokenizer(job.tokenizer_folder, job.tokenizer_fingerprint), job.dataset, _renderer())


def _encode_on_worker(job: EncodeJob, batch: RowBatch) -> EncodedBatch | DatasetError:
    """An error of the user is a result, because Dask logs what a task raises as a failure of the program."""
    try:
        return _encode(_encoder(job), batch)
    except DatasetError as error:
        return error


def _unless_error(result: EncodedBatch | DatasetError) -> EncodedBatch:
    if isinstance(result, DatasetError):
        raise result
    return result


def _encode(encoder: Encoder, batch: RowBatch) -> EncodedBatch:
    rows = encoder.encode(batch.items)
    return EncodedBatch(
        record_batch(rows.train), record_batch(rows.evaluation), tuple(rows.rejects), rows.num_truncated
    )


def _release() -> None:
    _renderer().close()
    for cached in (_encoder, _renderer, _tokenizer):
        cached.cache_clear()
