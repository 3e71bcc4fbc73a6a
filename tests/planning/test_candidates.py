"""Which configurations are usable, and the reasons of the others."""

from dataclasses import replace

import pytest

from planning.candidates import Candidates, propose_candidates
from planning.config import ClusterConfig, PlannerConfig
from planning.errors import PlanInfeasibleError, ProfileError
from planning.profile import Profile, read_preset
from planning.types import ModelShape, ParallelConfig

PRESET = read_preset("llama2_7b_a100_40gb")
ADAPTERS = 240_000_000


def reasons(candidates: Candidates) -> dict[str, str]:
    return {str(entry.config): entry.reason for entry in candidates.pruned}


def test_the_papers_profile_offers_its_fourteen_configurations(seven_b_candidates: Candidates) -> None:
    assert {candidate.config: candidate.max_chunk_tokens for candidate in seven_b_candidates.usable} == (
        PRESET.max_chunk_tokens
    )


def test_costs_are_those_of_the_layers_of_one_stage(seven_b_candidates: Candidates) -> None:
    whole, half = (seven_b_candidates.by_config[ParallelConfig(1, pp)] for pp in (1, 2))
    assert whole.fixed_seconds == pytest.approx(32 * 2.526e-3)
    assert whole.seconds_per_token == pytest.approx(32 * 0.0048183e-3)
    assert half.seconds_per_token2 == pytest.approx(16 * 1.3393e-10)


def test_each_pruned_configuration_says_why(llama_7b: ModelShape) -> None:
    shape = replace(llama_7b, num_heads=12, num_kv_heads=4, ffn_size=33)
    cluster = ClusterConfig(num_gpus=24, gpus_per_node=24, memory_per_gpu_gib=40)
    why = reasons(propose_candidates(shape, PRESET, cluster, PlannerConfig(max_tp=24), ADAPTERS))
    assert why["<8,1>"] == "splits 12 attention heads unevenly over tp 8"
    assert why["<3,1>"] == "splits 4 key-value heads unevenly over tp 3"
    assert why["<2,1>"] == "splits 33 MLP columns unevenly over tp 2"


def test_configurations_outside_the_profile_are_pruned(llama_7b: ModelShape) -> None:
    cluster = ClusterConfig(num_gpus=32, gpus_per_node=16, memory_per_gpu_gib=40)
    why = reasons(propose_candidates(llama_7b, PRESET, cluster, PlannerConfig(), ADAPTERS))
    assert why["<16,1>"] == "has no coefficients for tp 16 in profile llama2_7b_a100_40gb"
    assert why["<2,16>"] == "is not in the memory table of profile llama2_7b_a100_40gb"


def test_uneven_layers_are_pruned(llama_7b: ModelShape) -> None:
    profile = Profile("thirty", "", 30, PRESET.layer_cost_by_tp)
    cluster = ClusterConfig(num_gpus=8, memory_per_gpu_gib=80)
    proposed = propose_candidates(replace(llama_7b, num_layers=30), profile, cluster, PlannerConfig(), ADAPTERS)
    assert reasons(proposed)["<1,4>"] == "splits 30 layers unevenly over pp 4"
    assert ParallelConfig(1, 5) in proposed.by_config


def test_a_tensor_parallel_group_never_crosses_a_node(llama_7b: ModelShape) -> None:
    profile = replace(PRESET, max_chunk_tokens=None)
    cluster = ClusterConfig(num_gpus=16, gpus_per_node=4, memory_per_gpu_gib=40)
    proposed = propose_candidates(llama_7b, profile, cluster, PlannerConfig(), ADAPTERS)
    assert max(candidate.config.tp for candidate in proposed.usable) == 4
    shape = replace(llama_7b, num_heads=12, num_kv_heads=12, ffn_size=11010)
    cluster = ClusterConfig(num_gpus=16, gpus_per_node=4, memory_per_gpu_gib=40)
    assert reasons(propose_candidates(shape, profile, cluster, PlannerConfig(), 0))["<3,1>"] == (
        "would let groups of tp 3 straddle nodes of 4 GPUs"
    )


def test_limits_of_the_planner_are_kept(llama_7b: ModelShape) -> None:
    cluster = ClusterConfig(num_gpus=16, memory_per_gpu_gib=40)
    proposed = propose_candidates(llama_7b, PRESET, cluster, PlannerConfig(max_tp=2, max_pp=4), ADAPTERS)
    assert {(c.config.tp, c.config.pp) for c in proposed.usable} == {(t, p) for t in (1, 2) for p in (1, 2, 4)}


def test_without_memory_table_the_memory_model_decides(llama_7b: ModelShape) -> None:
    profile = replace(PRESET, max_chunk_tokens=None)
    cluster = ClusterConfig(num_gpus=2, memory_per_gpu_gib=16)
    proposed = propose_candidates(llama_7b, profile, cluster, PlannerConfig(), ADAPTERS)
    assert reasons(proposed) == {"<1,1>": "does not fit in 16 GiB per GPU"}
    assert [candidate.config for candidate in proposed.usable] == [ParallelConfig(1, 2), ParallelConfig(2, 1)]


def test_nothing_usable_lists_every_reason_and_the_remedy(llama_7b: ModelShape) -> None:
    profile = replace(PRESET, max_chunk_tokens=None)
    cluster = ClusterConfig(num_gpus=2, memory_per_gpu_gib=4)
    with pytest.raises(
        PlanInfeasibleError, match=r"<1,1> does not fit.*<2,1> does not fit.*cluster.memory_per_gpu_gib"
    ):
        propose_candidates(llama_7b, profile, cluster, PlannerConfig(), ADAPTERS)


def test_a_profile_of_another_model_is_refused(llama_7b: ModelShape) -> None:
    with pytest.raises(ProfileError, match="32 layers, the base model has 40"):
        propose_candidates(
            replace(llama_7b, num_layers=40), PRESET, ClusterConfig(num_gpus=8), PlannerConfig(), ADAPTERS
        )
