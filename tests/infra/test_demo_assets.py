import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "demo" / "make_assets.py"
TENANTS = ("arithmetic", "support", "code", "meetings")


def make(folder, num_threads=1):
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def lengths(assets):
    """Tokens of every row, as the tenant's model would see it."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "base")

    def length(row):
        if "messages" in row:
            return len(tokenizer.apply_chat_template(row["messages"], return_dict=False))
        return len(tokenizer.encode(row["prompt"])) + len(tokenizer.encode(row["response"])) + 2

    rows = {name: (assets / "data" / f"{name}.jsonl").read_text().splitlines() for name in TENANTS}
    return {name: sorted(length(json.loads(row)) for row in rows[name]) for name in TENANTS}


def hashes(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_tenants_differ_in_length_and_each_has_a_long_tail(lengths):
    medians = {name: values[len(values) // 2] for name, values in lengths.items()}
    assert 20 <= medians["arithmetic"] <= 60
    assert medians["meetings"] > 5 * medians["arithmetic"]
    for name, values in lengths.items():
        assert 200 <= len(values) <= 400, name
        assert sum(values) / len(values) > medians[name], name
        assert values[-1] > 1.8 * medians[name], name
    assert lengths["meetings"][-1] <= 1000


def test_the_base_model_is_a_float32_llama_whose_vocabulary_holds_the_tokenizer(assets):
    config = AutoConfig.from_pretrained(assets / "base")
    tokenizer = AutoTokenizer.from_pretrained(assets / "base")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (4, 128, 8)
    assert config.vocab_size % 8 == 0
    assert len(tokenizer) <= config.vocab_size < len(tokenizer) + 8
    assert None not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    with safe_open(assets / "base" / "model.safetensors", "pt") as weights:
        assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"F32"}  # noqa: SIM118
        assert weights.get_slice("lm_head.weight").get_shape() == [config.vocab_size, 128]


def test_assets_that_are_there_already_are_left_alone(assets):
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*")}

    assert "up to date" in make(assets)

    assert {path: path.stat().st_mtime_ns for path in assets.rglob("*")} == before


@pytest.mark.slow
def test_two_runs_write_the_same_bytes_whatever_the_number_of_threads(assets, tmp_path):
    make(tmp_path, num_threads=2)

    assert hashes(tmp_path) == hashes(assets)
