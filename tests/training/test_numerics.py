"""PEFT is the oracle: joint training on unequal replicas gives every tenant what training alone gives.

Tolerances are those of DESIGN.md's numerics contract.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

from data_prep.collate import CollatedChunk, collate
from data_prep.token_file import TokenFile
from planning.config import Backend, Batching
from planning.step_plan import Job, JobMember, StepPlan, Wave
from planning.types import Chunk, ParallelConfig, Replica, SequenceRef
from training import megatron_model, multi_lora
from training.adapters import TensorKey, initial_tensor, tensor_keys
from training.base_model import read_base_model
from training.config import ALL_TARGETS, AdapterConfig, BaseModelConfig, OptimiserConfig, TenantConfig
from training.fleet_spec import FleetSpec
from training.gradient_sync import GradientSync
from training.initial_adapter import check_initial_adapter
from training.layout import FleetLayout
from training.schedule import learning_rate
from training.worker import Worker

UNEQUAL = ((2, 1), (1, 2), (1, 1))
LENGTHS = [33, 17, 50, 9, 21, 40, 12, 28, 19, 45]


def tenant(
    name: str, rank: int, alpha: float, targets: tuple[str, ...], optimiser: OptimiserConfig, seed: int
) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter=AdapterConfig(rank=rank, alpha=alpha, target_modules=targets),
        optimiser=optimiser,
        batch_size=4,
        steps=10,
        seed=seed,
    )


BERT = OptimiserConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=3, weight_decay=0.01, max_grad_norm=0.5)
TENANTS = (
    tenant("anna", 4, 8, ("q_proj", "v_proj"), OptimiserConfig(learning_rate=3e-3, schedule="linear"), 1),
    tenant("bert", 8, 16, ALL_TARGETS, BERT, 2),
    tenant("carl", 2, 16, ("o_proj", "down_proj", "up_proj"), OptimiserConfig(learning_rate=1e-2, beta2=0.95), 3),
    tenant("dora", 4, 4, ("gate_proj", "k_proj"), OptimiserConfig(learning_rate=2e-3), 4),
)


def fleet_replicas(configs: tuple[tuple[int, int], ...]) -> tuple[Replica, ...]:
    replicas, first = [], 0
    for index, (tp, pp) in enumerate(configs):
        replicas.append(Replica(index, ParallelConfig(tp, pp), first))
        first += tp * pp
    return tuple(replicas)


@pytest.fixture
def token_paths(token_path: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    return {t.name: token_path(tmp_path, t.name, LENGTHS[i:] + LENGTHS[:i], seed=10 + i) for i, t in enumerate(TENANTS)}


def rows_of(step: int, index: int) -> list[int]:
    """Rows of tenant `index` in a step: uneven numbers; dora sits out the even steps."""
    if index == 3 and step % 2 == 0:
        return []
    return [(3 * step + 2 * index + k) % len(LENGTHS) for k in range(2 + (step + index) % 3)]


def step_plans(
    token_paths: dict[str, Path], num_replicas: int, num_steps: int, batching: Batching = Batching.PADDED
) -> list[StepPlan]:
    """Hand-made dispatches that mix tenants in chunks; in every third step the second replica gets nothing."""
    packed = batching is Batching.PACKED
    files = {name: TokenFile(path) for name, path in token_paths.items()}
    plans = []
    for step in range(num_steps):
        sequences, supervised = [], {}
        for index, t in enumerate(TENANTS):
            rows = rows_of(step, index)
            if rows:
                supervised[t.name] = sum(int(files[t.name].num_supervised_tokens[row]) for row in rows)
                sequences += [SequenceRef(t.name, row, int(files[t.name].num_tokens[row])) for row in rows]
        sequences = sequences[step % 5 :] + sequences[: step % 5]
        open_replicas = [r for r in range(num_replicas) if not (r == 1 and step % 3 == 2)]
        jobs = []
        for position, replica in enumerate(open_replicas):
            mine = sequences[position :: len(open_replicas)]
            groups = [sorted(mine[i : i + 3]) for i in range(0, len(mine), 3)]
            chunks = tuple(Chunk(tuple(g), None if packed else max(s.num_tokens for s in g) + 2) for g in groups)
            jobs.append(Job((JobMember(replica, chunks),)))
        plans.append(StepPlan(step, (Wave(tuple(jobs)),), supervised))
    return plans


def joint_steps(plans: list[StepPlan]) -> Iterator[tuple[StepPlan, dict[str, float]]]:
    """Every step with its tenants' learning rates, which follow from each tenant's own number of steps."""
    num_done = dict.fromkeys((t.name for t in TENANTS), 0)
    for plan in plans:
        in_step = [t for t in TENANTS if t.name in plan.supervised_tokens]
        yield plan, {t.name: learning_rate(t.optimiser, num_done[t.name], t.steps) for t in in_step}
        num_done |= {t.name: num_done[t.name] + 1 for t in in_step}


def fleet_spec(folder: Path, token_paths: dict[str, Path], configs: tuple[tuple[int, int], ...]) -> FleetSpec:
    return FleetSpec(
        replicas=fleet_replicas(configs),
        base_model=BaseModelConfig(path=folder),
        tenants=TENANTS,
        token_paths=token_paths,
        checkpoint=None,
        num_updates={t.name: 0 for t in TENANTS},
        backend=Backend.GLOO,
        step_timeout_seconds=60,
        log_dir=folder,
    )


def start_values(folder: Path, t: TenantConfig, b_scale: float) -> dict[TensorKey, torch.Tensor]:
    """The initial adapter; with `b_scale` B is not zero, so that A has a gradient at once."""
    base = read_base_model(BaseModelConfig(path=folder))
    values = {}
    for key in tensor_keys(t.adapter, range(base.num_layers)):
        values[key] = initial_tensor(base, t, key)
        if key.matrix == "B" and b_scale:
            generator = torch.Generator().manual_seed(hash((t.seed, key.layer, ALL_TARGETS.index(key.target))) % 2**31)
            values[key] = torch.randn(values[key].shape, generator=generator) * b_scale
    return values


def adapter_parameters(model) -> dict[str, torch.nn.Parameter]:
    """LoRA parameters by the names that peft saves them under."""
    return {name.replace(".default", ""): parameter for name, parameter in model.named_parameters() if "lora_" in name}


def peft_model(folder: Path, t: TenantConfig, values: dict[TensorKey, torch.Tensor]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if t.adapter.initial_adapter is not None:
        model = PeftModel.from_pretrained(model, t.adapter.initial_adapter, is_trainable=True)
        return model, adapter_parameters(model)
    config = LoraConfig(r=t.adapter.rank, lora_alpha=t.adapter.alpha, target_modules=list(t.adapter.target_modules))
    model = get_peft_model(model, config)
    named = adapter_parameters(model)
    assert set(named) == {key.peft_name for key in values}
    with torch.no_grad():
        for key, value in values.items():
            named[key.peft_name].copy_(value)
    return model, named


def peft_alone(
    folder: Path, t: TenantConfig, path: Path, plans: list[StepPlan], b_scale: float, num_updates: int
) -> dict:
    """Train one tenant alone with transformers + peft; its adapter, or with 0 updates the first gradient."""
    model, named = peft_model(folder, t, start_values(folder, t, b_scale))
    o = t.optimiser
    adamw = torch.optim.AdamW(
        named.values(), lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )
    scheduler = get_scheduler(o.schedule.value, adamw, o.warmup_steps, t.steps)
    tokens, losses = TokenFile(path), []
    for plan in plans:
        rows = [
            s.row
            for w in plan.waves
            for j in w.jobs
            for m in j.members
            for c in m.chunks
            for s in c.sequences
            if s.tenant == t.name
        ]
        if not rows:
            continue
        total = 0.0
        for row in rows:
            sequence = tokens.row(row)
            ids = torch.from_numpy(sequence.input_ids.astype(np.int64))
            supervised = torch.zeros(len(ids), dtype=torch.bool)
            for start, end in sequence.loss_spans:
                supervised[start:end] = True
            logits = model(ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits[supervised[1:]], ids[1:][supervised[1:]], reduction="sum")
            loss = loss / plan.supervised_tokens[t.name]
            loss.backward()
            total += loss.item()
        losses.append(total)
        if num_updates == 0:
            return {name: parameter.grad.numpy() for name, parameter in named.items()}
        if o.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(named.values(), o.max_grad_norm)
        adamw.step()
        scheduler.step()
        adamw.zero_grad()
    return {"losses": losses, **{name: parameter.detach().numpy() for name, parameter in named.items()}}


def joint_adapters(spec: FleetSpec, plans: list[StepPlan]) -> Callable[[int], dict]:
    def on_rank(rank: int) -> dict:
        worker = make_worker(spec, rank)
        losses: dict[str, list[float]] = {}
        for plan, learning_rates in joint_steps(plans):
            report = worker.train(plan, learning_rates)
            for name, loss in report["losses"].items():
                losses.setdefault(name, []).append((plan.step, loss))
        collected = {}
        if worker.stage.position.replica.index == 0:
            for name, owned in worker.snapshot().items():
                tensors = worker.writer.collect(name, owned)
                if tensors is not None:
                    collected[name] = {k.peft_name: v.numpy() for (k, kind), v in tensors.items() if kind == "weight"}
        return {"losses": losses, "adapters": collected}

    return on_rank


def assert_same_adapter(got: dict, want: dict, start: dict, peak_rate: float) -> None:
    """DESIGN.md: max abs difference <= 2e-2 x lr, relative Frobenius of the update <= 1e-4, moved >= 10 x lr in all."""
    difference = np.sqrt(sum(np.square(got[n] - want[n]).sum() for n in got))
    update = np.sqrt(sum(np.square(want[n] - start[n]).sum() for n in got))
    assert max(np.abs(got[n] - want[n]).max() for n in got) <= 2e-2 * peak_rate
    assert difference / update <= 1e-4
    assert update >= 10 * peak_rate


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_gradients_on_unequal_replicas_equal_peft(architecture, base_model_folder, token_paths, run_ranks) -> None:
    folder = base_model_folder(architecture)
    spec = fleet_spec(folder, token_paths, UNEQUAL)
    plans = [step_plans(token_paths, len(UNEQUAL), 2, batching)[1] for batching in Batching]
    values = {t.name: start_values(folder, t, 0.05) for t in TENANTS}

    def on_rank(rank: int) -> list[dict]:
        worker = make_worker(spec, rank)
        return [gradients_of(worker, values, plan) for plan in plans]

    ranks = run_ranks(spec.world_size, on_rank)
    layout = FleetLayout(spec.replicas, 4)
    wanted = run_ranks(
        1, lambda _: {t.name: peft_alone(folder, t, token_paths[t.name], plans[:1], 0.05, 0) for t in TENANTS}
    )[0]
    for number, batching in enumerate(Batching):
        error = worst_gradient_error([rank[number] for rank in ranks], wanted, layout, folder)
        assert error <= 1e-5, batching


def gradients_of(worker: Worker, values: dict[str, dict], plan: StepPlan) -> dict:
    """Local gradients after the sync, {(tenant, key): array}, from given start values."""
    stage = worker.stage
    set_adapters(worker, values)
    weights = {name: 1 / count for name, count in plan.supervised_tokens.items()}
    chunks = [
        c
        for w in plan.waves
        for j in w.jobs
        for m in j.members
        if m.replica == stage.position.replica.index
        for c in m.chunks
    ]
    worker.model.forward_backward([collate(chunk, worker.token_files, weights) for chunk in chunks])
    tenants = sorted(plan.supervised_tokens)
    worker.sync(tenants)
    gradients = {
        (name, key): parameter.grad.numpy().copy()
        for name in tenants
        for key, parameter in worker.optimisers[name].adapter.parameters.items()
    }
    for optimiser in worker.optimisers.values():
        optimiser.adapter.clear_gradients()
    return gradients


def worst_gradient_error(ranks: list[dict], wanted: dict, layout: FleetLayout, folder: Path) -> float:
    """Largest relative difference over all tensors on all ranks; a replicated tensor may count on tp rank 0 only."""
    from training.adapters import tensor_place

    base = read_base_model(BaseModelConfig(path=folder))
    configs = {t.name: t.adapter for t in TENANTS}
    worst = 0.0
    for rank, gradients in enumerate(ranks):
        position = layout.position(rank)
        for (name, key), gradient in gradients.items():
            place = tensor_place(base, configs[name], key)
            full = torch.from_numpy(wanted[name][key.peft_name])
            local = place.to_local(full, position.replica.config.tp, position.tp_rank).numpy()
            worst = max(worst, float(np.abs(gradient - local).max() / np.abs(full.numpy()).max()))
    return worst


@pytest.mark.parametrize(
    ("architecture", "configs", "batching"),
    [
        ("llama", UNEQUAL, Batching.PADDED),
        ("llama", UNEQUAL, Batching.PACKED),
        ("qwen2", UNEQUAL, Batching.PACKED),
        ("qwen3", UNEQUAL, Batching.PADDED),
        ("llama", ((4, 1), (2, 2)), Batching.PACKED),
        ("llama", ((1, 4), (1, 1)), Batching.PACKED),
        ("llama", ((1, 1),), Batching.PADDED),
    ],
)
def test_adapters_after_ten_joint_steps_equal_peft_alone(
    architecture, configs, batching, base_model_folder, token_paths, run_ranks
) -> None:
    folder = base_model_folder(architecture)
    spec = fleet_spec(folder, token_paths, configs)
    plans = step_plans(token_paths, len(configs), 10, batching)
    ranks = run_ranks(spec.world_size, joint_adapters(spec, plans))

    def oracle(_: int) -> dict:
        return {t.name: peft_alone(folder, t, token_paths[t.name], plans, 0.0, 10) for t in TENANTS}

    wanted = run_ranks(1, oracle)[0]
    for t in TENANTS:
        got = ranks[0]["adapters"][t.name]
        want = {name: value for name, value in wanted[t.name].items() if name != "losses"}
        start = {key.peft_name: value.numpy() for key, value in start_values(folder, t, 0.0).items()}
        assert_same_adapter(got, want, start, t.optimiser.learning_rate)
        steps: dict[int, float] = {}
        for rank in ranks:
            for step, loss in rank["losses"].get(t.name, []):
                steps[step] = steps.get(step, 0.0) + loss
        assert [steps[step] for step in sorted(steps)] == pytest.approx(wanted[t.name]["losses"], rel=1e-5)


def test_evaluation_loss_on_unequal_replicas_equals_peft_and_changes_nothing(
    base_model_folder, token_paths, run_ranks
) -> None:
    folder = base_model_folder("llama")
    spec = fleet_spec(folder, token_paths, UNEQUAL).model_copy(update={"evaluation_paths": token_paths})
    plans = [step_plans(token_paths, len(UNEQUAL), 2, batching)[1] for batching in Batching]
    values = {t.name: start_values(folder, t, 0.05) for t in TENANTS}

    def on_rank(rank: int) -> list[dict]:
        worker = make_worker(spec, rank)
        set_adapters(worker, values)
        before = local_state(worker)
        losses = [worker.evaluate(plan)["losses"] for plan in plans]
        assert all(np.array_equal(before[item], value) for item, value in local_state(worker).items())
        for optimiser in worker.optimisers.values():
            assert not optimiser.adamw.state
            assert all(parameter.grad is None for parameter in optimiser.adapter.parameters.values())
        return losses

    def oracle(_: int) -> dict:
        return {t.name: peft_alone(folder, t, token_paths[t.name], plans[:1], 0.05, 1)["losses"][0] for t in TENANTS}

    ranks, wanted = run_ranks(spec.world_size, on_rank), run_ranks(1, oracle)[0]
    for number in range(len(plans)):
        losses = {name: sum(rank[number].get(name, 0.0) for rank in ranks) for name in wanted}
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_tenants_that_continue_from_peft_folders_equal_peft_continuing_from_them(
    base_model_folder, token_paths, run_ranks, tmp_path: Path
) -> None:
    folder = base_model_folder("llama")
    starts = {t.name: start_values(folder, t, 0.05) for t in TENANTS}
    continued = {t.name: continuing(t, tmp_path / "before" / t.name) for t in TENANTS if t.name != "anna"}

    def save_with_peft(_: int) -> None:
        for t in TENANTS:
            if t.name in continued:
                peft_model(folder, t, starts[t.name])[0].save_pretrained(tmp_path / "before" / t.name)

    run_ranks(1, save_with_peft)
    base = read_base_model(BaseModelConfig(path=folder))
    for t in continued.values():
        check_initial_adapter(t.name, t.adapter, base)
    configs = ((2, 1), (1, 1))
    spec = fleet_spec(folder, token_paths, configs)
    spec = spec.model_copy(update={"tenants": tuple(continued.get(t.name, t) for t in TENANTS)})
    plans = step_plans(token_paths, len(configs), 10)
    ranks = run_ranks(spec.world_size, joint_adapters(spec, plans))
    wanted = run_ranks(
        1, lambda _: {t.name: peft_alone(folder, t, token_paths[t.name], plans, 0.0, 10) for t in spec.tenants}
    )[0]
    for t in spec.tenants:
        values = starts[t.name] if t.name in continued else start_values(folder, t, 0.0)
        start = {key.peft_name: value.numpy() for key, value in values.items()}
        want = {name: value for name, value in wanted[t.name].items() if name != "losses"}
        assert_same_adapter(ranks[0]["adapters"][t.name], want, start, t.optimiser.learning_rate)


def continuing(t: TenantConfig, initial_adapter: Path) -> TenantConfig:
    return t.model_copy(update={"adapter": t.adapter.model_copy(update={"initial_adapter": initial_adapter})})


def test_one_tenants_nan_changes_nothing_for_the_others(base_model_folder, token_paths, run_ranks) -> None:
    folder = base_model_folder("llama")
    spec = fleet_spec(folder, token_paths, ((2, 1), (1, 2)))
    plans = step_plans(token_paths, 2, 4)

    def poisoned(rank: int) -> dict:
        worker = make_worker(spec, rank)
        skips = []
        for plan, learning_rates in joint_steps(plans):
            if plan.step == 2:  # bert's weights overflow from here on, on every rank
                for parameter in worker.optimisers["bert"].adapter.parameters.values():
                    parameter.data.fill_(float("nan"))
            updates = worker.train(plan, learning_rates)["updates"]
            skips.append([name for name, update in updates.items() if update["skipped"]])
        return {"skips": skips, "adapters": local_state(worker)}

    def healthy(rank: int) -> dict:
        worker = make_worker(spec, rank)
        for plan, learning_rates in joint_steps(plans):
            worker.train(plan, learning_rates)
        return {"adapters": local_state(worker)}

    for bad, good in zip(run_ranks(4, poisoned), run_ranks(4, healthy), strict=True):
        assert bad["skips"] == [[], [], ["bert"], ["bert"]]
        for (name, key), value in good["adapters"].items():
            if name != "bert":
                assert np.array_equal(bad["adapters"][name, key], value), (name, key)


def set_adapters(worker: Worker, values: dict[str, dict]) -> None:
    """Give every adapter the rank's part of these canonical tensors."""
    stage = worker.stage
    with torch.no_grad():
        for name, optimiser in worker.optimisers.items():
            for key, parameter in optimiser.adapter.parameters.items():
                parameter.copy_(optimiser.adapter.place(key).to_local(values[name][key], stage.tp, stage.tp_rank))


