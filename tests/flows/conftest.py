"""Fixtures of the flow tests: a real Prefect test server, and a tiny base model with a real tokenizer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from prefect.testing.utilities import prefect_test_harness
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flows.config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
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


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A server or worker with all its children, ended by process id."""
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        yield child
    finally:
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        child.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=15)
        for survivor in alive:
            survivor.kill()


def _wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.5)


@pytest.fixture
def worker_api(workspace: Path) -> Iterator[httpx.Client]:
    """A Prefect server with a worker and the shipped deployments; a client of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = workspace / "prefect"
    home.mkdir()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "LOBRA_HOME": str(workspace),
        "LOBRA_DATA_ROOTS": "/",
        "PYTHONPATH": str(REPOSITORY),
    }
    server = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]

    def healthy() -> bool:
        try:
            return httpx.get(f"{environment['PREFECT_API_URL']}/health").is_success
        except httpx.TransportError:
            return False

    with _process(server, environment, home / "server.log"):
        _wait_until(healthy, 90, "the server's start")
        create = [PREFECT, "work-pool", "create", "local", "--type", "process"]
        subprocess.run(create, env=environment, check=True, capture_output=True)
        with _process([PREFECT, "worker", "start", "--pool", "local"], environment, home / "worker.log"):
            (workspace / "flows").symlink_to(REPOSITORY / "flows")
            command = [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(REPOSITORY / "prefect.yaml")]
            deployed = subprocess.run(
                command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
            )
            assert deployed.returncode == 0, deployed.stdout + deployed.stderr
            with httpx.Client(base_url=environment["PREFECT_API_URL"]) as api:
                yield api
