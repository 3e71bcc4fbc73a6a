"""Waiting for the ranks' reports without asking for them again and again, and without deafness to signals."""

import itertools
import threading

import torch.distributed as dist

from training.fleet_spec import READY, report_keys
from training.processes import FOREVER

CLOSE_SECONDS = 2.0


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
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="fleet-reports", daemon=True)
        self._thread.start()

    def wait(self, number: int, timeout_seconds: float) -> bool:
        """Whether all ranks have reported on command `number`; waits for it at most so long.

        Raises ConnectionError when the store is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_answered >= number or self._failure is not None, timeout_seconds)
            if self._failure is not None:
                raise ConnectionError(f"the fleet's store does not answer: {self._failure}")
            return self._num_answered >= number

    def close(self, store: dist.Store) -> None:
        """End the thread; `store` is another client than its own."""
        with self._changed:
            self._is_closed = True
            for key in report_keys(self._num_answered + 1, self._world_size):
                store.set(key, "{}")
        self._thread.join(CLOSE_SECONDS)

    def _listen(self) -> None:
        for number in itertools.count(READY):
            failure = None
            try:
                self._store.wait(report_keys(number, self._world_size), FOREVER)
            except RuntimeError as error:
                failure = error
            with self._changed:
                self._num_answered, self._failure = number, failure
                self._changed.notify_all()
                if self._is_closed or failure is not None:
                    return
