"""One rank of the fleet: builds its stage, then carries out the controller's commands in order.

Commands are `train` (one step plan and its learning rates: forward, backward, sync, update, report), `evaluate` (one
plan over held-out rows, forward only), `keep_best` (remember adapters as they are), `save` (snapshot for a checkpoint,
see `saving`), `profile` (time one probe) and `stop`. Every rank answers every command with one report. A rank that
fails reports why and exits; the agent then ends the others.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.collate import CollatedChunk, collate
from data_prep.token_file import TokenFile
from planning.config import Backend
from planning.errors import InputError
from planning.step_plan import StepPlan
from training.adapter_state import CanonicalWriter, Snapshot, load_tenant, take_snapshot
from training.adapters import Adapter, initial_tensor
from training.base_model import read_base_model
from training.config import TenantConfig
from training.fleet_spec import FAILURE_KEY, READY, SPEC_KEY, FleetSpec, command_key, log_path, report_key
from training.gradient_sync import GradientSync
from training.layout import FleetLayout, Stage
from training.megatron_model import ReplicaModel, create_replica_groups
from training.optimiser import JointOptimiser, TenantOptimiser
from training.probe import Probe, run_probe
from training.processes import FOREVER, connect_store
from training.saving import BackgroundSaver
from training.step_trace import StepTracer


class Worker:
    """State of one rank: its stage of the model, the tenants' adapters and optimisers."""

    def __init__(self, spec: FleetSpec, rank: int, device: str, saver_store: dist.Store) -> None:
        self.rank = rank
        base = read_base_model(spec.base_model)
        layout = FleetLayout(spec.replicas, base.num_layers)
        self.stage = Stage(base, layout, rank, device, spec.activations)
        groups = create_replica_groups(layout, rank, dist.get_backend())
        control_group = dist.group.WORLD if device == "cpu" else dist.new_group(backend="gloo")
        self.optimisers = {tenant.name: _tenant_optimiser(spec, tenant, self.stage) for tenant in spec.tenants}
        adapters = {name: optimiser.adapter for name, optimiser in self.optimisers.items()}
        self.model = ReplicaModel(self.stage, groups, adapters, spec.base_model.dtype)
        self.sync = GradientSync(self.stage, adapters)
        self.optimiser = JointOptimiser(self.optimisers, self.stage, control_group)
        self.writer = CanonicalWriter(self.stage, adapters, dist.new_group(backend="gloo"))
        self.saver = BackgroundSaver(self.writer, self.snapshot, saver_store)
        self.tracer = StepTracer(spec.trace_steps, spec.log_dir, rank, device)
        self.token_files = {name: TokenFile(path) for name, path in spec.token_paths.items()}
        self.evaluation_files = {name: TokenFile(path) for name, path in spec.evaluation_paths.items()}

    def train(self, plan: StepPlan, learning_rates: Mapping[str, float]) -> dict:
        """One step. The report: seconds of forward and backward, of sync and update (with waiting), losses, updates."""
        replica = self.stage.position.replica.index
        with self.tracer.step(plan.step):
            start = time.perf_counter()
            with self.tracer.phase("forward and backward"):
                losses = self.model.forward_backward(self._collated(plan, self.token_files))
            computed = time.perf_counter()
            with self.tracer.phase("gradient sync"):
                self.sync(sorted(plan.supervised_tokens))
            with self.tracer.phase("update"), self.saver.lock:
                updates = self.optimiser.step(learning_rates)
                self.saver.completed_steps += 1
            ended = time.perf_counter()
        return {
            "replica": replica,
            "busy_seconds": computed - start,
            "sync_seconds": ended - computed,
            "losses": losses if self.stage.position.reports_loss else {},
            "updates": {name: asdict(update) for name, update in updates.items()},
        }

    @torch.no_grad()
    def evaluate(self, plan: StepPlan) -> dict:
        """Weighted losses of the adapters as they are, on held-out rows. No gradient is computed, nothing changes."""
        losses = self.model.forward_backward(self._collated(plan, self.evaluation_files), forward_only=True)
        return {"losses": losses if self.stage.position.reports_loss else {}}

    def keep_best(self, tenants: Sequence[str]) -> dict:
        """Remember adapters as they are, on the ranks that write checkpoints."""
        if self.stage.position.replica.index == 0:
            with self.saver.lock:
                for tenant in tenants:
                    self.optimisers[tenant].adapter.keep_best()
        return {}

    def _collated(self, plan: StepPlan, token_files: Mapping[str, TokenFile]) -> list[CollatedChunk]:
        """This replica's chunks of a plan."""
        loss_weights = {tenant: 1.0 / count for tenant, count in plan.supervised_tokens.items()}
        chunks = plan.chunks_of(self.stage.position.replica.index)
        return [collate(chunk, token_files, loss_weights) for chunk in chunks]

    def snapshot(self) -> Snapshot:
        """Copies of what this rank owns."""
        return take_snapshot(self.optimisers, self.stage)

    def save(self, folder: Path) -> dict:
        """Snapshot for a checkpoint; replica 0 writes it below `folder` while training goes on."""
        if self.stage.position.replica.index == 0:
            self.saver.save(folder.name, folder)
        return {}

    def serve(self, store: dist.Store) -> None:
        """Answer commands until told to stop."""
        store.set(report_key(READY, self.rank), "{}")
        number = READY
        command = {"kind": "ready"}
        while command["kind"] != "stop":
            number += 1
            store.wait([command_key(number)], FOREVER)  # the agent ends ranks whose controller is gone
            command = json.loads(store.get(command_key(number)))
            report = self._carry_out(command)
            store.set(report_key(number, self.rank), json.dumps(report))

    def _carry_out(self, command: dict) -> dict:
        match command["kind"]:
            case "train":
                return self.train(StepPlan.from_json(command["plan"]), command["learning_rates"])
            case "evaluate":
                return self.evaluate(StepPlan.from_json(command["plan"]))
            case "keep_best":
                return self.keep_best(command["tenants"])
            case "save":
                return self.save(Path(command["folder"]))
            case "profile":
                return run_probe(self, Probe.model_validate(command["probe"]))
            case "stop":
                self.saver.close()
                return {}
            case unknown:
                raise ValueError(f"unknown command {unknown!r}")


