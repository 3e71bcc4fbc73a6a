"""The demo's tokenizer and base model: a small Llama, pre-trained for some seconds on texts like the tenants'.

On random weights adapters learn too little to see: in 24 steps their losses fall from 7.2 to 6 or 7 and no further,
because the output layer stays frozen. The number of threads is fixed, so that every byte follows from SEED.
"""

import random
from pathlib import Path

import torch
from tenant_texts import SEED, TENANTS, as_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 1500
PRETRAIN_STEPS = 80
PRETRAIN_SEQUENCES = 8
PRETRAIN_TOKENS = 128
PRETRAIN_LEARNING_RATE = 4e-3

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with 4 layers and seeded random weights; its vocabulary is padded to a multiple of 8."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-len(tokenizer) // 8) * 8,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Trains all weights on random windows of the token stream; returns the mean loss of the last ten steps."""
    draw = torch.Generator().manual_seed(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=PRETRAIN_LEARNING_RATE, weight_decay=0.0)
    warm_up_and_decay = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, PRETRAIN_LEARNING_RATE, total_steps=PRETRAIN_STEPS
    )
    losses: list[float] = []
    for _ in range(PRETRAIN_STEPS):
        starts = torch.randint(len(stream) - PRETRAIN_TOKENS, (PRETRAIN_SEQUENCES,), generator=draw)
        tokens_BT = torch.stack([stream[start : start + PRETRAIN_TOKENS] for start in starts])
        loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        warm_up_and_decay.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def write_base(folder: Path) -> float:
    """Write tokenizer and base model in Hugging Face form; returns the base model's last pre-training loss."""
    torch.set_num_threads(1)
    disable_progress_bar()
    documents = [as_text(row) for tenant in TENANTS for row in tenant.rows("pretrain")]
    tokenizer = train_tokenizer(documents)
    random.Random(SEED).shuffle(documents)
    ids = [[tokenizer.bos_token_id, *tokenizer.encode(text), tokenizer.eos_token_id] for text in documents]
    model = build_model(tokenizer)
    loss = pretrain(model, torch.tensor([token for document in ids for token in document]))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return loss
