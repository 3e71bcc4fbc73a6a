"""The logits probe: does an exported adapter, loaded as a user loads it, do what the fleet trained?

Two computations on the same frozen transformers model and the same tokens: peft with the exported folder, and
y = W x + s B A x by forward hooks, with A and B from the checkpoint and s and the module names from the run. Their
logits must agree, and differ from the base model's: keys or a scale that do not match leave a loader with the base
model's output, or a distorted one, and no error. That transformers and the fleet agree is not probed here; tests hold
it. Runs on the CPU, behind everything else, for it may run while others train: `python -m training.logits_probe`, a
request as JSON on stdin, results as JSON on stdout.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from training.adapter_probe import ProbeItem, ProbeResult
from training.parent_death import die_with_parent

NUM_TOKENS = 32
MAX_ERROR = 0.05  # of the adapter's effect: one wrong module of 200 is about 0.07, rounding 1e-4
LOAD_ERRORS = (RuntimeError, ValueError, KeyError, OSError, SafetensorError)
NO_EFFECT = "loaded with peft it leaves the base model's logits as they are: its keys do not match the model"


@torch.no_grad()
def probe(base: PreTrainedModel, item: ProbeItem) -> ProbeResult:
    """Compare one exported adapter with the fleet's; `base` is left as it was."""
    tokens_1T = torch.randint(base.config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    plain = base(tokens_1T).logits.float()
    with _fleet_adapter(base, item):
        wanted = base(tokens_1T).logits.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of keys that do not match; here the logits decide
        adapted = PeftModel.from_pretrained(base, item.exported)
    found = adapted(tokens_1T).logits.float()
    adapted.unload()
    effect = (wanted - plain).norm()
    if not torch.isfinite(found).all():
        return ProbeResult(0.0, 0.0, "loaded with peft it gives logits that are not finite")
    if effect == 0 or torch.equal(found, plain):
        return ProbeResult(0.0, 1.0, NO_EFFECT)
    error = float((found - wanted).norm() / effect)
    reason = ""
    if not error <= MAX_ERROR:
        reason = f"loaded with peft its effect on the logits is {error:.1%} off the trained adapter's"
    return ProbeResult(float(effect / plain.norm()), error, reason)


@contextmanager
def _fleet_adapter(base: PreTrainedModel, item: ProbeItem) -> Iterator[None]:
    """Adds s B A x to the output of every target module, with the checkpoint's A and B."""
    tensors = load_file(item.weights)
    hooks = []
    for name in item.targets:
        matrix_a, matrix_b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        hook = _lora_hook(matrix_a.float(), matrix_b.float(), item.scale)
        hooks.append(base.get_submodule(name).register_forward_hook(hook))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _lora_hook(matrix_a: Tensor, matrix_b: Tensor, scale: float):
    def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return (output + scale * (inputs[0].float() @ matrix_a.T @ matrix_b.T)).to(output.dtype)

    return add


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    request = json.load(sys.stdin)
    die_with_parent(request["parent_pid"])

    def load_base() -> PreTrainedModel:
        dtype = getattr(torch, request["dtype"])
        return AutoModelForCausalLM.from_pretrained(request["base_model"], dtype=dtype).eval()

    base = load_base()
    results = []
    for content in request["items"]:
        try:
            result = probe(base, ProbeItem(**content))
        except LOAD_ERRORS as error:
            lines = str(error).splitlines()
            result = ProbeResult(
                0.0, 0.0, f"peft does not load it: {type(error).__name__}: {lines[0] if lines else ''}"
            )
            base = load_base()  # peft may have left it half changed
        results.append(asdict(result))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
