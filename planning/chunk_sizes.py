"""How large the chunks of a pipeline are, once it is known which sequences it gets.

By Eq. 12 a replica with n_j sequences of bucket j in chunks of at most q_j takes

    sum_j (A_j n_j + a ceil(n_j / q_j)) + (pp - 1) * its largest chunk

Large chunks spread the fixed term a, small ones shorten the bubble, and the largest chunk of all buckets sets it. So
every possible largest chunk m is tried, with q_j the most sequences of each bucket that take no longer than m.
"""

import numpy as np

from planning.assignment import Load

ROUNDING = 1e-9


def fit_chunk_sizes(load: Load) -> bool:
    """Give each pipeline of `load` its best chunk sizes, in place; whether any step became shorter."""
    has_improved = False
    before = load.replica_seconds()
    for replica in np.flatnonzero(load.depth).tolist():
        held = np.flatnonzero(load.num_sequences[replica])
        if not len(held):
            continue
        fixed, variable, room = load.fixed[replica], load.variable[replica], load.capacity[replica]
        count = load.num_sequences[replica, held]
        most = np.minimum(room[held], count).astype(np.int64)
        largest = np.concatenate([variable[j] * np.arange(1, n + 1) for j, n in zip(held, most, strict=True)])
        largest = np.unique(largest[largest >= variable[held].max() * (1 - ROUNDING)])[:, None]
        sizes = np.clip(np.floor(largest / variable[held] * (1 + ROUNDING)), 1, room[held])
        num_chunks = np.ceil(count / sizes)
        bubble = load.depth[replica] * (fixed + (variable[held] * np.ceil(count / num_chunks)).max(axis=1))
        seconds = variable[held] @ count + fixed * num_chunks.sum(axis=1) + bubble
        best = int(seconds.argmin())
        if seconds[best] < before[replica] * (1 - ROUNDING):
            fitting = np.clip(np.floor(largest[best] / variable * (1 + ROUNDING)), 1, np.maximum(room, 1))
            load.chunk[replica] = np.where(room > 0, fitting, 0)
            has_improved = True
    return has_improved
