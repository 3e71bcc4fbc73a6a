"""The oracle of the numerics tests, transformers + peft on one tenant alone, and the joint training to compare it with.

Gradients are compared tensor by tensor: the largest difference relative to the tensor's largest entry.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

from data_prep.collate import collate
from data_prep.token_file import TokenFile
from planning.config import Backend
from planning.step_plan import StepPlan
from planning.types import ActivationPolicy, Chunk, ParallelConfig, Replica
from training.adapters import TensorKey, initial_tensor, tensor_keys, tensor_place
from training.base_model import read_base_model
from training.config import ALL_TARGETS, AdapterConfig, BaseModelConfig, OptimiserConfig, TenantConfig
from training.fleet_spec import FleetSpec
from training.layout import FleetLayout
from training.worker import Worker

DTYPE = torch.float32  # that the oracle computes in
ATTENTION = {torch.float32: "eager", torch.float64: "sdpa"}  # the eager one computes its softmax in float32


def tenant(
    name: str, rank: int, alpha: float, targets: tuple[str, ...], optimiser: OptimiserConfig, seed: int
) -> TenantConfig:
    return TenantConfig(
        name=name,
        dataset={"path": "unused", "prompt_column": "p", "response_column": "r"},
        adapter=AdapterConfig(rank=rank, alpha=alpha, target_modules=targets),
        optimiser=optimiser,
        batch_size=4,
        steps=20,
        seed=seed,
    )


def fleet_replicas(configs: tuple[tuple[int, int], ...]) -> tuple[Replica, ...]:
    replicas, first = [], 0
    for index, (tp, pp) in enumerate(configs):
        replicas.append(Replica(index, ParallelConfig(tp, pp), first))
        first += tp * pp
    return tuple(replicas)


def fleet_spec(
    folder: Path,
    token_paths: dict[str, Path],
    configs: tuple[tuple[int, int], ...],
    tenants: tuple[TenantConfig, ...],
    activations: ActivationPolicy = ActivationPolicy(),  # noqa: B008 - frozen
) -> FleetSpec:
    """A fleet over the base model in `folder` that begins with the initial adapters."""
    return FleetSpec(
        replicas=fleet_replicas(configs),
        base_model=BaseModelConfig(path=folder),
        tenants=tenants,
        token_paths=token_paths,
        checkpoint=None,
        num_updates={t.name: 0 for t in tenants},
        backend=Backend.GLOO,
        step_timeout_seconds=60,
        log_dir=folder,
        activations=activations,
    )


def chunks_of(plan: StepPlan, replica: int | None = None) -> list[Chunk]:
    """All chunks of a step, or those of one replica."""
    members = [member for wave in plan.waves for job in wave.jobs for member in job.members]
    return [chunk for member in members if replica in (None, member.replica) for chunk in member.chunks]


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
    """The model with the tenant's adapter, and its parameters by name; with `initial_adapter` `values` do not count."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, attn_implementation=ATTENTION[DTYPE])
    if t.adapter.initial_adapter is not None:
        model = PeftModel.from_pretrained(model, t.adapter.initial_adapter, is_trainable=True)
        return model, adapter_parameters(model)
    config = LoraConfig(r=t.adapter.rank, lora_alpha=t.adapter.alpha, target_modules=list(t.adapter.target_modules))
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
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
        rows = [s.row for chunk in chunks_of(plan) for s in chunk.sequences if s.tenant == t.name]
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


def make_worker(spec: FleetSpec, rank: int) -> Worker:
    """A worker on its own; no controller will ask its saver for anything."""
    return Worker(spec, rank, "cpu", torch.distributed.HashStore())


def set_adapters(worker: Worker, values: dict[str, dict]) -> None:
    """Give every adapter the rank's part of these canonical tensors."""
    stage = worker.stage
    for name, optimiser in worker.optimisers.items():
        for key, parameter in optimiser.adapter.parameters.items():
            parameter.copy_(optimiser.adapter.place(key).to_local(values[name][key], stage.tp, stage.tp_rank))


def gradients_of(worker: Worker, values: dict[str, dict], plan: StepPlan) -> dict:
    """Local gradients after the sync, {(tenant, key): array}, from given start values."""
    set_adapters(worker, values)
    weights = {name: 1 / count for name, count in plan.supervised_tokens.items()}
    chunks = chunks_of(plan, worker.stage.position.replica.index)
    worker.model.forward_backward([collate(chunk, worker.token_files, weights) for chunk in chunks])
    tenants = sorted(plan.supervised_tokens)
    worker.sync(tenants)
    gradients = {
        (name, key): gradient.numpy().copy()
        for name in tenants
        for key, gradient in worker.optimisers[name].adapter.gradients.items()
    }
    for optimiser in worker.optimisers.values():
        optimiser.adapter.clear_gradients()
    return gradients


def worst_gradient_error(ranks: list[dict], wanted: dict, spec: FleetSpec) -> float:
    """Largest relative difference over all tensors on all ranks; a replicated tensor may count on tp rank 0 only."""
    base = read_base_model(spec.base_model)
    layout = FleetLayout(spec.replicas, base.num_layers)
    configs = {t.name: t.adapter for t in spec.tenants}
    worst = 0.0
    for rank, gradients in enumerate(ranks):
        position = layout.position(rank)
        for (name, key), gradient in gradients.items():
            place = tensor_place(base, configs[name], key)
            full = torch.from_numpy(wanted[name][key.peft_name])
            local = place.to_local(full, position.replica.config.tp, position.tp_rank).numpy()
            worst = max(worst, float(np.abs(gradient - local).max() / np.abs(full.numpy()).max()))
    return worst
