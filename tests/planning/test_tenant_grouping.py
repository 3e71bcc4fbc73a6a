"""Regrouping a replica's packed chunks by tenant: what must not change, and what it is for."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.config import Batching
from planning.cost import replica_seconds
from planning.dispatch import Dispatcher
from planning.tenant_grouping import grouped_by_tenant
from planning.types import Candidate, Chunk, ParallelConfig, Replica, SequenceRef

ROOM = 16
FLAT, PIPELINE = (Candidate(ParallelConfig(1, pp), ROOM, 0.5, 1e-2, 1e-4) for pp in (1, 2))


def first_fit(sequences: Sequence[SequenceRef]) -> list[Chunk]:
    chunks: list[list[SequenceRef]] = []
    for sequence in sequences:
        own = next((c for c in chunks if sum(s.num_tokens for s in c) + sequence.num_tokens <= ROOM), None)
        if own is None:
            chunks.append(own := [])
        own.append(sequence)
    return [Chunk(tuple(own), None) for own in chunks]


def num_spans(chunks: Sequence[Chunk]) -> int:
    return sum(len({s.tenant for s in chunk.sequences}) for chunk in chunks)


@given(drawn=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, ROOM)), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_only_who_shares_a_chunk_changes(drawn: list[tuple[str, int]]) -> None:
    chunks = first_fit([SequenceRef(tenant, row, length) for row, (tenant, length) in enumerate(drawn)])
    grouped = grouped_by_tenant(FLAT, chunks)
    assert len(grouped) == len(chunks)
    assert sorted(s.row for chunk in grouped for s in chunk.sequences) == list(range(len(drawn)))
    assert all(0 < sum(s.num_tokens for s in chunk.sequences) <= ROOM for chunk in grouped)
    assert replica_seconds(FLAT, grouped) == pytest.approx(replica_seconds(FLAT, chunks), rel=1e-12)
    assert num_spans(grouped) <= num_spans(chunks)
    assert grouped_by_tenant(PIPELINE, chunks) is chunks


def test_tenants_that_fill_chunks_of_their_own_get_them() -> None:
    sequences = [SequenceRef("ab"[row % 2], row, 4) for row in range(16)]
    grouped = grouped_by_tenant(FLAT, first_fit(sequences))
    assert sorted("".join({s.tenant for s in chunk.sequences}) for chunk in grouped) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("batching", Batching)
def test_a_step_has_few_tenants_per_chunk(batching: Batching) -> None:
    # lengths alternate between the tenants, so chunks made by length alone would hold both
    sequences = [
        SequenceRef("ab"[row % 2], row, 3 if batching is Batching.PADDED else 3 + row % 2) for row in range(20)
    ]
    replicas = (Replica(0, FLAT.config, 0), Replica(1, FLAT.config, 1))
    dispatch = Dispatcher(replicas, {FLAT.config: FLAT}, 4, 2000, batching).dispatch(sequences)
    chunks = [chunk for own in dispatch.chunks for chunk in own]
    assert len(chunks) > 3
    assert num_spans(chunks) <= len(chunks) + 1