def make_worker(spec: FleetSpec, rank: int) -> Worker:
    """A worker on its own; no controller will ask its saver for anything."""
    return Worker(spec, rank, "cpu", torch.distributed.HashStore())


def local_state(worker: Worker) -> dict:
    return {
        (name, key): parameter.detach().numpy().copy()
        for name, optimiser in worker.optimisers.items()
        for key, parameter in optimiser.adapter.parameters.items()
    }


def test_planted_faults_break_the_gradients(base_model_folder, token_paths, run_ranks, monkeypatch) -> None:
    folder = base_model_folder("llama")
    spec = fleet_spec(folder, token_paths, UNEQUAL)
    plan = step_plans(token_paths, len(UNEQUAL), 2, Batching.PACKED)[1]
    values = {t.name: start_values(folder, t, 0.05) for t in TENANTS}
    wanted = run_ranks(
        1, lambda _: {t.name: peft_alone(folder, t, token_paths[t.name], [plan], 0.05, 0) for t in TENANTS}
    )[0]

    def error() -> float:
        ranks = run_ranks(spec.world_size, lambda rank: gradients_of(make_worker(spec, rank), values, plan))
        return worst_gradient_error(ranks, wanted, FleetLayout(spec.replicas, 4), folder)

    with monkeypatch.context() as no_all_reduce:
        backward = staticmethod(lambda _context, *gradients: (None, *gradients))
        no_all_reduce.setattr(multi_lora._CopyToTensorParallel, "backward", backward)
        assert error() > 1e-2
    with monkeypatch.context() as counted_per_rank:
        counted_per_rank.setattr(GradientSync, "contributes_replicated", True)
        assert error() > 1e-2
    with monkeypatch.context() as across_segments:
        honest = megatron_model._chunk_params

        def one_segment(chunk: CollatedChunk, device: str) -> megatron_model.LoraChunkParams:
            return dataclasses.replace(honest(chunk, device), segments=(sum(chunk.segments),))

        across_segments.setattr(megatron_model, "_chunk_params", one_segment)
        assert error() > 1e-2
    assert error() <= 1e-5
