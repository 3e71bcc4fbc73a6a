"""Who holds what, checked for fleets far larger than any test machine."""

from planning.types import ParallelConfig, Replica
from training.layout import REPLICATED, FleetLayout, SliceKey


def fleet(*configs: tuple[int, int], num_layers: int = 8) -> FleetLayout:
    replicas, first = [], 0
    for index, (tp, pp) in enumerate(configs):
        replicas.append(Replica(index, ParallelConfig(tp, pp), first))
        first += tp * pp
    return FleetLayout(tuple(replicas), num_layers)


def test_tensor_parallel_rank_runs_fastest_within_a_replica() -> None:
    layout = fleet((1, 1), (2, 2))
    positions = [layout.position(rank) for rank in range(1, 5)]
    assert [(p.replica.index, p.tp_rank, p.pp_rank) for p in positions] == [(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]


def test_every_slice_is_held_once_per_replica_in_a_fleet_of_64_ranks() -> None:
    layout = fleet(*[(1, 1)] * 8, *[(2, 1)] * 4, *[(2, 4)] * 2, *[(4, 2)] * 2, (8, 1), (8, 1))
    assert layout.world_size == 64
    assert layout.finest_tp == 8
    held: dict[SliceKey, list[int]] = {}
    for ranks, keys in layout.reduction_sets.items():
        for key in keys:
            assert key not in held, "a slice is reduced in two sets"
            held[key] = [layout.position(rank).replica.index for rank in ranks]
    assert set(held) == {SliceKey(layer, part) for layer in range(8) for part in (*range(8), REPLICATED)}
    for key, replicas in held.items():
        if key.part == REPLICATED:  # every tensor-parallel rank of the stage
            assert replicas == sorted(r.index for r in layout.replicas for _ in range(r.config.tp))
        else:
            assert replicas == [replica.index for replica in layout.replicas]


def test_parts_of_a_rank_are_its_contiguous_share_of_the_finest_split() -> None:
    layout = fleet((2, 1), (4, 1))
    assert [list(layout.parts_of(layout.position(rank))) for rank in range(6)] == [[0, 1], [2, 3], [0], [1], [2], [3]]


def test_stages_cover_all_layers_once() -> None:
    layout = fleet((1, 4))
    layers = [list(layout.stage_layers(layout.replicas[0], stage)) for stage in range(4)]
    assert [layer for stage in layers for layer in stage] == list(range(8))
