"""Nouns of data preparation: rows as read, rows refused, sequences as encoded.

A row number is the 1-based line number in the tenant's file. A span is half-open, in token positions.
"""

from dataclasses import dataclass

Span = tuple[int, int]
Message = dict[str, object]
OVERLONG = "longer than dataset.max_length"  # the one reject reason that is no defect of the row


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt and the response to learn."""

    number: int
    prompt: str
    response: str
    snippet: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; `messages` hold at least `role` and `content`, both strings."""

    number: int
    messages: tuple[Message, ...]
    snippet: str


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that is not trained on, why, and how it begins."""

    row: int
    reason: str
    snippet: str


@dataclass(frozen=True, slots=True)
class EncodedSequence:
    """Tokens of one row and the positions of its label tokens.

    `loss_spans` rise, do not touch and never hold position 0, which no token predicts. `source_row` 0 means that the
    sequence comes from no file.
    """

    input_ids: tuple[int, ...]
    loss_spans: tuple[Span, ...]
    source_row: int = 0
    file_index: int = 0

    def __post_init__(self) -> None:
        previous_end = 0
        for start, end in self.loss_spans:
            if not previous_end < start < end <= len(self.input_ids):
                raise ValueError(f"loss spans {self.loss_spans} do not fit {len(self.input_ids)} tokens")
            previous_end = end

    @property
    def num_supervised_tokens(self) -> int:
        return sum(end - start for start, end in self.loss_spans)
