"""Analytic profiles: model and GPU sizes in, layer costs and largest chunks out. Unvalidated unless said otherwise.

Per layer, forward and backward, with frozen base weights (no weight gradients), on tp GPUs:

    fixed  launches + reading the weights twice + a start-up per all-reduce
    b      2 forward and 2 backward flops per parameter, and 4 ring all-reduces of the hidden state over NVLink
    c      flash attention, causal: 2 l^2 hidden flops forward, 2.5 times that backward

Activation recompute runs the forward again: half as much more fixed seconds, flops and all-reduces, and 2 l^2 hidden
flops of attention.

A stage boundary hands the hidden state over the network, forward and backward, in bfloat16. The constants below make
the model agree with the measured Llama2-7B on A100 40 GB (`validation_errors`); they were not measured for other sizes.
Largest chunks come from `memory`, with `NUM_ADAPTERS` adapters of rank `RANK` everywhere.
"""

from dataclasses import dataclass

import numpy as np

from planning.layer_cost import LayerCost, Profile
from planning.memory import max_chunk_tokens
from planning.types import ActivationPolicy, ModelShape, ParallelConfig

MATMUL_EFFICIENCY = 0.54
ATTENTION_EFFICIENCY = 0.70
LINK_EFFICIENCY = 0.26
LAUNCH_SECONDS = 2.1e-3
ALL_REDUCE_START_SECONDS = 0.1e-3
NUM_ADAPTERS, RANK = 6, 16
GIB = 2**30
TP_DEGREES = (1, 2, 4, 8)
PP_DEGREES = (1, 2, 4, 5, 8, 10, 16, 20)
CHUNK_STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak of one GPU and its links, per second; links in one direction."""

    matmul_flops: float
    memory_bytes_per_second: float
    memory_gib: float
    link_bytes_per_second: float
    network_bytes_per_second: float


GPUS = {  # vendors' data sheets; the network is one 200 or 400 Gb/s port per GPU pair or GPU
    "a100_40gb": Gpu(312e12, 1.555e12, 40, 300e9, 12.5e9),
    "a100_80gb": Gpu(312e12, 2.039e12, 80, 300e9, 25e9),
    "h100_80gb": Gpu(989e12, 3.35e12, 80, 450e9, 50e9),
}
SHAPES = {  # the models' config.json
    "llama2_7b": ModelShape(32, 4096, 11008, 32, 32, 128, 32000, bytes_per_parameter=2),
    "qwen2_7b": ModelShape(28, 3584, 18944, 28, 4, 128, 152064, bytes_per_parameter=2),
    "qwen2_32b": ModelShape(64, 5120, 27648, 40, 8, 128, 152064, bytes_per_parameter=2),
    "llama2_70b": ModelShape(80, 8192, 28672, 64, 8, 128, 32000, bytes_per_parameter=2),
}
SUFFIX = "_analytic"
TYPICAL_ACTIVATIONS = ActivationPolicy(sequence_parallel=True)


def analytic_presets() -> tuple[str, ...]:
    """Names of the analytic presets: model, GPU and suffix."""
    return tuple(f"{model}_{gpu}{SUFFIX}" for model in SHAPES for gpu in GPUS)


def analytic_profile(name: str, activations: ActivationPolicy = TYPICAL_ACTIVATIONS) -> Profile:
    """The analytic preset of this name, for replicas that treat activations so."""
    model = next(model for model in SHAPES if name.startswith(model))
    shape, gpu = SHAPES[model], GPUS[name.removeprefix(f"{model}_").removesuffix(SUFFIX)]
    tps = [tp for tp in TP_DEGREES if all(count % tp == 0 for count in (shape.num_kv_heads, shape.num_heads))]
    adapters, largest = _num_adapter_parameters(shape), {}
    for config in (ParallelConfig(tp, pp) for tp in tps for pp in PP_DEGREES if shape.num_layers % pp == 0):
        tokens = max_chunk_tokens(shape, config, int(gpu.memory_gib * GIB), adapters, activations=activations)
        if tokens >= CHUNK_STEP_TOKENS:
            largest[config] = tokens // CHUNK_STEP_TOKENS * CHUNK_STEP_TOKENS
    return Profile(
        name=name,
        source=f"analytic model of {model} on {name}",
        num_layers=shape.num_layers,
        layer_cost_by_tp={tp: layer_cost(shape, gpu, tp, activations.recompute) for tp in tps},
        max_chunk_tokens=largest,
        boundary_seconds_per_token=2 * shape.hidden_size * shape.bytes_per_parameter / gpu.network_bytes_per_second,
        caveat="unvalidated analytic profile",
        recompute=activations.recompute,
    )


def layer_cost(shape: ModelShape, gpu: Gpu, tp: int, recompute: bool = False) -> LayerCost:
    """Seconds of one layer, forward and backward, on `tp` GPUs of one node.

    With the base frozen, backward has the flops of forward (no weight gradients): recompute makes two passes three.
    """
    num_passes = 3 if recompute else 2
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    parameters = attention + 3 * shape.hidden_size * shape.ffn_size
    weight_seconds = num_passes * parameters * shape.bytes_per_parameter / tp / gpu.memory_bytes_per_second
    matmul_seconds = 2 * num_passes * parameters / tp / (gpu.matmul_flops * MATMUL_EFFICIENCY)
    num_all_reduces = 2 * num_passes
    reduced_bytes = num_all_reduces * 2 * (tp - 1) / tp * shape.hidden_size * shape.bytes_per_parameter
    attention_flops = (9 if recompute else 7) * shape.num_heads * shape.head_dim / tp
    return LayerCost(
        fixed_seconds=LAUNCH_SECONDS * num_passes / 2
        + weight_seconds
        + (num_all_reduces * ALL_REDUCE_START_SECONDS if tp > 1 else 0.0),
        seconds_per_token=matmul_seconds + reduced_bytes / (gpu.link_bytes_per_second * LINK_EFFICIENCY),
        seconds_per_token2=attention_flops / (gpu.matmul_flops * ATTENTION_EFFICIENCY),
    )


def validation_errors(measured: Profile, shape: ModelShape, gpu: Gpu) -> dict[int, tuple[float, float]]:
    """Mean and largest relative error of a layer's seconds per tp, over chunks of one measured profile.

    Chunks: 128 to 16,384 tokens in powers of two, as one sequence, as four, and as sequences of 512 tokens.
    """
    errors: dict[int, tuple[float, float]] = {}
    for tp, cost in measured.layer_cost_by_tp.items():
        modelled = layer_cost(shape, gpu, tp)
        relative = []
        for tokens in (2**k for k in range(7, 15)):
            for length in {tokens, max(1, tokens // 4), min(tokens, 512)}:
                truth = _chunk_seconds(cost, tokens, length)
                relative.append(abs(_chunk_seconds(modelled, tokens, length) / truth - 1))
        errors[tp] = (float(np.mean(relative)), max(relative))
    return errors


def _chunk_seconds(cost: LayerCost, tokens: int, length: int) -> float:
    return cost.fixed_seconds + tokens * (cost.seconds_per_token + cost.seconds_per_token2 * length)


def _num_adapter_parameters(shape: ModelShape) -> int:
    attention_out = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    per_layer = RANK * (4 * shape.hidden_size + attention_out + 3 * (shape.hidden_size + shape.ffn_size))
    return NUM_ADAPTERS * shape.num_layers * per_layer
