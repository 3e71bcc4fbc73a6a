"""Waiting for the ranks' reports without asking for them again and again, and without deafness to signals."""

import itertools
import threading
from datetime import timedelta

import torch.distributed as dist

from training.fleet_spec import READY, report_key

FOREVER = timedelta(days=365)


class ReportListener:
    """A thread that sleeps in the store until the reports of one command after the other are complete.

    A wait in the store cannot be interrupted, one here can: whoever calls `wait` still hears Ctrl-C. (Polling the store
    every two milliseconds took a twentieth of a core from the ranks.)
    """

    def __init__(self, store: dist.Store, world_size: int) -> None:
        """`store` is a client of the thread's own."""
        self._store = store
        self._world_size = world_size
        self._num_answered = READY - 1
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="fleet-reports", daemon=True).start()

    def wait(self, number: int, timeout_seconds: float) -> bool:
        """Whether all ranks have reported on command `number`; waits for it at most so long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_answered >= number, timeout_seconds)

    def close(self, store: dist.Store) -> None:
        """End the thread; `store` is another client than its own."""
        with self._changed:
            self._is_closed = True
            for key in self._keys(self._num_answered + 1):
                store.set(key, "{}")

    def _listen(self) -> None:
        for number in itertools.count(READY):
            self._store.wait(self._keys(number), FOREVER)
            with self._changed:
                self._num_answered = number
                self._changed.notify_all()
                if self._is_closed:
                    return

    def _keys(self, number: int) -> list[str]:
        return [report_key(number, rank) for rank in range(self._world_size)]
