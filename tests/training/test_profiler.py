"""The profiler: its fit against planted costs, its grid, real measurements of a tiny model, and who may use them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from data_prep.config import DatasetConfig
from planning.candidates import propose_candidates
from planning.config import Backend, Batching, ClusterConfig, PlannerConfig, ProfileConfig, ProfileSource
from planning.errors import InputError, LobraError, ProfileError
from planning.profile import LayerCost, read_profile, write_profile
from planning.types import ActivationPolicy, ParallelConfig
from training.base_model import read_base_model
from training.config import AdapterConfig, BaseModelConfig, TenantConfig, TrainingConfig
from training.deployment import load_profile
from training.probe import Probe, peak_bytes, random_chunk
from training.profile_fit import ChunkTiming, MeasuredProfile, fit_cost
from training.profile_store import ProfileIdentity, profile_identity, read_report, store_profile, stored_path
from training.profiler import ProfileRequest, is_complete, measurable, measure_profile, owners_at, probe_grid

PLANTED = {1: LayerCost(3e-3, 5e-5, 7e-8), 2: LayerCost(9e-3, 3e-5, 0.0)}
FACTORS = {ParallelConfig(1, 1): 1.0, ParallelConfig(1, 2): 1.25, ParallelConfig(2, 1): 1.0}
NUM_LAYERS = 4


def timing(config: ParallelConfig, num_sequences: int, length: int, disturbance: float = 1.0) -> ChunkTiming:
    cost, tokens = PLANTED[config.tp], num_sequences * length
    layer = cost.fixed_seconds + cost.seconds_per_token * tokens + cost.seconds_per_token2 * tokens * length
    seconds = disturbance * FACTORS[config] * NUM_LAYERS / config.pp * layer
    return ChunkTiming(config, num_sequences, length, Batching.PADDED, seconds, tokens * 100)


def planted() -> list[ChunkTiming]:
    shapes = [(1, 16), (8, 16), (1, 200), (4, 200), (1, 900)]
    return [timing(config, *shape) for config in FACTORS for shape in shapes]


def test_the_fit_recovers_planted_costs_and_stage_factors() -> None:
    fit = fit_cost(planted(), NUM_LAYERS)
    for tp, cost in PLANTED.items():
        found = fit.layer_cost_by_tp[tp]
        assert found.fixed_seconds == pytest.approx(cost.fixed_seconds, rel=1e-9)
        assert found.seconds_per_token == pytest.approx(cost.seconds_per_token, rel=1e-9)
        assert found.seconds_per_token2 == pytest.approx(cost.seconds_per_token2, rel=1e-9, abs=1e-18)
    assert fit.stage_factors == pytest.approx(FACTORS)
    assert fit.max_error < 1e-9


def test_the_fit_names_the_chunk_that_fits_worst() -> None:
    timings = planted()
    timings[7] = replace(timings[7], seconds=timings[7].seconds * 1.5)
    fit = fit_cost(timings, NUM_LAYERS)
    assert fit.worst == timings[7]
    assert 0 < fit.mean_error < fit.max_error < 0.5


def test_no_cost_is_negative_and_every_chunk_size_counts_alike() -> None:
    falling = [  # per-token time falls with length: the best unconstrained c is negative
        replace(timing(ParallelConfig(2, 1), 1, length), seconds=1e-3 * length**0.9) for length in (16, 64, 256, 1024)
    ]
    fit = fit_cost(falling, NUM_LAYERS)
    assert fit.layer_cost_by_tp[2].seconds_per_token2 == 0.0
    assert fit.max_error < 0.15  # absolute errors instead of relative ones would leave 16 tokens 25 % off


def test_times_that_do_not_grow_with_the_tokens_are_refused() -> None:
    flat = [replace(timing(ParallelConfig(1, 1), 1, length), seconds=0.1) for length in (16, 64, 256)]
    with pytest.raises(LobraError, match=r"<1,1> do not grow.*quieter machine"):
        fit_cost(flat, NUM_LAYERS)


def test_peak_bytes_end_what_was_released_unseen_where_its_memory_is_given_out_again() -> None:
    assert peak_bytes([(100, 50), (200, 30), (100, -50), (300, 60), (999, -5)]) == 90
    assert peak_bytes([(100, 50), (200, 30), (120, 20), (190, 100)]) == 120  # overlap 100..150, then 200..230
    assert peak_bytes([]) == 0


@pytest.mark.parametrize("batching", list(Batching))
def test_owners_take_turns_over_the_sequences_and_chunks_of_a_probe(batching: Batching) -> None:
    probe = Probe(num_sequences=2, length=8, batching=batching, num_chunks=2, owners=("c", "b", "a"))
    chunks = [random_chunk(probe, number, 50) for number in (0, 1)]
    assert [[span.tenant for span in chunk.spans] for chunk in chunks] == [["b", "c"], ["a", "c"]]
    unit = 8 if batching is Batching.PACKED else 1
    assert [(span.start, span.size) for span in chunks[0].spans] == [(0, unit), (unit, unit)]
    assert chunks[0].tokens_BT.size == 16
    assert not np.array_equal(chunks[0].tokens_BT, chunks[1].tokens_BT)


@pytest.fixture(scope="module")
def request_for(base_model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ProfileRequest:
    base_model = BaseModelConfig(path=base_model_folder("llama"))
    tenants = tuple(
        TenantConfig(
            name=f"tenant-{rank}",
            dataset=DatasetConfig(path=Path("unused.jsonl"), prompt_column="p", response_column="r"),
            adapter=AdapterConfig(rank=rank, alpha=8, target_modules=targets),
            batch_size=4,
            steps=1,
        )
        for rank, targets in ((2, ("q_proj",)), (8, ("q_proj", "down_proj")))
    )
    return ProfileRequest(
        base=read_base_model(base_model),
        base_model=base_model,
        tenants=tenants,
        cluster=ClusterConfig(num_gpus=2, memory_per_gpu_gib=0.015, backend=Backend.GLOO),
        planner=PlannerConfig(max_pp=1),
        activations=ActivationPolicy(),
        histogram=pl.DataFrame(
            {
                "tenant": ["tenant-2", "tenant-8", "tenant-8"],
                "length": [10, 12, 64],
                "count": [8, 6, 2],
            }  # 140 tokens a step
        ),
        log_dir=tmp_path_factory.mktemp("logs"),
    )


@pytest.fixture(scope="module")
def measured(request_for: ProfileRequest) -> MeasuredProfile:
    return measure_profile(request_for)


def test_configurations_are_those_that_planning_allows(request_for: ProfileRequest) -> None:
    assert [str(candidate.config) for candidate in measurable(request_for).usable] == ["<1,1>", "<2,1>"]


def test_the_grid_reaches_the_largest_chunk_and_the_longest_sequence_and_no_further(
    request_for: ProfileRequest,
) -> None:
    candidate = measurable(request_for).usable[0]
    grid = probe_grid(request_for, replace(candidate, config=ParallelConfig(1, 4), max_chunk_tokens=300))
    shapes = {(probe.num_sequences, probe.length) for probe in grid if probe.batching is Batching.PADDED}
    assert {(1, 64), (2, 64), (1, 16), (8, 16)} <= shapes  # no more than the 8 sequences and 140 tokens of a step
    assert max(probe.num_tokens for probe in grid) <= 140
    assert all(probe.num_chunks == 8 for probe in grid)  # twice the stages, so that the pipeline fills
    packed = [probe for probe in grid if probe.batching is Batching.PACKED]
    assert packed
    assert min(probe.num_sequences for probe in packed) > 1
    short = probe_grid(request_for, replace(candidate, max_chunk_tokens=8))
    assert {probe.num_tokens for probe in short} == {8}


def test_chunks_of_a_length_belong_to_those_who_have_such_sequences(request_for: ProfileRequest) -> None:
    assert set(owners_at(request_for, 64)) == {"tenant-8"}
    short = owners_at(request_for, 10)  # four sequences of a step of tenant-2, three of the other's four
    assert short[:2] == ("tenant-2", "tenant-8")
    assert short.count("tenant-2") / len(short) == pytest.approx(4 / 7, abs=0.03)
    assert set(owners_at(request_for, 100_000)) == {"tenant-2", "tenant-8"}


def test_a_real_fleet_gives_positive_times_and_bytes_that_grow_with_the_chunk(measured: MeasuredProfile) -> None:
    for config in (ParallelConfig(1, 1), ParallelConfig(2, 1)):
        own = [t for t in measured.fit.timings if t.config == config and t.batching is Batching.PADDED]
        assert min(t.seconds for t in own) > 0
        small, large = (pick(own, key=lambda t: (t.num_tokens, t.length)) for pick in (min, max))
        assert large.num_tokens >= 8 * small.num_tokens
        # activations of four layers in float32: at least the two norms' inputs of each are kept
        assert large.peak_bytes > large.num_tokens * 4 * 4 * 2 * 64
        assert measured.profile.measured[config].step_overhead_seconds > 0
    assert measured.fit.mean_error_of(Batching.PACKED) is not None


def test_the_measured_profile_plans_within_the_measured_memory(
    measured: MeasuredProfile, request_for: ProfileRequest
) -> None:
    cluster, planner = request_for.cluster, request_for.planner
    usable = propose_candidates(request_for.shape, measured.profile, cluster, planner, 10_000).by_config
    for config, candidate in usable.items():
        per_token = measured.profile.measured[config].bytes_per_token
        assert 0 < candidate.max_chunk_tokens * per_token < 0.9 * cluster.memory_per_gpu_gib * 2**30
        assert candidate.step_overhead_seconds > 0


def test_a_profile_is_incomplete_for_a_run_that_may_use_more_configurations(
    measured: MeasuredProfile, request_for: ProfileRequest
) -> None:
    assert is_complete(request_for, measured.profile)
    assert is_complete(replace(request_for, planner=PlannerConfig(max_tp=1, max_pp=1)), measured.profile)
    assert not is_complete(replace(request_for, planner=PlannerConfig()), measured.profile)  # <1,2> as well


def identity(request: ProfileRequest) -> ProfileIdentity:
    return profile_identity(request.base, request.base_model, request.tenants, request.cluster, request.activations)


def test_a_stored_profile_is_read_back_with_its_rows_and_report(
    measured: MeasuredProfile, request_for: ProfileRequest, tmp_path: Path
) -> None:
    path = stored_path(tmp_path, request_for.base_model, identity(request_for))
    store_profile(measured, identity(request_for), path)
    profile = load_profile(ProfileConfig(source=ProfileSource.MEASURE), path, request_for.activations)
    assert profile.measured == measured.profile.measured
    assert profile.layer_cost_by_tp.keys() == {1, 2}
    rows = pl.read_parquet(path.with_suffix(".parquet"))
    assert rows.columns == ["tp", "pp", "sequences", "length", "batching", "seconds", "bytes"]
    assert rows["seconds"].to_list() == [t.seconds for t in measured.fit.timings]
    report = read_report(path)
    assert report["fit"]["max_error"] == measured.fit.max_error
    assert report["measured_for"]["hardware"] == identity(request_for).hardware


@pytest.mark.parametrize(
    "change",
    [
        {"hardware": "another processor"},
        {"num_cores": 999},
        {"num_ranks": 16},
        {"dtype": "bfloat16"},
        {"target_modules": ("q_proj",)},
        {"architecture": "qwen2"},
        {"activations": ActivationPolicy(recompute=True)},
        {"activations": ActivationPolicy(sequence_parallel=True)},
    ],
)
def test_a_profile_of_another_machine_or_model_is_refused_with_the_remedy(
    measured: MeasuredProfile, request_for: ProfileRequest, tmp_path: Path, change: dict
) -> None:
    here = identity(request_for)
    elsewhere = replace(here, **change)
    theirs = stored_path(tmp_path, request_for.base_model, elsewhere)
    store_profile(measured, elsewhere, theirs)
    assert read_profile(theirs).measured  # a sound profile, but not ours
    config = ProfileConfig(source=ProfileSource.MEASURE)
    ours = stored_path(tmp_path, request_for.base_model, here)
    with pytest.raises(InputError, match=r"lobra profile RUN\.yaml") as refusal:
        load_profile(config, ours, request_for.activations)
    assert elsewhere.hardware in str(refusal.value)  # says which profiles there are
    for suffix in (".json", ".report.json"):
        shutil.copy(theirs.with_suffix(suffix), ours.with_suffix(suffix))
    with pytest.raises(InputError, match="was not measured for this model, machine and fleet"):
        load_profile(config, ours, request_for.activations)


@pytest.mark.parametrize(("theirs", "ours"), [("none", "full"), ("full", "none")])
def test_a_profile_without_the_runs_activation_recompute_is_refused_with_the_remedy(
    measured: MeasuredProfile, tmp_path: Path, theirs: str, ours: str
) -> None:
    path = tmp_path / "mine.json"
    write_profile(replace(measured.profile, recompute=theirs == "full"), path)
    config = ProfileConfig(source=ProfileSource.FILE, path=path)
    load_profile(config, Path(), ActivationPolicy(recompute=theirs == "full"))
    with pytest.raises(ProfileError, match=f"training.activation_recompute is '{ours}'.*lobra profile"):
        load_profile(config, Path(), ActivationPolicy(recompute=ours == "full"))


def test_settings_of_activations_are_checked() -> None:
    training = TrainingConfig(activation_recompute="full", sequence_parallel=True)
    assert training.activations == ActivationPolicy(recompute=True, sequence_parallel=True)
    assert TrainingConfig().activations == ActivationPolicy()
    for wrong in ({"activation_recompute": "selective"}, {"sequence_parallel": "often"}):
        with pytest.raises(ValidationError):
            TrainingConfig.model_validate(wrong)
