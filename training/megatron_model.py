"""One rank's stage of one replica on megatron.core: process groups, adapters around the frozen model, its schedules.

Only the modules named megatron_* import megatron.core. Used as they are: HyperCommGrid with a rank
offset per replica, GPTModel with an explicit ProcessGroupCollection, the 1F1B and no-pipelining schedules. Not used:
its DDP, optimiser, checkpoints and global parallel state, all of which assume equal replicas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from data_prep.collate import CollatedChunk, padded_to_multiple
from training.adapters import FUSED_TARGETS, Adapter
from training.layout import FleetLayout, Stage
from training.loss import vocab_parallel_cross_entropy
from training.low_rank import LowRankExchange, Spans, packed_spans, padded_spans
from training.megatron_base import frozen_model
from training.megatron_cpu import run_megatron_on_cpu
from training.multi_lora import FusedLayer, MultiLoraLinear
from training.weights import padded_vocab_size

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class LoraChunkParams(PackedSeqParams):
    """Travels with a chunk through every layer of every stage, also through activation recompute.

    A global would be stale there: under 1F1B several chunks are in flight.
    """

    spans: Spans | None = None
    segments: tuple[int, ...] | None = None
    """Lengths, as numbers of the host: reading cu_seqlens would wait for the GPU."""
    segment_ends: Tensor | None = None
    """0 and the end of every segment, int32, on the device: for a kernel that takes all segments at once."""


@dataclass(frozen=True)
class ReplicaGroups:
    """The process groups of this rank's replica."""

    collection: ProcessGroupCollection

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        return self.collection.pp


def create_replica_groups(layout: FleetLayout, rank: int, backend: str) -> ReplicaGroups:
    """Create the groups of every replica. Collective over the world: all ranks call it, in the same order."""
    mine: ReplicaGroups | None = None
    for replica in layout.replicas:
        grid = HyperCommGrid(
            [replica.config.tp, 1, replica.config.pp, 1],
            ["tp", "cp", "pp", "dp"],
            rank_offset=replica.first_rank,
            backend=backend,
        )
        dims = {"mp": ["tp", "pp"], "dp_cp": ["cp", "dp"], "tp_cp": ["tp", "cp"]}
        groups = {name: grid.create_pg(dims.get(name, name)) for name in ("tp", "cp", "pp", "dp", *dims)}
        if rank in replica.ranks:
            collection = ProcessGroupCollection(**groups)
            # The base is frozen: tied embeddings are loaded on both end stages and never reduced.
            collection.embd = collection.pos_embd = None
            mine = ReplicaGroups(collection)
    assert mine is not None, f"rank {rank} belongs to no replica"
    return mine


