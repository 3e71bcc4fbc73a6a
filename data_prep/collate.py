"""A chunk's sequences become arrays with labels and per-token loss weights, padded or packed.

Legend: padded, B sequences of T = `padded_tokens` each; packed, B = 1 and T the sum of the lengths, sequences end to
end. Position t predicts token t + 1 of the same sequence, so a label token at position p puts its tenant's weight at
p - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from data_prep.token_file import TokenFile, TokenRow
from planning.errors import LobraError
from planning.types import Chunk, SequenceRef


@dataclass(frozen=True, slots=True)
class TenantSpan:
    """What belongs to one tenant: `size` rows from row `start` of a padded chunk, tokens of a packed one."""

    tenant: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class CollatedChunk:
    """Tokens and next tokens (int64), loss weights (float32), and whose they are. Padding: token 0, weight 0.

    `segments` are the lengths of a packed chunk's sequences, in order; None for a padded one.
    """

    tokens_BT: npt.NDArray[np.int64]
    labels_BT: npt.NDArray[np.int64]
    weights_BT: npt.NDArray[np.float32]
    spans: tuple[TenantSpan, ...]
    segments: tuple[int, ...] | None


def collate(chunk: Chunk, token_files: Mapping[str, TokenFile], loss_weights: Mapping[str, float]) -> CollatedChunk:
    """Reads the chunk's rows, grouped by tenant in sorted order and within a tenant in the chunk's order.

    Raises LobraError when a token file does not hold what the chunk was planned with.
    """
    sequences = sorted(chunk.sequences, key=lambda sequence: sequence.tenant)
    packed = chunk.padded_tokens is None
    lengths = [chunk.padded_tokens or sequence.num_tokens for sequence in sequences]
    tokens = np.zeros(sum(lengths), np.int64)
    labels = np.zeros(sum(lengths), np.int64)
    weights = np.zeros(sum(lengths), np.float32)
    for sequence, room, first in zip(sequences, lengths, accumulate(lengths[:-1], initial=0), strict=True):
        row = _planned_row(sequence, room, token_files[sequence.tenant])
        tokens[first : first + sequence.num_tokens] = row.input_ids
        labels[first : first + sequence.num_tokens - 1] = row.input_ids[1:]
        for start, end in row.loss_spans:
            weights[first + start - 1 : first + end - 1] = loss_weights[sequence.tenant]
    shape = (1, -1) if packed else (len(sequences), -1)
    return CollatedChunk(
        tokens_BT=tokens.reshape(shape),
        labels_BT=labels.reshape(shape),
        weights_BT=weights.reshape(shape),
        spans=_tenant_spans(sequences, lengths if packed else [1] * len(sequences)),
        segments=tuple(lengths) if packed else None,
    )


def padded_to_multiple(chunk: CollatedChunk, multiple: int) -> CollatedChunk:
    """The chunk with T rounded up to a multiple, as sequence parallelism splits T evenly.

    Added tokens have weight 0. In a packed chunk they are a segment of their own, which no sequence sees, and belong to
    the last tenant.
    """
    num_added = -chunk.tokens_BT.shape[1] % multiple
    if not num_added:
        return chunk
    room = ((0, 0), (0, num_added))
    wider = replace(
        chunk,
        tokens_BT=np.pad(chunk.tokens_BT, room),
        labels_BT=np.pad(chunk.labels_BT, room),
        weights_BT=np.pad(chunk.weights_BT, room),
    )
    if chunk.segments is None:
        return wider
    last = chunk.spans[-1]
    return replace(
        wider,
        spans=(*chunk.spans[:-1], replace(last, size=last.size + num_added)),
        segments=(*chunk.segments, num_added),
    )


def _planned_row(sequence: SequenceRef, room: int, tokens: TokenFile) -> TokenRow:
    row = tokens.row(sequence.row)
    if len(row.input_ids) != sequence.num_tokens or sequence.num_tokens > room:
        raise LobraError(
            f"row {sequence.row} of tenant {sequence.tenant!r} has {len(row.input_ids)} tokens, planned were "
            f"{sequence.num_tokens} in {room}; prepare and plan the run again"
        )
    return row


def _tenant_spans(sequences: Sequence[SequenceRef], sizes: Sequence[int]) -> tuple[TenantSpan, ...]:
    """Spans of sequences that are grouped by tenant; `sizes` in the unit of the spans."""
    totals: dict[str, int] = {}
    for sequence, size in zip(sequences, sizes, strict=True):
        totals[sequence.tenant] = totals.get(sequence.tenant, 0) + size
    starts = accumulate(list(totals.values())[:-1], initial=0)
    return tuple(TenantSpan(tenant, start, size) for (tenant, size), start in zip(totals.items(), starts, strict=True))
