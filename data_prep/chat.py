"""Conversations: one render of the whole, and where in it the assistant speaks.

A template that marks assistant turns with {% generation %} says so itself. For any other template, the turn of
message i begins after render(messages[:i], generation prompt) and ends with render(messages[:i+1]). Both are checked
to be prefixes of the full render, because templates treat a last turn differently (Qwen3 opens it with a think block,
Phi-4 closes it with EOS, DeepSeek-R1 prompts it to think). Where the first check fails, or the template has no
generation prompt, the turn begins with its content; where the second fails, it ends with its end-of-turn token.
A row that fits none of this is refused, never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.errors import RowError
from data_prep.types import Message, Span


def assistant_turns(messages: Sequence[Message], render: Mapping[str, Any], added_tokens: Sequence[str]) -> list[Span]:
    """What the assistant says, end-of-turn tokens included, as rising spans in characters of the full render.

    `render` is what `render_process` answers. Raises RowError when the turns cannot be located in it.
    """
    turns = render["turns"]
    if all(len(turn) == 2 for turn in turns):  # marked by the template
        return [(start, end) for start, end in turns if start < end]
    return _Render(messages, render["text"], turns, added_tokens).assistant_turns()


def overlapping_tokens(offsets: Sequence[Span], turns: Sequence[Span]) -> list[Span]:
    """Tokens that overlap a turn, the rule of transformers' assistant mask, as spans that rise and do not touch.

    Offsets and turns rise. Position 0 is never a label, because no token comes before it.
    """
    spans: list[Span] = []
    token = 1
    for start, end in turns:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        first = token
        while token < len(offsets) and offsets[token][0] < end:
            token += 1
        if spans and spans[-1][1] == first < token:
            spans[-1] = (spans[-1][0], token)
        elif first < token:
            spans.append((first, token))
    return spans


@dataclass(frozen=True, slots=True)
class _Render:
    """A conversation and its renders; positions and spans are in characters of `text`.

    `parts` holds for each assistant turn the renders [before, opened, closed], as length where they begin `text`.
    """

    messages: Sequence[Message]
    text: str
    parts: Sequence[Sequence[int | str]]
    added_tokens: Sequence[str]

    def assistant_turns(self) -> list[Span]:
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        opened = [self._opened(index, *parts[:2]) for index, parts in zip(indices, self.parts, strict=True)]
        limits = [start for start, _ in opened[1:]] + [len(self.text)]
        turns = []
        for index, parts, (start, holds_header), limit in zip(indices, self.parts, opened, limits, strict=True):
            closed = parts[2]
            end_token = self._end_token(self.text[:closed] if isinstance(closed, int) else closed)
            end = self._end(index, closed, end_token, (start, limit))
            turns.append((self._content_start(index, end_token, (start, end)) if holds_header else start, end))
        return turns

    def _opened(self, index: int, before: int | str, opened: int | str) -> tuple[int, bool]:
        """Where message `index` begins, and whether its header still stands between there and what it says."""
        if index == 0:
            return 0, True
        if isinstance(opened, int) and opened != before:
            return opened, False
        if isinstance(before, int):
            return before, True
        raise _unlocated()

    def _end_token(self, closed: str) -> str:
        """The first of the added tokens that close a conversation, or "" if text closes it."""
        token = ""
        while closing := next((t for t in self.added_tokens if closed.rstrip().endswith(t)), ""):
            token = closing
            closed = closed.rstrip().removesuffix(closing)
        return token

    def _end(self, index: int, closed: int | str, end_token: str, window: Span) -> int:
        if isinstance(closed, int):
            # Whitespace between an end-of-turn token and the next turn is the template's, not the assistant's.
            return len(self.text[:closed].rstrip()) if end_token else closed
        start, limit = window
        position = self.text.find(end_token, start, limit)
        if not end_token or position < 0 or end_token in str(self.messages[index]):
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
        if not said.rstrip().endswith(content) or "tool_calls" in self.messages[index]:
            raise _unlocated()
        return start + len(said.rstrip()) - len(content)

    def _content(self, index: int) -> str:
        return str(self.messages[index]["content"]).strip()


def _unlocated() -> RowError:
    return RowError(
        "assistant turns cannot be located in the chat template's render; "
        "mark them with {% generation %} in the tokenizer's chat template"
    )
