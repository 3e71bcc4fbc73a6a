"""Reading profiles, and the memory model against the chunk sizes that the paper's authors measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planning.errors import InputError, ProfileError
from planning.memory import bytes_per_token, max_chunk_tokens
from planning.profile import (
    LayerCost,
    MeasuredConfig,
    Profile,
    preset_names,
    read_preset,
    read_profile,
    write_profile,
)
from planning.types import ActivationPolicy, ModelShape, ParallelConfig

GIB = 2**30


def good_file() -> dict[str, object]:
    return {
        "schema_version": 1,
        "source": "made up",
        "chunk_ms_per_layer": "a + b*tokens + c*sum(length^2)",
        "num_layers": 2,
        "coefficients_by_tp": {"1": {"a_ms": 2.0, "b_ms_per_token": 0.5, "c_ms_per_token2": 0.25}},
        "max_chunk_tokens": [{"tp": 1, "pp": 1, "tokens": 64}],
    }


def test_coefficients_are_turned_into_seconds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(good_file()))
    profile = read_profile(path)
    assert (profile.name, profile.num_layers, profile.max_chunk_tokens) == ("mine", 2, {ParallelConfig(1, 1): 64})
    cost = profile.layer_cost_by_tp[1]
    assert (cost.fixed_seconds, cost.seconds_per_token, cost.seconds_per_token2) == (2e-3, 5e-4, 2.5e-4)


def test_what_was_measured_of_a_configuration_is_written_and_read_back(tmp_path: Path) -> None:
    measured = {ParallelConfig(1, 2): MeasuredConfig(1.25, 0.004, 512.0)}
    profile = Profile("mine", "made up", 2, {1: LayerCost(2e-3, 5e-4, 2.5e-4)}, measured=measured)
    write_profile(profile, tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json") == profile


def test_a_profile_without_memory_table_leaves_memory_to_the_model(tmp_path: Path) -> None:
    file = good_file()
    del file["max_chunk_tokens"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(file))
    assert read_profile(path).max_chunk_tokens is None


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"num_layers": 0}, "num_layers"),
        ({"coefficients_by_tp": {}}, "coefficients_by_tp"),
        ({"coefficients_by_tp": {"1": {"a_ms": -1.0, "b_ms_per_token": 1, "c_ms_per_token2": 0}}}, "a_ms"),
        ({"coefficients_by_tp": {"1": {"a_ms": float("nan"), "b_ms_per_token": 1, "c_ms_per_token2": 0}}}, "a_ms"),
        ({"coefficients_by_tp": {"1": {"a_ms": float("inf"), "b_ms_per_token": 1, "c_ms_per_token2": 0}}}, "a_ms"),
        ({"coefficients_by_tp": {"1": {"a_ms": 1, "b_ms_per_token": 0, "c_ms_per_token2": 0}}}, "coefficients_by_tp.1"),
        ({"max_chunk_tokens": [{"tp": 1, "pp": 1, "tokens": 8}] * 2}, "max_chunk_tokens.1"),
        ({"chunk_sizes": 3}, "chunk_sizes"),
    ],
)
def test_a_damaged_profile_is_refused_with_file_and_field(
    tmp_path: Path, damage: dict[str, object], field: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(good_file() | damage))
    with pytest.raises(ProfileError, match=f"mine.json.*{field}"):
        read_profile(path)


def test_a_missing_or_binary_profile_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.json cannot be read"):
        read_profile(tmp_path / "binary.json")
    (tmp_path / "cut.json").write_text('{"schema_version": 1')
    with pytest.raises(InputError, match="whole file"):
        read_profile(tmp_path / "cut.json")


def test_every_preset_reads_and_an_unknown_one_names_them() -> None:
    assert "llama2_7b_a100_40gb" in preset_names()
    for name in preset_names():
        assert read_preset(name).name == name
    with pytest.raises(ProfileError, match="llama2_7b_a100_40gb"):
        read_preset("llama9")


def test_memory_of_a_hand_sized_model() -> None:
    # 2 layers, hidden 4, mlp 8, 2 heads and 1 kv head of 2, vocabulary 10, float32, <1,1>:
    # weights 4 * (2 * ((2*2 + 2*1)*2*4 + 3*4*8 + 2*4) + 2*10*4) = 4 * (2*152 + 80) = 1536 bytes; adapters 16 * 25 = 400
    # per token 1.2 * 2 * 4 * (4*4 + (4*2 + 3*1)*2 + 4*8) + 4 * 4*10 = 672 + 160 = 832 bytes
    shape = ModelShape(2, 4, 8, 2, 1, 2, 10)
    room = 1536 + 400 + 3 * 832
    assert max_chunk_tokens(shape, ParallelConfig(1, 1), int(room / 0.9) + 1, 25) == 3
    assert max_chunk_tokens(shape, ParallelConfig(1, 1), int(room / 0.9) - 1, 25) == 2
    assert max_chunk_tokens(shape, ParallelConfig(1, 1), int(room / 0.9) + 1, 25, 1100.0) == 2  # a higher measured peak
    assert max_chunk_tokens(shape, ParallelConfig(1, 1), int(room / 0.9) + 1, 25, 300.0) == 3  # a lower one


def test_recompute_keeps_a_layers_input_and_one_layer_or_the_logits() -> None:
    # the same model: a layer 4 * (4*4 + (4*2 + 3*1)*2 + 4*8) = 280 bytes, its input 4 * 4 = 16, logits 4 * 4*10 = 160
    shape, recompute = ModelShape(2, 4, 8, 2, 1, 2, 10), ActivationPolicy(recompute=True)
    assert bytes_per_token(shape, ParallelConfig(1, 1), recompute) == 2 * 16 + 2 * 280
    many_words = replace(shape, vocab_size=1000)
    assert bytes_per_token(many_words, ParallelConfig(1, 1), recompute) == 2 * 16 + 16_000


def test_sequence_parallel_splits_what_lies_between_the_linears() -> None:
    shape, split = ModelShape(2, 4, 8, 2, 1, 2, 10), ActivationPolicy(sequence_parallel=True)
    whole = bytes_per_token(shape, ParallelConfig(2, 1))
    assert whole - bytes_per_token(shape, ParallelConfig(2, 1), split) == pytest.approx(1.2 * 2 * 4 * (4 * 4) / 2)
    assert bytes_per_token(shape, ParallelConfig(1, 1)) == bytes_per_token(shape, ParallelConfig(1, 1), split)


def test_nothing_fits_where_the_weights_do_not(llama_7b: ModelShape) -> None:
    assert max_chunk_tokens(llama_7b, ParallelConfig(1, 1), 12 * GIB, 0) == 0


def test_more_gpus_per_replica_hold_larger_chunks(llama_7b: ModelShape) -> None:
    held = [max_chunk_tokens(llama_7b, ParallelConfig(tp, 1), 40 * GIB, 240_000_000) for tp in (1, 2, 4, 8)]
    assert held == sorted(set(held))


def test_the_memory_model_agrees_with_the_measured_chunks(llama_7b: ModelShape) -> None:
    # measured sizes are powers of two, so the true limit lies between once and twice the measured one; the authors'
    # system keeps other tensors than ours, and with tp 8 splits the norms' activations too (sequence parallelism)
    for config, measured in (read_preset("llama2_7b_a100_40gb").max_chunk_tokens or {}).items():
        modelled = max_chunk_tokens(llama_7b, config, 40 * GIB, 240_000_000)
        assert 0.75 * measured <= modelled <= 2.3 * measured, config
