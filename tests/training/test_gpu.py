"""The training engine on one GPU: NCCL, bfloat16, recompute, peak memory. `pytest -m gpu`; skipped without a device."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from planning.config import Backend, Batching
from planning.step_plan import Job, JobMember, StepPlan, Wave
from planning.types import ActivationPolicy, Chunk, SequenceRef
from tests.training.oracle import fleet_spec, tenant
from training.config import ALL_TARGETS, BaseModelConfig, DType, OptimiserConfig
from training.fleet import Fleet
from training.megatron_attention import CausalAttention
from training.megatron_model import LoraChunkParams
from training.probe import Probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = [33, 17, 50, 9]
TENANTS = (
    tenant("anna", 4, 8, ("q_proj", "v_proj"), OptimiserConfig(learning_rate=1e-3), 1),
    tenant("bert", 8, 16, ALL_TARGETS, OptimiserConfig(learning_rate=1e-3), 2),
)


@pytest.fixture
def fleet(base_model_folder, token_path, tmp_path: Path) -> Callable[[ActivationPolicy], Fleet]:
    folder = base_model_folder("llama")
    paths = {t.name: token_path(tmp_path, t.name, LENGTHS, seed=i) for i, t in enumerate(TENANTS)}

    def build(activations: ActivationPolicy) -> Fleet:
        changes = {
            "base_model": BaseModelConfig(path=folder, dtype=DType.BFLOAT16),
            "backend": Backend.NCCL,
            "log_dir": tmp_path / "logs",
        }
        return Fleet(fleet_spec(folder, paths, ((1, 1),), TENANTS, activations).model_copy(update=changes), 1)

    return build


def step_plan(step: int, batching: Batching) -> StepPlan:
    sequences = tuple(SequenceRef(t.name, row, length) for t in TENANTS for row, length in enumerate(LENGTHS))
    chunk = Chunk(sequences, None if batching is Batching.PACKED else max(LENGTHS))
    supervised = {t.name: sum(length - max(1, length // 3) for length in LENGTHS) for t in TENANTS}
    return StepPlan(step, (Wave((Job((JobMember(0, (chunk,)),)),)),), supervised)


def test_one_kernel_for_all_segments_equals_each_segment_by_itself() -> None:
    segments, heads, kv_heads, width = (33, 128, 7), 8, 4, 64
    torch.manual_seed(0)
    num_tokens = sum(segments)
    inputs = [
        torch.randn(num_tokens, count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    attention = CausalAttention(None, 1, None, None)
    ends = torch.tensor([0, *accumulate(segments)], dtype=torch.int32, device="cuda")
    params = LoraChunkParams("thd", max_seqlen_q=max(segments), segments=segments, segment_ends=ends)
    outputs = [attention(*inputs, packed_seq_params=params), attention._by_segment(*inputs, segments)]
    weights = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in outputs]
    for one, other in zip([outputs[0], *gradients[0]], [outputs[1], *gradients[1]], strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()  # two roundings to 8 bits of mantissa


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_fall_in_bfloat16_padded_and_packed(fleet, recompute: bool) -> None:
    with fleet(ActivationPolicy(recompute=recompute)) as running:
        running.launch(300)
        losses = []
        for step in range(20):
            learning_rates = {t.name: t.optimiser.learning_rate for t in TENANTS}
            running.begin_step(step_plan(step, list(Batching)[step % 2]), learning_rates)
            losses.append(running.finish_step()[0]["losses"])
        running.stop()
    for t in TENANTS:
        assert losses[-1][t.name] < losses[0][t.name]


def test_a_probe_reports_the_allocators_peak_and_the_time_until_the_gpu_is_done(fleet) -> None:
    probe = Probe(num_sequences=2, length=128, batching=Batching.PACKED, num_chunks=2, owners=("anna", "bert"))
    with fleet(ActivationPolicy()) as running:
        running.launch(300)
        (report,) = running.profile(probe.model_copy(update={"measures_memory": True}))
        running.stop()
    assert report["peak_bytes"] > 0
    assert report["busy_seconds"] > 0
