"""One row becomes tokens and the positions of its label tokens.

Prompt and response are tokenised separately and then joined, so that the prompt has the same tokens with and without
its response: BOS (if the tokenizer has one) + prompt + response + EOS. The labels are the response and the final EOS,
told apart by position, so EOS is learnt even where it is also the padding token. Conversations: see `chat`.
"""

from data_prep.chat import encode_chat
from data_prep.config import DatasetConfig, OverlongPolicy
from data_prep.errors import DatasetError, RowError
from data_prep.tokenizer import Tokenizer
from data_prep.types import OVERLONG, ChatRow, EncodedSequence, PromptRow, Span

# Part of the cache key: raise it with every change that gives a row other tokens or other spans.
ENCODER_VERSION = 1


def check_tokenizer(tokenizer: Tokenizer, dataset: DatasetConfig) -> None:
    """Raises DatasetError when the tokenizer lacks what the data set's rows need."""
    if dataset.messages_column is not None and tokenizer.chat_template is None:
        raise DatasetError(
            f"dataset.messages_column is {dataset.messages_column!r}, but the tokenizer has no chat template; "
            "add chat_template.jinja to base_model.path, or use prompt_column and response_column"
        )
    if dataset.messages_column is None and tokenizer.eos_id is None:
        raise DatasetError(
            "the tokenizer has no eos_token, so a response would have no end; set it in tokenizer_config.json"
        )


def encode_row(
    row: PromptRow | ChatRow, tokenizer: Tokenizer, dataset: DatasetConfig, longest_tokens: int | None
) -> EncodedSequence:
    """Tokens and label positions of a row.

    Raises RowError when the row has no label, or more than `longest_tokens` tokens and the policy is `drop`;
    DatasetError when it is too long and the policy is `error`.
    """
    if isinstance(row, ChatRow):
        input_ids, mask = encode_chat(row.messages, tokenizer)
        if tokenizer.bos_id is not None and input_ids[:2] == [tokenizer.bos_id] * 2:
            raise RowError("the rendered conversation begins with two BOS tokens")
    else:
        input_ids, mask = _encode_prompt(row, tokenizer)
    if longest_tokens is not None and len(input_ids) > longest_tokens:
        if dataset.overlong is OverlongPolicy.ERROR:
            raise DatasetError(
                f"row {row.number} of {dataset.path} has {len(input_ids)} tokens, more than dataset.max_length "
                f"{longest_tokens}; raise it, shorten the row, or set dataset.overlong to 'drop'"
            )
        raise RowError(OVERLONG)
    loss_spans = _spans(mask)
    if not loss_spans:
        raise RowError("no token to learn")
    return EncodedSequence(tuple(input_ids), loss_spans, source_row=row.number)


def _encode_prompt(row: PromptRow, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    prompt, response = tokenizer.encode(row.prompt), tokenizer.encode(row.response)
    if tokenizer.bos_id is not None and prompt[:1] != [tokenizer.bos_id]:
        prompt = [tokenizer.bos_id, *prompt]
    if response and response[-1] != tokenizer.eos_id:
        assert tokenizer.eos_id is not None
        response = [*response, tokenizer.eos_id]
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def _spans(mask: list[int]) -> tuple[Span, ...]:
    """Maximal runs of ones as half-open spans; position 0 is never a label, because no token comes before it."""
    labels = [0, *mask[1:], 0]
    edges = [position for position in range(1, len(labels)) if labels[position] != labels[position - 1]]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
