"""Asks the logits probe, a process of its own, whether exported adapters do what the fleet trained. No torch here.

The process loads base model and peft once for all adapters; a crash or a lack of memory ends the probe, not the run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from training.base_model import module_name
from training.config import BaseModelConfig, TenantConfig

PROBE_SECONDS = 1800.0
NICENESS = 10  # from the start, for importing peft takes longer than the probe; on a CPU ranks need the cores
POLL_SECONDS = 0.25
NUM_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class ProbeItem:
    """One exported adapter, and what it must be: the checkpoint's weights at `scale` on the modules named `targets`."""

    exported: str
    weights: str
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`effect`: norm of the change of the base's logits / their norm; `error`: norm of what differs from the fleet's
    adapter / norm of the change. `reason` says why an adapter must not be published; empty for a good one."""

    effect: float
    error: float
    reason: str = ""

    @property
    def has_passed(self) -> bool:
        return not self.reason


def probe_item(exported: Path, weights: Path, tenant: TenantConfig, num_layers: int) -> ProbeItem:
    """What the probe needs to know of a tenant; it comes from the run, nothing from the exported folder."""
    targets = tuple(
        module_name(layer, target) for layer in range(num_layers) for target in tenant.adapter.target_modules
    )
    return ProbeItem(str(exported), str(weights), tenant.adapter.scale, targets)


def probe_adapters(
    base_model: BaseModelConfig, items: Sequence[ProbeItem], stop: Event | None = None
) -> list[ProbeResult]:
    """Results in the order of `items`. A probe that cannot run, or is ended by `stop`, fails all, with the reason."""
    if not items:
        return []
    request = {
        "base_model": str(base_model.path),
        "dtype": base_model.dtype.value,
        "items": [asdict(item) for item in items],
        "parent_pid": os.getpid(),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "training.logits_probe"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        _put_behind(process.pid)
        try:
            output, errors = _answer(process, json.dumps(request), stop)
        except TimeoutError as error:
            return [_not_run(str(error))] * len(items)
        finally:
            process.kill()
    if process.returncode != 0:
        last_lines = " | ".join(errors.strip().splitlines()[-NUM_SHOWN_LINES:])
        return [_not_run(f"it ended with code {process.returncode}: {last_lines}")] * len(items)
    return [ProbeResult(**result) for result in json.loads(output.strip().splitlines()[-1])]


def _put_behind(pid: int) -> None:
    """Low priority for a process with a session of its own.

    Where Linux groups processes by session (autogroup), cores are shared among sessions first, whatever the niceness of
    their processes; then the session's own counts.
    """
    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with suppress(OSError):  # no such grouping here
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))


def _answer(process: subprocess.Popen[str], request: str, stop: Event | None) -> tuple[str, str]:
    """What the process writes until it ends. Raises TimeoutError when it takes too long, or when `stop` is set."""
    deadline = time.monotonic() + PROBE_SECONDS
    text: str | None = request
    while True:
        try:
            return process.communicate(text, timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            text = None  # what was given is sent on; it must not be given twice
            if stop is not None and stop.is_set():
                raise TimeoutError("the run was stopped") from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took longer than {PROBE_SECONDS:.0f} s") from None


def _not_run(why: str) -> ProbeResult:
    return ProbeResult(0.0, 0.0, f"the logits probe of the exported adapter could not run: {why}")
