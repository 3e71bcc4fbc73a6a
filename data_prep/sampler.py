"""Which rows a tenant trains on in which step: pure functions of (seed, epoch), so that resuming needs no state.

Epoch e visits every row once, in the order of random keys from Philox seeded with (seed, e); raw Philox output and a
stable sort keep the order equal across NumPy versions. Batches never cross an epoch; its last batch may be smaller.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_KEPT_ORDERS = 256


def epoch_order(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """A permutation of range(num_rows)."""
    keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    return -(-num_rows // batch_size)


def step_rows(seed: int, step: int, num_rows: int, batch_size: int) -> npt.NDArray[np.int64]:
    """Rows of one step, counted from 0 in the tenant's own steps: `batch_size` of them, fewer at an epoch's end."""
    epoch, batch = divmod(step, steps_per_epoch(num_rows, batch_size))
    return _kept_order(seed, epoch, num_rows)[batch * batch_size : (batch + 1) * batch_size].astype(np.int64)


@lru_cache(maxsize=MAX_KEPT_ORDERS)
def _kept_order(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.signedinteger]:
    """The epoch's order in 4 bytes a row, so that a million rows are sorted once an epoch, not once a step."""
    return epoch_order(seed, epoch, num_rows).astype(np.int32 if num_rows < 2**31 else np.int64)
