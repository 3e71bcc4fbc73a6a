"""Conversations: one render of the whole, and where in it the assistant speaks.

A template that marks assistant turns with {% generation %} says so itself. For any other template, the turn of
message i begins after render(messages[:i], generation prompt) and ends with render(messages[:i+1]), and both are
checked to be prefixes of the full render, because templates may rewrite earlier turns (Qwen3 shows a think block only
in the last turn). Where the second check fails, the turn ends with its first end-of-turn token in the full render.
A row that fits neither is refused, never guessed.
"""

from collections.abc import Sequence

from data_prep.errors import RowError
from data_prep.tokenizer import Tokenizer
from data_prep.types import Message, Span


def encode_chat(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the full render, and 1 for each token that the assistant says, end-of-turn tokens included."""
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    if tokenizer.marks_assistant_turns:
        return tokenizer.encode_marked(messages)
    text = tokenizer.render(messages)
    turns = [
        _turn_characters(messages, index, text, tokenizer)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    input_ids, offsets = tokenizer.encode_with_offsets(text)
    return input_ids, _overlap_mask(offsets, turns)


def _turn_characters(messages: Sequence[Message], index: int, text: str, tokenizer: Tokenizer) -> Span:
    """Half-open range of characters of `text`, the full render, that assistant message `index` says."""
    before = tokenizer.render(messages[:index]) if index > 0 else ""
    opened = tokenizer.render(messages[:index], add_generation_prompt=True) if index > 0 else ""
    closed = tokenizer.render(messages[: index + 1])
    if not text.startswith(opened):
        raise _unlocated()
    start = len(opened)
    end_token = next((token for token in tokenizer.added_tokens if closed.rstrip().endswith(token)), "")
    content = str(messages[index]["content"]).strip()
    if text.startswith(closed):
        # Whitespace between an end-of-turn token and the next turn is the template's, not the assistant's.
        end = len(closed.rstrip()) if end_token else len(closed)
    elif end_token and end_token not in content and end_token in text[start:]:
        end = text.index(end_token, start) + len(end_token)
    else:
        raise _unlocated()
    if opened == before:  # the template has no generation prompt: its header stands between `start` and the content
        said = text[start:end].removesuffix(end_token).rstrip()
        if not said.endswith(content):
            raise _unlocated()
        start += len(said) - len(content)
    return start, end


def _unlocated() -> RowError:
    return RowError(
        "assistant turns cannot be located in the chat template's render; "
        "mark them with {% generation %} in the tokenizer's chat template"
    )


def _overlap_mask(offsets: Sequence[Span], turns: Sequence[Span]) -> list[int]:
    """1 for each token that overlaps a turn, the rule of transformers' assistant mask; both in rising order."""
    mask = [0] * len(offsets)
    turn = 0
    for token, (start, end) in enumerate(offsets):
        while turn < len(turns) and start >= turns[turn][1]:
            turn += 1
        if turn == len(turns):
            break
        mask[token] = int(end > turns[turn][0])
    return mask
