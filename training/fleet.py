"""The controller's side of the fleet: launch, commands, reports, end.

The controller hosts the key-value store on a socket that it bound itself to loopback (given a host only, TCPStore
would listen on all interfaces) and beats once a second, so that an orphaned fleet ends itself.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from planning.errors import InputError, LobraError
from planning.step_plan import StepPlan
from training.checkpoint import CheckpointError
from training.fleet_spec import (
    ABANDON_KEY,
    DEATH_KEY,
    FAILURE_KEY,
    HEARTBEAT_KEY,
    HEARTBEAT_SECONDS,
    READY,
    SPEC_KEY,
    FleetSpec,
    command_key,
    log_path,
    report_keys,
    saved_key,
)
from training.probe import Probe
from training.processes import connect_store
from training.report_listener import ReportListener

LOOPBACK = "127.0.0.1"
SAVE_POLL_SECONDS = 0.02
FAILURE_POLL_SECONDS = 0.2  # between looks for failures while waiting
STOP_SECONDS = 5.0


class FleetError(LobraError):
    """A rank or the agent failed, or did not answer in time."""


class FleetTimeoutError(FleetError):
    """The fleet lives but did not answer in time."""


class Fleet:
    """All ranks of one launch. Use as a context manager: leaving it ends every process."""

    def __init__(self, spec: FleetSpec, generation: int) -> None:
        self.spec = spec
        listener = socket.create_server((LOOPBACK, 0))
        self._port = listener.getsockname()[1]
        server = dist.TCPStore(
            LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._generation = generation
        self._store = dist.PrefixStore(f"generation-{generation}", server)
        self._store.set(SPEC_KEY, spec.model_dump_json())
        for key in (FAILURE_KEY, DEATH_KEY):
            self._store.set(key, "")
        self._stopping = threading.Event()
        self._number = READY
        self._agent: subprocess.Popen | None = None
        self._reports: ReportListener | None = None
        self.is_ready = False
        self._num_completed_steps = 0

    def launch(self, timeout_seconds: float) -> None:
        """Start the agent and wait until every rank is ready to train."""
        self._store.add(HEARTBEAT_KEY, 1)
        threading.Thread(target=self._beat, name="fleet-heartbeat", daemon=True).start()
        self._reports = ReportListener(connect_store(LOOPBACK, self._port, self._generation), self.spec.world_size)
        last_rank = self.spec.world_size - 1
        self.spec.log_dir.mkdir(parents=True, exist_ok=True)
        arguments = [LOOPBACK, *map(str, (self._port, os.getpid(), self._generation, 0, last_rank))]
        environment = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHDYNAMO_DISABLE": "1",  # Megatron would compile fusions on import (1.5 s), of which none is used
        }
        with (self.spec.log_dir / "agent.log").open("a") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-W", "ignore::UserWarning", "-m", "training.agent", *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C and a cancellation reach the controller, which saves the last step
            )
        self._collect(READY, timeout_seconds, "get ready")
        self.is_ready = True

    def begin_step(self, plan: StepPlan, learning_rates: Mapping[str, float]) -> None:
        """Publish one step plan and the learning rate of every tenant in it; the ranks start at once."""
        self._send({"kind": "train", "plan": plan.to_json(), "learning_rates": dict(learning_rates)})

    def finish_step(self) -> list[dict]:
        """Reports of all ranks on the step last begun, in rank order."""
        reports = self._collect(self._number, self.spec.step_timeout_seconds, "finish the step")
        self._num_completed_steps += 1
        return reports

    def finish_step_within(self, timeout_seconds: float) -> list[dict] | None:
        """The running step's reports, or None if it does not end in time."""
        try:
            return self._collect(self._number, timeout_seconds, "finish the step")
        except FleetTimeoutError:
            return None

    def evaluate(self, plan: StepPlan) -> list[dict]:
        """Forward only, over the tenants' evaluation rows; reports of all ranks, in rank order. Changes nothing."""
        self._send({"kind": "evaluate", "plan": plan.to_json()})
        return self._collect(self._number, self.spec.step_timeout_seconds, "evaluate")

    def keep_best(self, tenants: Sequence[str]) -> None:
        """Have replica 0 remember these tenants' adapters as they are now; checkpoints hold them from now on."""
        self._send({"kind": "keep_best", "tenants": list(tenants)})
        self._collect(self._number, self.spec.step_timeout_seconds, "keep the best adapters")

    def begin_save(self, folder: Path) -> None:
        """Have replica 0 snapshot the adapters now and write them below `folder` beside training."""
        self._send({"kind": "save", "folder": str(folder)})
        self._collect(self._number, self.spec.step_timeout_seconds, "snapshot")

    def abandon_step(self, folder: Path) -> None:
        """Have replica 0 save the last completed step in the middle of the next one, which nobody will wait for."""
        request = {"name": folder.name, "folder": str(folder), "completed_steps": self._num_completed_steps}
        self._store.set(ABANDON_KEY, json.dumps(request))

    def finish_save(self, folder: Path, timeout_seconds: float) -> None:
        """Wait until the tensors of a begun save are written; for a thread of its own.

        Raises CheckpointError if the disk refused, FleetError if the fleet failed or time ran out.
        """
        store = connect_store(LOOPBACK, self._port, self._generation)
        deadline = time.monotonic() + timeout_seconds
        while not store.check([saved_key(folder.name)]):
            if self._stopping.is_set() or time.monotonic() > deadline:
                raise FleetTimeoutError(f"checkpoint {folder} was not written in time")
            time.sleep(SAVE_POLL_SECONDS)
        answer = json.loads(store.get(saved_key(folder.name)))
        store.delete_key(saved_key(folder.name))
        if "error" in answer:
            raise CheckpointError(f"cannot write checkpoint {folder}: {answer['error']}; free disk space and run again")

    def profile(self, probe: Probe) -> list[dict]:
        """Have all replicas time the same chunks; reports of all ranks, in rank order."""
        self._send({"kind": "profile", "probe": probe.model_dump(mode="json")})
        return self._collect(self._number, self.spec.step_timeout_seconds, "profile")

    def stop(self) -> None:
        """End all processes: ask the ranks when they are idle, kill the agent (and with it the ranks) otherwise."""
        if self._agent is None:
            return
        if self._agent.poll() is None:
            with suppress(FleetError):
                self._send({"kind": "stop"})
                self._collect(self._number, STOP_SECONDS, "stop")
                with suppress(subprocess.TimeoutExpired):
                    self._agent.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all processes now."""
        self._stopping.set()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait()
        if self._reports is not None:
            self._reports.close(self._store)
            self._reports = None

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop() if kind is None else self.kill()

    def _send(self, command: dict) -> None:
        self._number += 1
        self._store.set(command_key(self._number), json.dumps(command))

    def _collect(self, number: int, timeout_seconds: float, what: str) -> list[dict]:
        keys = report_keys(number, self.spec.world_size)
        deadline = time.monotonic() + timeout_seconds
        while not self._have_reported(number, min(FAILURE_POLL_SECONDS, deadline - time.monotonic())):
            self._raise_failure()
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if late and time.monotonic() > deadline:
                raise FleetTimeoutError(
                    f"ranks {late} did not {what} within {timeout_seconds:.0f} s; last lines of rank {late[0]}'s "
                    f"log:\n{self._last_lines(late[0])}"
                )
        if not self._store.check(keys):  # an interrupt came between them and the next command
            raise FleetTimeoutError("the reports on the last command were taken already")
        reports = [json.loads(self._store.get(key)) for key in keys]
        for key in (*keys, command_key(number)):
            self._store.delete_key(key)
        return reports

    def _have_reported(self, number: int, timeout_seconds: float) -> bool:
        assert self._reports is not None, "the fleet was not launched"
        try:
            return self._reports.wait(number, timeout_seconds)
        except ConnectionError as error:
            raise FleetError(str(error)) from error

    def _raise_failure(self) -> None:
        """Raise FleetError if anything failed, InputError if a rank says that what it was given is wrong.

        A rank that was killed is named before the peers that noticed.
        """
        assert self._agent is not None
        if self._agent.poll() is None and not self._store.get(FAILURE_KEY):
            return
        with suppress(subprocess.TimeoutExpired):
            self._agent.wait(STOP_SECONDS)  # it ends as soon as a rank has, and says which
        for key in (DEATH_KEY, FAILURE_KEY):
            message = self._store.get(key)
            if message:
                report = json.loads(message)
                if report.get("is_input_error"):
                    raise InputError(report["message"])
                raise FleetError(f"{report['message']}\n{self._last_lines(report['rank'])}".rstrip())
        raise FleetError(f"the node agent ended with code {self._agent.returncode}; see {self.spec.log_dir}/agent.log")

    def _last_lines(self, rank: int, num_lines: int = 5) -> str:
        path = log_path(self.spec.log_dir, rank)
        return "\n".join(path.read_text().splitlines()[-num_lines:]) if path.exists() else ""

    def _beat(self) -> None:
        store = connect_store(LOOPBACK, self._port, self._generation)
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            store.add(HEARTBEAT_KEY, 1)
