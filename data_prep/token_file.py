"""A tenant's token sequences as one Arrow IPC file, written in a stream and memory-mapped by every worker.

The file depends on data and tokenizer, never on the tenant's name, so that tenants with equal data share it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.errors import DatasetError
from data_prep.files import replace_atomically
from data_prep.types import EncodedSequence, Span

SCHEMA_VERSION = 1
BATCH_BYTES = 2**22
BATCH_ROWS = 2**14

_SPAN = pa.struct([pa.field("start", pa.int64(), nullable=False), pa.field("end", pa.int64(), nullable=False)])
SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.large_list(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
        pa.field("loss_spans", pa.list_(pa.field("item", _SPAN, nullable=False)), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_supervised_tokens", pa.int64(), nullable=False),
        pa.field("file_index", pa.int32(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sequence as stored: a read-only view (uint32) of the mapped file, and its label positions."""

    input_ids: npt.NDArray[np.uint32]
    loss_spans: tuple[Span, ...]


class TokenWriter:
    """Appends record batches of `record_batch` to an open file, joined to batches of a good size for reading.

    What it writes depends on the batches given, not on when or by whom they were made.
    """

    def __init__(self, writer: pa.ipc.RecordBatchFileWriter) -> None:
        self._writer = writer
        self._waiting: list[pa.RecordBatch] = []
        self._num_rows = 0
        self._num_bytes = 0
        self.num_rows = 0
        self.num_tokens = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._num_rows += batch.num_rows
        self._num_bytes += batch.nbytes
        self.num_rows += batch.num_rows
        self.num_tokens += len(batch.column("input_ids").values)
        if self._num_rows >= BATCH_ROWS or self._num_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._num_rows:
            self._writer.write_batch(pa.concat_batches(self._waiting))
        self._waiting, self._num_rows, self._num_bytes = [], 0, 0


@contextmanager
def open_token_writer(path: Path, key: str = "") -> Iterator[TokenWriter]:
    """`path` appears complete when the block ends, or not at all; `key` says what it was made from."""
    schema = SCHEMA.with_metadata({"schema_version": str(SCHEMA_VERSION), "key": key})
    with (
        replace_atomically(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as arrow,
    ):
        writer = TokenWriter(arrow)
        yield writer
        writer.flush()


def write_token_file(path: Path, sequences: Iterable[EncodedSequence], key: str = "") -> None:
    """Streams sequences into `path`, which appears complete or not at all."""
    remaining = iter(sequences)
    with open_token_writer(path, key) as writer:
        while batch := list(islice(remaining, BATCH_ROWS)):
            writer.write(record_batch(batch))


class TokenFile:
    """A memory-mapped token file; `num_tokens` and `num_supervised_tokens` are int64 arrays with one entry per row.

    Raises DatasetError when the file is missing, damaged or of another schema version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path), "r"))
            metadata = reader.schema.metadata or {}
            batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()
        except FileNotFoundError as error:
            raise DatasetError(f"token file {path} does not exist; prepare the tenant again") from error
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"token file {path} is damaged ({error}); delete it and prepare again") from error
        version = metadata.get(b"schema_version", b"none").decode()
        if version != str(SCHEMA_VERSION) or not reader.schema.equals(SCHEMA):
            raise DatasetError(
                f"token file {path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
                "delete it and prepare again"
            )
        self.key = metadata.get(b"key", b"").decode()
        self._batches = [_Batch(batch) for batch in batches]
        self._first_rows = np.cumsum([0] + [batch.num_rows for batch in batches])
        self.num_tokens = _column(batches, "num_tokens")
        self.num_supervised_tokens = _column(batches, "num_supervised_tokens")

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    def row(self, index: int) -> TokenRow:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows} rows in {self.path}")
        batch = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        return self._batches[batch].row(index - int(self._first_rows[batch]))


class _Batch:
    """NumPy views of one record batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        input_ids, loss_spans = batch.column("input_ids"), batch.column("loss_spans")
        self._token_offsets = input_ids.offsets.to_numpy()
        self._tokens = input_ids.values.to_numpy()
        self._span_offsets = loss_spans.offsets.to_numpy()
        self._starts = loss_spans.values.field("start").to_numpy()
        self._ends = loss_spans.values.field("end").to_numpy()

    def row(self, index: int) -> TokenRow:
        spans = slice(self._span_offsets[index], self._span_offsets[index + 1])
        return TokenRow(
            self._tokens[self._token_offsets[index] : self._token_offsets[index + 1]],
            tuple(zip(self._starts[spans].tolist(), self._ends[spans].tolist(), strict=True)),
        )


def _column(batches: list[pa.RecordBatch], name: str) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64)] + [batch.column(name).to_numpy() for batch in batches])


def record_batch(batch: Sequence[EncodedSequence]) -> pa.RecordBatch:
    """Sequences in the form of the file, for a TokenWriter."""
    lengths = [len(sequence.input_ids) for sequence in batch]
    spans = [span for sequence in batch for span in sequence.loss_spans]
    span_values = pa.StructArray.from_arrays(
        [pa.array([start for start, _ in spans], pa.int64()), pa.array([end for _, end in spans], pa.int64())],
        fields=list(_SPAN),
    )
    span_offsets = np.cumsum([0] + [len(sequence.loss_spans) for sequence in batch])
    tokens = np.fromiter(chain.from_iterable(sequence.input_ids for sequence in batch), np.uint32, sum(lengths))
    columns = [
        pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), tokens, type=SCHEMA.field("input_ids").type),
        pa.ListArray.from_arrays(span_offsets.astype(np.int32), span_values, type=SCHEMA.field("loss_spans").type),
        pa.array(lengths, pa.int64()),
        pa.array([sequence.num_supervised_tokens for sequence in batch], pa.int64()),
        pa.array([sequence.file_index for sequence in batch], pa.int32()),
        pa.array([sequence.source_row for sequence in batch], pa.int64()),
    ]
    return pa.record_batch(columns, schema=SCHEMA)
