"""Base models, tenants and fleets of the training benchmarks: one thread per rank, costs as on two CPU cores."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.names import folder_name
from data_prep.token_file import TokenFile, write_token_file
from data_prep.types import EncodedSequence
from planning.config import Backend, Batching, ClusterConfig, PlannerConfig
from planning.dispatch import Dispatcher
from planning.step_plan import StepPlan
from planning.strategies import Phase
from planning.types import Candidate, DeploymentPlan, ParallelConfig, ReplicaGroup
from training.checkpoint import adapter_file
from training.config import ALL_TARGETS, BaseModelConfig, TenantConfig, TrainingConfig
from training.fleet import Fleet
from training.fleet_spec import FleetSpec
from training.request import TrainingFiles, TrainingRequest
from training.step_planner import StepPlanner

VOCAB = 1024


@dataclass(frozen=True)
class TenantShape:
    """A tenant's adapter rank, batch size and the lengths (tokens) of its rows."""

    rank: int
    batch_size: int
    lengths: list[int]


@dataclass(frozen=True)
class Joint:
    """Tenants on a fleet: what its launch and its step plans need."""

    folder: Path
    model: Path
    tenants: tuple[TenantConfig, ...]
    token_paths: dict[str, Path]
    plan: DeploymentPlan

    @property
    def candidates(self) -> dict[ParallelConfig, Candidate]:
        """Costs as measured on one core for 4 layers x 256; the plan of a step needs no better ones."""
        configs = {group.config for group in self.plan.groups}
        return {
            config: Candidate(config, 1024, 1.3e-2, 2.6e-4 / config.num_gpus, 1.3e-7 / config.num_gpus)
            for config in configs
        }

    @property
    def spec(self) -> FleetSpec:
        return FleetSpec(
            replicas=self.plan.replicas,
            base_model=BaseModelConfig(path=self.model),
            tenants=self.tenants,
            token_paths=self.token_paths,
            checkpoint=None,
            num_updates={t.name: 0 for t in self.tenants},
            backend=Backend.GLOO,
            step_timeout_seconds=120,
            log_dir=self.folder / "logs",
        )

    @property
    def planner(self) -> StepPlanner:
        files = {name: TokenFile(path) for name, path in self.token_paths.items()}
        dispatcher = Dispatcher(self.plan.replicas, self.candidates, 16, 2000, Batching.PACKED)
        return StepPlanner(self.plan, self.candidates, dispatcher, files, {})

    def request(self, name: str, num_steps: int, **training: object) -> TrainingRequest:
        """The same training through the controller, in a folder of its own."""
        root = self.folder / name
        root.mkdir()
        return TrainingRequest(
            files=TrainingFiles(
                root / "checkpoints", root / "steps.jsonl", root / "plans.jsonl", root / "logs", root / "control.json"
            ),
            base_model=BaseModelConfig(path=self.model),
            tenants=tuple(t.model_copy(update={"steps": num_steps}) for t in self.tenants),
            token_paths=self.token_paths,
            phases=(Phase(tuple(t.name for t in self.tenants), self.plan),),
            candidates=tuple(self.candidates.values()),
            cluster=ClusterConfig(num_gpus=self.plan.num_gpus),
            planner=PlannerConfig(batching=Batching.PACKED),
            training=TrainingConfig(**training),
        )


class RunningFleet:
    """Trains the first steps again and again, planning each while the one before runs, as the controller does."""

    def __init__(self, joint: Joint, fleet: Fleet, num_steps: int) -> None:
        self.joint, self.fleet, self.num_steps = joint, fleet, num_steps
        self.planner = joint.planner
        self.learning_rates = {tenant.name: tenant.optimiser.learning_rate for tenant in joint.tenants}

    def plan(self, step: int) -> StepPlan:
        return self.planner.plan_step(step, step, self.joint.tenants).plan

    def train(self) -> None:
        plan = self.plan(0)
        for step in range(self.num_steps):
            self.fleet.begin_step(plan, self.learning_rates)
            plan = self.plan((step + 1) % self.num_steps)
            self.fleet.finish_step()

    def timed_step(self) -> tuple[float, list[dict]]:
        """Wall seconds and the ranks' reports of step 0."""
        plan, start = self.plan(0), time.perf_counter()
        self.fleet.begin_step(plan, self.learning_rates)
        reports = self.fleet.finish_step()
        return time.perf_counter() - start, reports

    def adapters(self) -> dict[str, dict[str, np.ndarray]]:
        """What the fleet holds now, by tenant and peft's names."""
        folder = self.joint.folder / "saved"
        for part in ("adapters", "optimiser"):
            (folder / part).mkdir(parents=True)
        self.fleet.begin_save(folder)
        self.fleet.finish_save(folder, 60)
        return {t.name: load_file(adapter_file(folder, folder_name(t.name))) for t in self.joint.tenants}


