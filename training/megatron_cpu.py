"""Lets megatron.core 0.16 run on a host without CUDA.

Six of its modules ask `torch.cuda` for the current device or name "cuda" outright; each gets a stand-in for its name
`torch` that answers with the CPU. (A global TorchFunctionMode does the same and costs 23 % of a step.) Activation
recompute saves and restores a CUDA random state; with dropout 0 nothing is drawn, so that becomes a no-op.
"""

import types

import megatron.core.models.common.embeddings.rotary_pos_embedding as rotary
import megatron.core.pipeline_parallel.p2p_communication as p2p
import megatron.core.pipeline_parallel.schedules as schedules
import megatron.core.tensor_parallel.layers as layers
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as random_state
import megatron.core.utils as core_utils
import torch


class _CpuTorch(types.ModuleType):
    """`torch` whose CUDA device is the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(
            current_device=lambda: torch.device("cpu"),
            synchronize=lambda *_args: None,
            current_stream=lambda *_args: None,
            is_available=lambda: False,
        )

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, **kwargs) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return torch.zeros(*args, **kwargs)


def run_megatron_on_cpu() -> None:
    """Redirect megatron.core's CUDA calls to the CPU, for this process. Calling it again changes nothing."""
    stand_in = _CpuTorch()
    for module in (schedules, p2p, rotary, mappings, layers, core_utils):
        module.torch = stand_in
    random_state._get_cuda_rng_state = lambda *_args, **_kwargs: None
    random_state._set_cuda_rng_state = lambda *_args, **_kwargs: None
    random_state.get_cuda_rng_tracker().set_states({"model-parallel-rng": None})
