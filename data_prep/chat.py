"""Conversations: one render of the whole, and where in it the assistant speaks.

A template that marks assistant turns with {% generation %} says so itself. For any other template, the turn of
message i begins after render(messages[:i], generation prompt) and ends with render(messages[:i+1]). Both are checked
to be prefixes of the full render, because templates treat a last turn differently (Qwen3 opens it with a think block,
Phi-4 closes it with EOS, DeepSeek-R1 prompts it to think). Where the first check fails, or the template has no
generation prompt, the turn begins with its content; where the second fails, it ends with its end-of-turn token.
A row that fits none of this is refused, never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.errors import RowError
from data_prep.tokenizer import Tokenizer
from data_prep.types import Message, Span


def encode_chat(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the full render, and 1 for each token that the assistant says, end-of-turn tokens included.

    Raises RowError when the template refuses the conversation or its assistant turns cannot be located.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    if tokenizer.marks_assistant_turns:
        return tokenizer.encode_marked(messages)
    text = tokenizer.render(messages)
    turns = _Render(messages, text, tokenizer).assistant_turns()
    input_ids, offsets = tokenizer.encode_with_offsets(text)
    return input_ids, _overlap_mask(offsets, turns)


@dataclass(frozen=True, slots=True)
class _Render:
    """A conversation and its full render; positions and spans are in characters of `text`."""

    messages: Sequence[Message]
    text: str
    tokenizer: Tokenizer

    def assistant_turns(self) -> list[Span]:
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        opened = [self._opened(index) for index in indices]
        limits = [start for start, _ in opened[1:]] + [len(self.text)]
        turns = []
        for index, (start, holds_header), limit in zip(indices, opened, limits, strict=True):
            closed = self.tokenizer.render(self.messages[: index + 1])
            end_token = self._end_token(closed)
            end = self._end(index, closed, end_token, (start, limit))
            turns.append((self._content_start(index, end_token, (start, end)) if holds_header else start, end))
        return turns

    def _opened(self, index: int) -> tuple[int, bool]:
        """Where message `index` begins, and whether its header still stands between there and what it says."""
        if index == 0:
            return 0, True
        before = self.tokenizer.render(self.messages[:index])
        opened = self.tokenizer.render(self.messages[:index], add_generation_prompt=True)
        if opened != before and self.text.startswith(opened):
            return len(opened), False
        if self.text.startswith(before):
            return len(before), True
        raise _unlocated()

    def _end_token(self, closed: str) -> str:
        """The first of the added tokens that close a conversation, or "" if text closes it."""
        token = ""
        while closing := next((t for t in self.tokenizer.added_tokens if closed.rstrip().endswith(t)), ""):
            token = closing
            closed = closed.rstrip().removesuffix(closing)
        return token

    def _end(self, index: int, closed: str, end_token: str, window: Span) -> int:
        if self.text.startswith(closed):
            # Whitespace between an end-of-turn token and the next turn is the template's, not the assistant's.
            return len(closed.rstrip()) if end_token else len(closed)
        start, limit = window
        position = self.text.find(end_token, start, limit)
        if not end_token or position < 0 or end_token in self._content(index):
            raise _unlocated()
        end = position + len(end_token)
        if index + 1 < len(self.messages) and self._content(index + 1) not in self.text[end:limit]:
            raise _unlocated()
        return end

    def _content_start(self, index: int, end_token: str, turn: Span) -> int:
        start, end = turn
        said = self.text[start:end]
        if end_token:
            said = said[: said.rindex(end_token)]
        content = self._content(index)
        if not said.rstrip().endswith(content):
            raise _unlocated()
        return start + len(said.rstrip()) - len(content)

    def _content(self, index: int) -> str:
        return str(self.messages[index]["content"]).strip()


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
