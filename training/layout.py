"""Who holds what in the fleet: pure arithmetic, no torch.

The fleet is one world of ranks; each replica is a contiguous block of them, tensor-parallel rank fastest. A layer's
adapter tensors are either replicated over tensor parallelism or split along dim 0 into tp slices. Replicas of
different tp split differently, so slices are counted in the finest split of the fleet, the least common multiple of
all tp. Ranks that hold the same slices form one reduction set (MEGATRON-core knows only equal replicas).
"""

import math
from dataclasses import dataclass
from functools import cached_property

from planning.types import ActivationPolicy, Replica
from training.base_model import BaseModel

REPLICATED = -1


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where one rank stands in its replica."""

    replica: Replica
    tp_rank: int
    pp_rank: int

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.replica.config.pp - 1

    @property
    def reports_loss(self) -> bool:
        """One rank per replica reports its losses: the last stage's tensor-parallel rank 0."""
        return self.is_last_stage and self.tp_rank == 0


@dataclass(frozen=True, slots=True, order=True)
class SliceKey:
    """One layer's slice in the finest tensor-parallel split, or its replicated tensors (`part` = REPLICATED)."""

    layer: int
    part: int


@dataclass(frozen=True)
class FleetLayout:
    """All replicas of a fleet over a model of `num_layers` layers."""

    replicas: tuple[Replica, ...]
    num_layers: int

    @property
    def world_size(self) -> int:
        return sum(replica.config.num_gpus for replica in self.replicas)

    @cached_property
    def finest_tp(self) -> int:
        return math.lcm(*(replica.config.tp for replica in self.replicas))

    def position(self, rank: int) -> RankPosition:
        replica = next(replica for replica in self.replicas if rank in replica.ranks)
        offset = rank - replica.first_rank
        return RankPosition(replica, offset % replica.config.tp, offset // replica.config.tp)

    def stage_layers(self, replica: Replica, pp_rank: int) -> range:
        """Layers of one pipeline stage; num_layers is a multiple of pp."""
        per_stage = self.num_layers // replica.config.pp
        return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)

    def parts_of(self, position: RankPosition) -> range:
        """The finest slices that a rank's tensor-parallel shard consists of, in order."""
        per_shard = self.finest_tp // position.replica.config.tp
        return range(position.tp_rank * per_shard, (position.tp_rank + 1) * per_shard)

    @cached_property
    def reduction_sets(self) -> dict[tuple[int, ...], tuple[SliceKey, ...]]:
        """Ranks -> the slices that exactly these ranks hold, sorted by ranks: the order of all collectives."""
        holders: dict[SliceKey, list[int]] = {}
        for rank in range(self.world_size):
            position = self.position(rank)
            for layer in self.stage_layers(position.replica, position.pp_rank):
                for part in (*self.parts_of(position), REPLICATED):
                    holders.setdefault(SliceKey(layer, part), []).append(rank)
        sets: dict[tuple[int, ...], list[SliceKey]] = {}
        for key in sorted(holders):
            sets.setdefault(tuple(holders[key]), []).append(key)
        return {ranks: tuple(sets[ranks]) for ranks in sorted(sets)}


@dataclass(frozen=True)
class Stage:
    """One rank's part of the fleet: which layers and which tensor-parallel shard of the base model it holds, and where.

    `device` is a torch device name.
    """

    base: BaseModel
    layout: FleetLayout
    rank: int
    device: str
    activations: ActivationPolicy

    @cached_property
    def position(self) -> RankPosition:
        return self.layout.position(self.rank)

    @property
    def layers(self) -> range:
        return self.layout.stage_layers(self.position.replica, self.position.pp_rank)

    @property
    def tp(self) -> int:
        return self.position.replica.config.tp

    @property
    def tp_rank(self) -> int:
        return self.position.tp_rank

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor-parallel peers hold different tokens between the layers' linears (sequence parallelism)."""
        return self.activations.sequence_parallel and self.tp > 1
