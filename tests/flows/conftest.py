"""Fixtures of the flow tests: a real Prefect test server, and a tiny base model with a real tokenizer."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from prefect.testing.utilities import prefect_test_harness
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flows.config import RunConfig

LETTERS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One temporary Prefect server for all flow tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_RESULTS_LOCAL_STORAGE_PATH", str(tmp_path_factory.mktemp("results")))
        with prefect_test_harness(server_startup_timeout=120):
            yield


@pytest.fixture(scope="session")
def tiny_base(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer random Llama with the test tokenizer: a complete base model folder."""
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path_factory.mktemp("base") / "tiny"))
    vocab_size = len(PreTrainedTokenizerFast.from_pretrained(folder))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented costs of the tiny model, under which a mixed deployment is best."""
    cost = {"1": (2.0, 0.02, 1e-5), "2": (3.0, 0.015, 6e-6)}
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    content = {
        "schema_version": 1,
        "source": "invented for tests",
        "chunk_ms_per_layer": "a + b*tokens + c*sum(length^2)",
        "num_layers": 2,
        "coefficients_by_tp": {
            tp: {"a_ms": a, "b_ms_per_token": b, "c_ms_per_token2": c} for tp, (a, b, c) in cost.items()
        },
        "max_chunk_tokens": [{"tp": 1, "pp": 1, "tokens": 256}, {"tp": 2, "pp": 1, "tokens": 2048}],
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own; data and models may lie anywhere below the test's root."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOBRA_DATA_ROOTS", "/")
    return tmp_path


@pytest.fixture
def run_content(tiny_base: Path, tiny_profile: Path, workspace: Path) -> dict:
    """A run of two small tenants, one with short rows and one with a long tail, as a run file's content."""
    write_rows(workspace / "short.jsonl", 12, 3)
    write_rows(workspace / "long.jsonl", 9, 30)
    adapter = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    return {
        "name": "tiny",
        "base_model": {"path": str(tiny_base)},
        "tenants": [
            {
                "name": name,
                "dataset": {"path": f"{name}.jsonl", "prompt_column": "prompt", "response_column": "response"},
                "adapter": adapter,
                "optimiser": {"learning_rate": 1e-2},
                "batch_size": 4,
                "steps": 4,
                "seed": seed,
            }
            for seed, name in enumerate(("short", "long"))
        ],
        "cluster": {"num_gpus": 3, "backend": "gloo"},
        "profile": {"source": "file", "path": str(tiny_profile)},
        "training": {"save_every": 2},
        "tracking": {"mlflow_uri": f"sqlite:///{workspace}/mlflow.db", "experiment": "tests"},
    }


@pytest.fixture
def tiny_run(run_content: dict) -> Callable[..., RunConfig]:
    """`tiny_run(**sections)`: the run, with whole sections replaced."""
    return lambda **sections: RunConfig.model_validate({**run_content, **sections})


def write_rows(path: Path, num_rows: int, num_words: int) -> None:
    """Rows that repeat a word; every fourth response is three times as long."""
    with path.open("w") as file:
        for row in range(num_rows):
            word = LETTERS[row % len(LETTERS)]
            response = " ".join([word] * (num_words * (3 if row % 4 == 0 else 1)))
            file.write(json.dumps({"prompt": f"Say {word}.", "response": response}) + "\n")
