import numpy as np
import pytest

from data_prep.collate import TenantSpan, collate, padded_to_multiple
from data_prep.token_file import TokenFile, write_token_file
from data_prep.types import EncodedSequence
from planning.errors import LobraError
from planning.types import Chunk, SequenceRef

ROWS = {
    "ann": [EncodedSequence((11, 12, 13, 14), ((2, 4),)), EncodedSequence((15, 16), ((1, 2),))],
    "bob": [EncodedSequence((21, 22, 23, 24, 25), ((1, 2), (4, 5)))],
}
WEIGHTS = {"ann": 0.5, "bob": 0.25}


@pytest.fixture
def token_files(tmp_path):
    for tenant, rows in ROWS.items():
        write_token_file(tmp_path / tenant, rows)
    return {tenant: TokenFile(tmp_path / tenant) for tenant in ROWS}


def chunk(*rows, padded_tokens=6):
    return Chunk(tuple(SequenceRef(t, r, len(ROWS[t][r].input_ids)) for t, r in rows), padded_tokens)


def test_a_chunk_is_grouped_by_tenant_padded_and_weighted_at_the_position_that_predicts(token_files):
    collated = collate(chunk(("bob", 0), ("ann", 1), ("ann", 0)), token_files, WEIGHTS)
    assert collated.spans == (TenantSpan("ann", 0, 2), TenantSpan("bob", 2, 1))
    assert collated.tokens_BT.tolist() == [[15, 16, 0, 0, 0, 0], [11, 12, 13, 14, 0, 0], [21, 22, 23, 24, 25, 0]]
    assert collated.labels_BT.tolist() == [[16, 0, 0, 0, 0, 0], [12, 13, 14, 0, 0, 0], [22, 23, 24, 25, 0, 0]]
    assert collated.weights_BT.tolist() == [[0.5, 0, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0], [0.25, 0, 0, 0.25, 0, 0]]
    assert (collated.tokens_BT.dtype, collated.labels_BT.dtype) == (np.int64, np.int64)
    assert collated.weights_BT.dtype == np.float32


def test_added_tokens_count_for_nobody_and_are_a_segment_of_their_own(token_files):
    padded = padded_to_multiple(collate(chunk(("bob", 0), ("ann", 1)), token_files, WEIGHTS), 4)
    assert padded.tokens_BT.tolist() == [[15, 16, 0, 0, 0, 0, 0, 0], [21, 22, 23, 24, 25, 0, 0, 0]]
    assert padded.weights_BT.tolist() == [[0.5, 0, 0, 0, 0, 0, 0, 0], [0.25, 0, 0, 0.25, 0, 0, 0, 0]]
    assert padded.spans == (TenantSpan("ann", 0, 1), TenantSpan("bob", 1, 1))
    packed = padded_to_multiple(collate(chunk(("bob", 0), ("ann", 1), padded_tokens=None), token_files, WEIGHTS), 4)
    assert packed.segments == (2, 5, 1)
    assert packed.spans == (TenantSpan("ann", 0, 2), TenantSpan("bob", 2, 6))
    assert packed.weights_BT[0, -1] == 0
    assert padded_to_multiple(packed, 4) is packed


def test_a_packed_chunk_puts_sequences_end_to_end_and_never_labels_across_their_borders(token_files):
    collated = collate(chunk(("bob", 0), ("ann", 1), ("ann", 0), padded_tokens=None), token_files, WEIGHTS)
    assert collated.segments == (2, 4, 5)
    assert collated.spans == (TenantSpan("ann", 0, 6), TenantSpan("bob", 6, 5))
    assert collated.tokens_BT.tolist() == [[15, 16, 11, 12, 13, 14, 21, 22, 23, 24, 25]]
    assert collated.labels_BT.tolist() == [[16, 0, 12, 13, 14, 0, 22, 23, 24, 25, 0]]
    assert collated.weights_BT.tolist() == [[0.5, 0, 0, 0.5, 0.5, 0, 0.25, 0, 0, 0.25, 0]]


def test_each_tenants_weights_sum_to_one_however_a_step_is_split_and_padded(token_files):
    weights = {tenant: 1 / sum(row.num_supervised_tokens for row in rows) for tenant, rows in ROWS.items()}
    whole = [chunk(("ann", 0), ("ann", 1), ("bob", 0))]
    split = [chunk(("ann", 1), padded_tokens=2), chunk(("bob", 0), ("ann", 0), padded_tokens=64)]
    for chunks in (whole, split):
        sums = dict.fromkeys(ROWS, 0.0)
        for part in chunks:
            collated = collate(part, token_files, weights)
            for span in collated.spans:
                rows = slice(span.start, span.start + span.size)
                sums[span.tenant] += float(collated.weights_BT[rows].sum())
        assert sums == pytest.approx({"ann": 1.0, "bob": 1.0}, abs=1e-6)


def test_a_chunk_that_does_not_match_the_token_file_is_refused(token_files):
    with pytest.raises(LobraError, match="row 1 of tenant 'ann' has 2 tokens, planned were 3"):
        collate(Chunk((SequenceRef("ann", 1, 3),), 8), token_files, WEIGHTS)
    with pytest.raises(LobraError, match="planned were 5 in 4"):
        collate(chunk(("bob", 0), padded_tokens=4), token_files, WEIGHTS)
