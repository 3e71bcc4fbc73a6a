"""Nouns of data preparation: rows as read, rows refused, sequences as encoded.

A row number is what a person finds the row by: in JSONL and CSV the 1-based number of the line where the row begins, in
the other formats its 1-based place in the file. A span is half-open, in token positions.
"""

from dataclasses import dataclass

Span = tuple[int, int]
Message = dict[str, object]

# The reject reasons that are no defect of the row.
OVERLONG = "longer than dataset.max_length"
OVERLONG_PROMPT = "no token to learn within dataset.max_length"


@dataclass(frozen=True, slots=True)
class Record:
    """A row as its file has it; `num_bytes` is about its size there."""

    number: int
    values: dict[str, object]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt and the response to learn."""

    number: int
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; `messages` hold at least `role` and `content`, both strings. `tools` are function schemas."""

    number: int
    messages: tuple[Message, ...]
    tools: tuple[object, ...] | None = None


Row = PromptRow | ChatRow


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