class ReplicaModel:
    """This rank's stage of its replica: frozen weights, wrapped linears, forward and backward over chunks."""

    def __init__(self, stage: Stage, groups: ReplicaGroups, adapters: dict[str, Adapter], dtype: str) -> None:
        if stage.device == "cpu":
            run_megatron_on_cpu()
        else:  # nothing is drawn, but sequence parallelism enters a named random state at the embedding
            model_parallel_cuda_manual_seed(0, tp_rank=stage.tp_rank, ep_rank=0, etp_rank=0)
        self.stage = stage
        self.groups = groups
        self.model = frozen_model(stage, groups.collection, TORCH_DTYPES[dtype]).to(stage.device)
        _wrap_linears(self.model, stage, adapters, groups.tp)
        if stage.activations.recompute and stage.position.is_first_stage:
            # A recomputed layer's output needs a gradient only if its input does; the frozen embedding's does not.
            self.model.embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_(True))
        if stage.position.is_last_stage:
            self.model.output_layer.register_forward_hook(_with_adjacent_gradient_rows)
        self.model.train()
        self.vocab_size = stage.base.vocab_size
        columns = padded_vocab_size(stage.base, stage.tp) // stage.tp
        self._num_valid_columns = max(0, min(self.vocab_size - stage.tp_rank * columns, columns))
        self._communicator = P2PCommunicator(groups.pp, self.model.config) if groups.pp.size() > 1 else None

    def forward_backward(self, chunks: Sequence[CollatedChunk], forward_only: bool = False) -> dict[str, float]:
        """Accumulate adapter gradients over all chunks of the replica; return this rank's weighted loss per tenant.

        Collective over the replica: all its ranks call it with the same chunks. Losses come from the last stage
        (empty elsewhere) and are equal on its tensor-parallel ranks. Gradients are summed into the adapters' buffers.
        """
        if not chunks:  # Megatron's schedule without pipelining always runs one micro-batch
            return {}
        reports = self._schedule(chunks, self._forward_step, forward_only=forward_only)
        losses: dict[str, Tensor] = {}
        for report in reports:
            for tenant, loss in report.items():
                losses[tenant] = losses[tenant] + loss if tenant in losses else loss
        if not losses:
            return {}
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))  # waits for the GPU once

    @torch.no_grad()
    def logits(self, chunk: CollatedChunk) -> Tensor | None:
        """Logits_BTV of one chunk on the last stage, None elsewhere. Collective over the replica."""
        collected: list[Tensor] = []

        def forward_step(chunks: Iterator[CollatedChunk], model: GPTModel):
            def keep(output: Tensor, non_loss_data: bool = False) -> Tensor:
                shards = [torch.empty_like(output) for _ in range(self.groups.tp.size())]
                dist.all_gather(shards, output.contiguous(), group=self.groups.tp)
                collected.append(torch.cat(shards, -1)[..., : self.vocab_size])
                return output

            return self._forward(next(chunks), model), keep

        self._schedule([chunk], forward_step, forward_only=True, collect_non_loss_data=True)
        return collected[0][:, : chunk.tokens_BT.shape[1]] if collected else None

    def _schedule(self, chunks, forward_step, **options) -> list:
        if self._communicator is not None:
            options["p2p_communicator"] = self._communicator
        if self.stage.splits_tokens:
            chunks = [padded_to_multiple(chunk, self.stage.tp) for chunk in chunks]
        return get_forward_backward_func(self.groups.pp.size(), None)(
            forward_step_func=forward_step,
            data_iterator=iter(chunks),
            model=[self.model],
            num_microbatches=len(chunks),
            seq_length=1,  # unused: variable_seq_lengths exchanges shapes
            micro_batch_size=1,
            pg_collection=self.groups.collection,
            **options,
        )

    def _forward(self, chunk: CollatedChunk, model: GPTModel) -> Tensor:
        tokens = torch.from_numpy(chunk.tokens_BT).to(self.stage.device)
        return model(tokens, None, None, packed_seq_params=_chunk_params(chunk, self.stage))

    def _forward_step(self, chunks: Iterator[CollatedChunk], model: GPTModel):
        chunk = next(chunks)
        output = self._forward(chunk, model)

        def weighted_loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            labels = torch.from_numpy(chunk.labels_BT).to(self.stage.device)
            weights = torch.from_numpy(chunk.weights_BT).to(self.stage.device)
            per_token = vocab_parallel_cross_entropy(
                logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), self.groups.tp, self._num_valid_columns
            )
            # A product would carry one tenant's NaN at unsupervised positions; those must not count at all.
            weighted = torch.where(weights > 0, per_token.view_as(weights) * weights, 0.0)
            span_dim = 0 if chunk.segments is None else 1
            report = {
                span.tenant: weighted.detach().narrow(span_dim, span.start, span.size).sum() for span in chunk.spans
            }
            # Three values keep the schedule from rescaling the loss; weights already divide by the step's tokens.
            return weighted.sum(), torch.ones((), dtype=torch.int), report

        return output, weighted_loss


def _with_adjacent_gradient_rows(_module, _inputs, output: tuple[Tensor, Tensor | None]) -> None:
    """Megatron returns a transposed view, logits_BTV: by its gradient torch.matmul would multiply row by row, six times
    slower than by the same rows as one matrix."""
    logits_TBV = output[0]
    if logits_TBV.requires_grad:
        logits_TBV.register_hook(lambda gradient: gradient.flatten(0, 1).view(gradient.shape))


def _chunk_params(chunk: CollatedChunk, stage: Stage) -> LoraChunkParams:
    """Spans and, for a packed chunk, segment borders: with them rope starts anew in every segment."""
    if chunk.segments is None:
        length = chunk.tokens_BT.shape[1]
        return LoraChunkParams("sbhd", max_seqlen_q=length, max_seqlen_kv=length, spans=padded_spans(chunk.spans))
    # Rope turns them into numbers of the host in every layer: on the GPU each of those would wait for all before it.
    ends = torch.tensor([0, *accumulate(chunk.segments)], dtype=torch.int32)
    longest = max(chunk.segments)
    num_shards, shard = (stage.tp, stage.tp_rank) if stage.splits_tokens else (1, 0)
    return LoraChunkParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        spans=packed_spans(chunk.spans, num_shards, shard),
        segments=chunk.segments,
        segment_ends=ends.to(stage.device, non_blocking=True),
    )


def _wrap_linears(model: GPTModel, stage: Stage, adapters: dict[str, Adapter], tp_group: dist.ProcessGroup) -> None:
    for layer, module in zip(stage.layers, model.decoder.layers, strict=True):
        wrapped = []
        for kind in FUSED_TARGETS:
            parent = module.self_attention if kind in ("linear_qkv", "linear_proj") else module.mlp
            place = FusedLayer(kind, layer, stage)
            exchange = LowRankExchange(tp_group, place.row_parallel, stage.splits_tokens)
            linear = MultiLoraLinear(getattr(parent, kind), place, exchange, adapters)
            setattr(parent, kind, linear)
            wrapped.append(linear)

        def hand_over_spans(_module, _args, kwargs, wrapped=tuple(wrapped)) -> None:
            for linear in wrapped:
                linear.spans = kwargs["packed_seq_params"].spans

        module.register_forward_pre_hook(hand_over_spans, with_kwargs=True)
