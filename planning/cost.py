"""Seconds of a replica from the seconds of its chunks (paper, appendix D, Eq. 12)."""

from collections.abc import Sequence

from planning.types import Candidate, Chunk


def chunk_seconds(candidate: Candidate, chunk: Chunk) -> float:
    """Seconds of a padded or packed chunk on one pipeline stage, forward and backward."""
    if chunk.padded_tokens is not None:
        return candidate.chunk_seconds(len(chunk.sequences), chunk.padded_tokens)
    return candidate.fixed_seconds + sum(map(candidate.sequence_seconds, chunk.computed_lengths))


def replica_seconds(candidate: Candidate, chunks: Sequence[Chunk]) -> float:
    """Seconds of one replica's step: all chunks on one stage, and the pipeline filling with the largest one."""
    if not chunks:
        return 0.0
    seconds = [chunk_seconds(candidate, chunk) for chunk in chunks]
    return sum(seconds) + (candidate.config.pp - 1) * max(seconds)