def _tenant_optimiser(spec: FleetSpec, tenant: TenantConfig, stage: Stage) -> TenantOptimiser:
    if spec.checkpoint is not None:
        return load_tenant(spec.checkpoint, tenant, spec.num_updates[tenant.name], stage)
    adapter = Adapter(tenant.name, tenant.adapter, stage, lambda key: initial_tensor(stage.base, tenant, key))
    return TenantOptimiser(adapter, tenant.optimiser)


def join_world(spec: FleetSpec, store: dist.Store, rank: int, local_rank: int) -> str:
    """Join the fleet's world; returns this rank's device. `auto` takes NCCL where CUDA is, else gloo on the CPU."""
    use_nccl = spec.backend is Backend.NCCL or (spec.backend is Backend.AUTO and torch.cuda.is_available())
    device = f"cuda:{local_rank}" if use_nccl else "cpu"
    if use_nccl:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if use_nccl else "gloo",
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=spec.step_timeout_seconds),
    )
    return device


def run_rank(host: str, port: int, generation: int, rank: int, local_rank: int) -> int:
    """Life of one rank, from connecting to its exit code. Called in a fresh fork of the agent."""
    store = connect_store(host, port, generation)
    spec = FleetSpec.model_validate_json(store.get(SPEC_KEY))
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    with log_path(spec.log_dir, rank).open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        device = join_world(spec, store, rank, local_rank)
        Worker(spec, rank, device, connect_store(host, port, generation)).serve(store)
    except Exception as error:  # noqa: BLE001 - the rim of the process: everything is reported, nothing continues
        traceback.print_exc()
        is_input_error = isinstance(error, InputError)
        message = str(error) if is_input_error else f"rank {rank}: {type(error).__name__}: {error}"
        failure = {"rank": rank, "message": message, "is_input_error": is_input_error}
        with contextlib.suppress(RuntimeError):  # the store is gone with its controller
            store.compare_set(FAILURE_KEY, "", json.dumps(failure))
        return 1
    return 0
