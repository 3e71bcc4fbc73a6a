"""Fewer tenants per chunk: the same sequences on the same replica in as many packed chunks, tenants kept together.

Every tenant in a chunk costs matrix products of its own in every layer, which the cost model does not know: halving
their number took 5 % off a step (four layers x 256, six tenants). Who shares a chunk is free without a pipeline, where
the replica's seconds depend on the number of chunks alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from planning.types import Candidate, Chunk, SequenceRef

_by_row = attrgetter("tenant", "row")


def grouped_by_tenant(candidate: Candidate, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """One replica's packed chunks, regrouped; as they were if it is a pipeline or that brings no fewer tenants."""
    if len(chunks) < 2 or candidate.config.pp > 1:
        return chunks
    sequences = [sequence for chunk in chunks for sequence in chunk.sequences]
    members = _regrouped(sequences, candidate.max_chunk_tokens, len(chunks))
    if members is None:
        return chunks
    regrouped = [Chunk(tuple(sorted(own, key=_by_row)), None) for own in members]
    return min(chunks, regrouped, key=_num_spans)


def _num_spans(chunks: Sequence[Chunk]) -> int:
    return sum(len({sequence.tenant for sequence in chunk.sequences}) for chunk in chunks)


def _regrouped(sequences: Sequence[SequenceRef], room_tokens: int, num_chunks: int) -> list[list[SequenceRef]] | None:
    """Tenants with most tokens first, each from its longest sequence: into its own fullest chunk with room, else into
    the fullest that holds all the tenant still has, else into the emptiest. None if one finds no room or a chunk stays
    empty."""
    by_tenant: dict[str, list[SequenceRef]] = {}
    for sequence in sequences:
        by_tenant.setdefault(sequence.tenant, []).append(sequence)
    tokens_left = {tenant: sum(s.num_tokens for s in own) for tenant, own in by_tenant.items()}
    members: list[list[SequenceRef]] = [[] for _ in range(num_chunks)]
    rooms = [(room_tokens, number) for number in range(num_chunks)]  # tokens free, rising
    for tenant in sorted(by_tenant, key=lambda name: (-tokens_left[name], name)):
        own: list[tuple[int, int]] = []  # rooms of the tenant's chunks
        for sequence in sorted(by_tenant[tenant], key=lambda s: (-s.num_tokens, s.row)):
            tokens = sequence.num_tokens
            place = bisect_left(own, (tokens, -1))
            if place < len(own):
                room = own.pop(place)
                rooms.pop(bisect_left(rooms, room))
            else:
                room = rooms.pop(min(bisect_left(rooms, (tokens_left[tenant], -1)), num_chunks - 1))
                if room[0] < tokens:
                    return None
            left = (room[0] - tokens, room[1])
            insort(own, left)
            insort(rooms, left)
            members[room[1]].append(sequence)
            tokens_left[tenant] -= tokens
    return members if all(members) else None
