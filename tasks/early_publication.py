"""Publishes the adapters of tenants that have ended while others still train. No Prefect here.

Of a checkpoint, only the copying of an adapter happens in the thread that wrote it; the logits probe, a process, is
waited for in a thread of its own. Training never waits for either. What fails here, or was not reached in time, is
published at the end of the run like the other tenants' adapters.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import TracebackType
from typing import Self

from tasks.adapters import StagedAdapter, publish_staged, published_probe, stage_adapter
from tasks.run_folder import RunFolder
from training.checkpoint import Checkpoint
from training.config import BaseModelConfig, TenantConfig
from training.progress import RunProgress, TenantStatus

logger = logging.getLogger(__name__)


class EarlyPublisher:
    """Use as a context manager around training: leaving it waits for the adapter under way, after an error kills it.

    `say` gets one line for each adapter that is published.
    """

    def __init__(
        self,
        base_model: BaseModelConfig,
        tenants: Sequence[TenantConfig],
        folder: RunFolder,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self._base_model = base_model
        self._tenants = tenants
        self._folder = folder
        self._say = say
        self._tried: set[str] = set()
        self._stop = Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="early-publication")

    def take(self, checkpoint: Checkpoint) -> None:
        """Begin to publish who has ended by this checkpoint, unless all have: then the run's end does it."""
        staged = []
        for tenant in self._newly_ended(RunProgress.from_dict(checkpoint.state)):
            try:
                if published_probe(tenant.name, checkpoint, self._folder) is None:
                    staged.append(stage_adapter(tenant, checkpoint, self._base_model, self._folder))
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on and the run's end tries again
                self._put_off(error)
        if staged:
            self._executor.submit(self._publish, staged)

    def _newly_ended(self, progress: RunProgress) -> list[TenantConfig]:
        """Tenants to publish that were not tried before; each is tried once."""
        if self._stop.is_set() or all(p.status is not TenantStatus.RUNNING for p in progress.tenants.values()):
            return []
        ended = [t for t in self._tenants if progress.tenants[t.name].is_publishable(t.evaluation)]
        new = [tenant for tenant in ended if tenant.name not in self._tried]
        self._tried |= {tenant.name for tenant in new}
        return new

    def _publish(self, staged: Sequence[StagedAdapter]) -> None:
        try:
            results = publish_staged(staged, self._base_model, self._folder, self._stop)
        except Exception as error:  # noqa: BLE001 - as in `take`
            self._put_off(error)
            return
        for tenant, result in results.items():
            if result.has_passed:
                self._say(f"the adapter of tenant {tenant!r} is published: {self._folder.adapter(tenant)}")
            elif not self._stop.is_set():
                self._put_off(result.reason)

    def _put_off(self, reason: object) -> None:
        logger.warning("an adapter is not published before the end of the run, where it is tried again: %s", reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop.set()
        try:
            self._executor.shutdown(cancel_futures=True)
        except BaseException:
            self._stop.set()
            raise
