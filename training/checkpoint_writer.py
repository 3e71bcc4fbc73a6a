"""Turns snapshots into checkpoints beside training, one at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from training.checkpoint import Checkpoint, CheckpointStore
from training.fleet import Fleet, FleetError
from training.journal import Journal

WRITE_SECONDS = 600.0


class CheckpointWriter:
    """Use as a context manager. Errors of a checkpoint are raised at the next call: nothing is lost in silence.

    `journals` are put on disk before a checkpoint that continues them. `written` is told of every checkpoint, in the
    writing thread: no checkpoint is pruned before it returns.
    """

    def __init__(
        self, store: CheckpointStore, journals: Sequence[Journal], written: Callable[[Checkpoint], None]
    ) -> None:
        self._store = store
        self._journals = journals
        self._written = written
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None
        self.saved_step = -1  # the last step that a checkpoint was begun for

    def begin(self, fleet: Fleet, state: dict) -> Path:
        """Snapshot the fleet between two steps; `state` is the controller's at that point."""
        self.finish()
        partial = self._store.begin(state["step"])
        fleet.begin_save(partial)
        self._submit(fleet, partial, state, WRITE_SECONDS)
        return partial

    def abandon_step(self, fleet: Fleet, state: dict, timeout_seconds: float) -> None:
        """Save the last completed step in the middle of the next one, and wait for it.

        Raises FleetError when the fleet does not manage in time.
        """
        self.finish()
        partial = self._store.begin(state["step"])
        fleet.abandon_step(partial)
        self._submit(fleet, partial, state, timeout_seconds)
        self.finish()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint begun now would wait for the one before."""
        return self._pending is not None and not self._pending.done()

    def check(self) -> None:
        """Raise what a finished write has to say."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the write under way."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def forget(self) -> None:
        """Drop what a fleet that failed was writing: its failure is known, and its steps will be saved again."""
        with suppress(FleetError):
            self.finish()
        self.saved_step = -1

    def _submit(self, fleet: Fleet, partial: Path, state: dict, timeout_seconds: float) -> None:
        self.saved_step = state["step"]
        self._pending = self._executor.submit(self._complete, fleet, partial, state, timeout_seconds)

    def _complete(self, fleet: Fleet, partial: Path, state: dict, timeout_seconds: float) -> Path:
        fleet.finish_save(partial, timeout_seconds)
        for journal in self._journals:
            journal.sync()
        folder = self._store.commit(partial, state)
        self._written(Checkpoint(folder, state))
        return folder

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()
