"""A chunk's sequences become padded arrays with labels and per-token loss weights.

Legend: B sequences of the chunk, T = `padded_tokens`. Position t predicts token t + 1, so a label token at position p
puts its tenant's weight at p - 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.token_file import TokenFile
from planning.errors import LobraError
from planning.types import Chunk, SequenceRef


@dataclass(frozen=True, slots=True)
class TenantSpan:
    """Consecutive rows of a chunk that belong to one tenant."""

    tenant: str
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class CollatedChunk:
    """Tokens and next tokens (int64), loss weights (float32), and whose rows they are. Padding: token 0, weight 0."""

    tokens_BT: npt.NDArray[np.int64]  # noqa: N815
    labels_BT: npt.NDArray[np.int64]  # noqa: N815
    weights_BT: npt.NDArray[np.float32]  # noqa: N815
    spans: tuple[TenantSpan, ...]


def collate(chunk: Chunk, token_files: Mapping[str, TokenFile], loss_weights: Mapping[str, float]) -> CollatedChunk:
    """Reads the chunk's rows, grouped by tenant in sorted order and within a tenant in the chunk's order.

    Raises LobraError when a token file does not hold what the chunk was planned with.
    """
    sequences = sorted(chunk.sequences, key=lambda sequence: sequence.tenant)
    shape = (len(sequences), chunk.padded_tokens)
    tokens_BT = np.zeros(shape, np.int64)
    labels_BT = np.zeros(shape, np.int64)
    weights_BT = np.zeros(shape, np.float32)
    for b, sequence in enumerate(sequences):
        row = token_files[sequence.tenant].row(sequence.row)
        num_tokens = len(row.input_ids)
        if num_tokens != sequence.num_tokens or num_tokens > chunk.padded_tokens:
            raise LobraError(
                f"row {sequence.row} of tenant {sequence.tenant!r} has {num_tokens} tokens, planned were "
                f"{sequence.num_tokens} in a chunk of {chunk.padded_tokens}; prepare and plan the run again"
            )
        tokens_BT[b, :num_tokens] = row.input_ids
        labels_BT[b, : num_tokens - 1] = row.input_ids[1:]
        for start, end in row.loss_spans:
            weights_BT[b, start - 1 : end - 1] = loss_weights[sequence.tenant]
    return CollatedChunk(tokens_BT, labels_BT, weights_BT, _tenant_spans(sequences))


def _tenant_spans(sequences: list[SequenceRef]) -> tuple[TenantSpan, ...]:
    tenants = [sequence.tenant for sequence in sequences]
    return tuple(TenantSpan(tenant, tenants.index(tenant), tenants.count(tenant)) for tenant in dict.fromkeys(tenants))