@pytest.fixture
def running() -> Callable[..., Iterator[RunningFleet]]:
    """`with running(joint, num_steps) as fleet`: the launched fleet."""

    @contextmanager
    def launch(joint: Joint, num_steps: int) -> Iterator[RunningFleet]:
        with Fleet(joint.spec, 1) as fleet:
            fleet.launch(120)
            yield RunningFleet(joint, fleet, num_steps)

    return launch


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[[int, int], Path]:
    """`save_model(hidden_size, num_layers)`: a random Llama with grouped queries."""

    def save(hidden_size: int, num_layers: int) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 11 // 4,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
        folder = tmp_path / f"model-{hidden_size}-{num_layers}"
        if not folder.exists():
            model = LlamaForCausalLM(config)
            with torch.no_grad():  # gradients that AdamW can tell from rounding, so that adapters can be compared
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(3)
            model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def make_joint(tmp_path: Path, save_model: Callable[[int, int], Path]) -> Callable[..., Joint]:
    """`make_joint(name, shapes, groups, hidden_size, num_layers)`: tenants of random tokens on given replicas.

    All seven targets; the first quarter of every sequence is not supervised.
    """

    def make(
        name: str,
        shapes: list[TenantShape],
        groups: tuple[tuple[ParallelConfig, int], ...],
        hidden_size: int = 256,
        num_layers: int = 4,
    ) -> Joint:
        folder = tmp_path / name
        folder.mkdir()
        tenants, paths = [], {}
        for index, shape in enumerate(shapes):
            adapter = {"rank": shape.rank, "alpha": 2 * shape.rank, "target_modules": list(ALL_TARGETS)}
            tenants.append(
                TenantConfig(
                    name=f"{name} {index}",
                    dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
                    adapter=adapter,
                    optimiser={"learning_rate": 1e-3},
                    batch_size=shape.batch_size,
                    steps=1000,
                    seed=index,
                )
            )
            paths[tenants[-1].name] = _save_tokens(folder / f"{index}.arrow", shape.lengths, index)
        plan = DeploymentPlan(
            groups=tuple(ReplicaGroup(config, count) for config, count in groups),
            num_gpus=sum(config.num_gpus * count for config, count in groups),
            predicted_step_seconds=1.0,
            lower_bound_seconds=1.0,
            solve_seconds=0.0,
            tenant_gpu_seconds={},
            pruned=(),
            alternatives=(),
        )
        return Joint(folder, save_model(hidden_size, num_layers), tuple(tenants), paths, plan)

    return make


@pytest.fixture
def equal_tenants() -> Callable[..., list[TenantShape]]:
    """`equal_tenants(num_tenants, num_sequences, length, rank)`: they share the sequences of a step evenly."""

    def shapes(num_tenants: int, num_sequences: int, length: int, rank: int) -> list[TenantShape]:
        own = num_sequences // num_tenants
        return [TenantShape(rank, own, [length] * own) for _ in range(num_tenants)]

    return shapes


@pytest.fixture
def six_tenants() -> list[TenantShape]:
    """Ranks 4 to 64; lognormal lengths, medians 40 to 320 tokens, at most 1,024."""
    rng = np.random.default_rng(5)
    drawn = [(4, 40, 24), (8, 60, 16), (16, 90, 12), (16, 140, 8), (32, 200, 6), (64, 320, 4)]
    return [
        TenantShape(
            rank, batch_size, np.clip(np.exp(rng.normal(np.log(median), 0.7, 64)), 8, 1024).astype(int).tolist()
        )
        for rank, median, batch_size in drawn
    ]


@pytest.fixture(autouse=True)
def _two_cores() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks need two cores")


def _save_tokens(path: Path, lengths: list[int], seed: int) -> Path:
    rng = np.random.default_rng(seed)
    sequences = [
        EncodedSequence(tuple(rng.integers(0, VOCAB, n).tolist()), ((max(1, n // 4), n),), source_row=row + 1)
        for row, n in enumerate(lengths)
    ]
    write_token_file(path, sequences)
    return path
