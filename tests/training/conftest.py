"""Fixtures of the training tests: tiny random base models, token files, and real gloo ranks."""

import multiprocessing
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data_prep.names import folder_name
from data_prep.token_file import write_token_file
from data_prep.types import EncodedSequence
from training.adapters import tensor_keys, tensor_place
from training.base_model import BaseModel
from training.checkpoint import Checkpoint, CheckpointStore, adapter_file, read_checkpoint
from training.config import TenantConfig

VOCAB = 301  # odd, so that tp pads it
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "mistral": (MistralConfig, MistralForCausalLM, {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
}


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Interrupts arrive, also where a shell started the tests in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def base_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`base_model_folder(architecture)`: a saved tiny random model whose norms and biases are not trivial."""
    root = tmp_path_factory.mktemp("models")

    def build(architecture: str) -> Path:
        folder = root / architecture
        if not folder.exists():
            config_class, model_class, extra = ARCHITECTURES[architecture]
            torch.manual_seed(0)
            model = model_class(config_class(**SIZES, **extra)).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
                    else:
                        parameter.mul_(3)
            model.save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def token_path() -> Callable[..., Path]:
    """`token_path(folder, name, lengths, seed)`: a token file of random sequences, a third of each unsupervised."""

    def build(folder: Path, name: str, lengths: list[int], seed: int) -> Path:
        generator = np.random.default_rng(seed)
        sequences = []
        for row, length in enumerate(lengths):
            ids = generator.integers(0, VOCAB, length)
            sequences.append(
                EncodedSequence(
                    input_ids=tuple(map(int, ids)), loss_spans=((max(1, length // 3), length),), source_row=row + 1
                )
            )
        path = folder / f"{name}.arrow"
        write_token_file(path, sequences)
        return path

    return build


@pytest.fixture(scope="session")
def random_adapters() -> Callable[..., Checkpoint]:
    """`random_adapters(root, base, tenants)`: a checkpoint below `root` in which every matrix is random."""

    def build(root: Path, base: BaseModel, tenants: Sequence[TenantConfig]) -> Checkpoint:
        store = CheckpointStore(root, 2)
        partial = store.begin(1)
        for seed, tenant in enumerate(tenants):
            generator = torch.Generator().manual_seed(seed)
            tensors = {
                key.peft_name: torch.randn(tensor_place(base, tenant.adapter, key).shape, generator=generator) * 0.05
                for key in tensor_keys(tenant.adapter, range(base.num_layers))
            }
            save_file(tensors, adapter_file(partial, folder_name(tenant.name)))
        return read_checkpoint(store.commit(partial, {"step": 1, "tenants": {}}))

    return build


def _rank_main(function: Callable[[int], object], rank: int, world_size: int, port: int, results) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, world_size=world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        results.put((rank, function(rank), None))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - reported to the test, which fails with it
        results.put((rank, None, traceback.format_exc()))


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[int], object]], list]:
    """`run_ranks(world_size, function)`: function(rank) on real gloo ranks, forked; returns what each returned.

    Forked children may run autograd only if this process never has, so oracles run through it too.
    """
    context = multiprocessing.get_context("fork")

    def run(world_size: int, function: Callable[[int], object]) -> list:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = context.Queue()
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world_size, port, results))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        collected = {}
        try:
            for _ in range(world_size):
                rank, value, error = results.get(timeout=120)
                if error:
                    pytest.fail(f"rank {rank} failed:\n{error}")
                collected[rank] = value
        finally:
            for process in processes:
                process.join(10)
                process.kill()
        return [collected[rank] for rank in range(world_size)]

    return run
