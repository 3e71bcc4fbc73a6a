"""Checkpoints beside training: a thread of each rank of replica 0 gathers a snapshot and writes it.

A `save` command copies the rank's own tensors between two steps, which is all that training waits for; the thread then
sends them to rank 0 over a process group of its own, and rank 0 writes the files. When a run is stopped in the middle
of a long step, `abandon` has the thread take the snapshot itself: adapters change only inside the optimiser's update,
under a lock, so what it copies is the last completed step.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch.distributed as dist

from training.adapter_state import CanonicalWriter, Snapshot
from training.fleet_spec import ABANDON_KEY, saved_key

LISTEN_SECONDS = 0.25


class BackgroundSaver:
    """The saving thread of one rank. `completed_steps` counts this launch's updates and is changed under `lock`."""

    def __init__(self, writer: CanonicalWriter, take_snapshot: Callable[[], Snapshot], store: dist.Store) -> None:
        self.lock = threading.Lock()
        self.completed_steps = 0
        self._writer = writer
        self._take_snapshot = take_snapshot
        self._store = store  # a client of its own: a store's calls are not to be shared between threads
        self._has_abandoned = False
        self._requests: SimpleQueue[tuple[str, Path, Snapshot] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="saver", daemon=True)
        self._thread.start()

    def save(self, name: str, folder: Path) -> None:
        """Snapshot now, write later; called between two steps, on every rank of replica 0."""
        self._requests.put((name, folder, self._take_snapshot()))

    def close(self) -> None:
        """Finish what was asked for."""
        self._requests.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=LISTEN_SECONDS)
            except Empty:
                request = self._abandoned()
                if request is None:
                    continue
            if request is None:
                return
            name, folder, snapshot = request
            self._write(name, folder, snapshot)

    def _write(self, name: str, folder: Path, snapshot: Snapshot) -> None:
        try:
            is_writer = self._writer.write(folder, snapshot)
            answer = {}
        except OSError as error:  # a full disk ends in the controller, which keeps the older checkpoints
            is_writer, answer = True, {"error": str(error)}
        if is_writer:
            self._store.set(saved_key(name), json.dumps(answer))

    def _abandoned(self) -> tuple[str, Path, Snapshot] | None:
        """The snapshot that the controller asks for in the middle of a step, once; None as long as it asks for none."""
        if self._has_abandoned:
            return None
        with suppress(RuntimeError):  # the store went with its controller: the agent ends this rank
            if self._store.check([ABANDON_KEY]):
                self._has_abandoned = True
                request = json.loads(self._store.get(ABANDON_KEY))
                with self.lock:
                    if self.completed_steps == request["completed_steps"]:
                        return request["name"], Path(request["folder"]), self._take_snapshot()
        return None
