"""The baseline as a process of its own: transformers + peft, tenants one after another, one adapter each.

Reads commands from standard input, answers each with a line: `train LOOP`, `save FOLDER`. Loops: `padded` pads a
tenant's batch to its longest sequence, as the usual trainers do; `grouped` sorts it by length and pads micro-batches by
at most a tenth; `alone` feeds every sequence by itself, without any padding.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from data_prep.names import folder_name
from data_prep.token_file import TokenFile
from training.adapters import initial_tensor, tensor_keys
from training.base_model import read_base_model
from training.config import BaseModelConfig, TenantConfig

MAX_PADDING = 0.1
IGNORED = -100


class TenantLoop:
    """One tenant's adapter, optimiser and batches; `steps` are the rows of every step."""

    def __init__(self, model_folder: Path, tenant: TenantConfig, tokens: Path, steps: list[list[int]]) -> None:
        base = read_base_model(BaseModelConfig(path=model_folder))
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
        adapter = tenant.adapter
        targets = list(adapter.target_modules)
        self.model = get_peft_model(model, LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets))
        self.named = {n.replace(".default", ""): p for n, p in self.model.named_parameters() if "lora_" in n}
        with torch.no_grad():
            for key in tensor_keys(adapter, range(base.num_layers)):
                self.named[key.peft_name].copy_(initial_tensor(base, tenant, key))
        self.adamw = torch.optim.AdamW(self.named.values(), lr=tenant.optimiser.learning_rate, weight_decay=0.0)
        rows = TokenFile(tokens)
        self.steps = [[_labelled(rows.row(row)) for row in step] for step in steps]

    def train(self, loop: str) -> None:
        for batch in self.steps:
            num_supervised = sum(int((labels != IGNORED).sum()) for _, labels in batch)
            for part in _micro_batches(batch, loop):
                longest = max(len(ids) for ids, _ in part)
                ids = torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in part])
                labels = torch.stack([F.pad(own, (0, longest - len(own)), value=IGNORED) for _, own in part])
                mask = torch.stack([torch.arange(longest) < len(own) for own, _ in part]).long()
                logits = self.model(ids, attention_mask=None if mask.all() else mask).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                (loss / num_supervised).backward()
            self.adamw.step()
            self.adamw.zero_grad()


def _labelled(sequence) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(sequence.input_ids.astype(np.int64))
    labels = torch.full_like(ids, IGNORED)
    for start, end in sequence.loss_spans:
        labels[start:end] = ids[start:end]
    return ids, labels


def _micro_batches(batch: list, loop: str) -> list[list]:
    if loop == "padded":
        return [batch]
    if loop == "alone":
        return [[row] for row in batch]
    parts: list[list] = []
    for row in sorted(batch, key=lambda row: -len(row[0])):
        if parts:
            grown = [*parts[-1], row]
            if sum(len(ids) for ids, _ in grown) >= (1 - MAX_PADDING) * len(grown) * len(grown[0][0]):
                parts[-1] = grown
                continue
        parts.append([row])
    return parts


def main(request: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    content = json.loads(request.read_text())
    loops = {}
    for name, tenant in content["tenants"].items():
        config = TenantConfig.model_validate(tenant["config"])
        loops[name] = TenantLoop(Path(content["model"]), config, Path(tenant["tokens"]), tenant["steps"])
    print("ready", flush=True)
    for line in sys.stdin:
        command, argument = line.split()
        for name, loop in loops.items():
            if command == "train":
                loop.train(argument)
            else:
                save_file(
                    {key: p.detach() for key, p in loop.named.items()},
                    Path(argument) / f"{folder_name(name)}.safetensors",
                )
        print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
