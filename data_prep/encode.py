"""Records become tokens and the positions of their label tokens, a batch at a time.

Prompt and response are tokenised separately and then joined, so that the prompt has the same tokens with and without
its response: BOS (if the tokenizer has one) + prompt + response + EOS. The labels are the response and the final EOS,
told apart by position, so EOS is learnt even where it is also the padding token. Conversations: see `chat`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.chat import assistant_turns, overlapping_tokens
from data_prep.config import DatasetConfig, OverlongPolicy
from data_prep.errors import DatasetError, RowError
from data_prep.line_formats import SNIPPET_CHARACTERS
from data_prep.render import RenderProcess, RenderTask
from data_prep.shapes import is_held_out, shape_row
from data_prep.tokenizer import ChatTemplates, Tokenizer
from data_prep.types import OVERLONG, OVERLONG_PROMPT, ChatRow, EncodedSequence, PromptRow, Record, Reject, Row, Span

# Part of the cache key: raise it with every change that gives a row other tokens or other spans.
ENCODER_VERSION = 2


@dataclass(slots=True)
class EncodedRows:
    """What became of a batch: sequences to train on, sequences held out, and rejects, each in row order."""

    train: list[EncodedSequence] = field(default_factory=list)
    evaluation: list[EncodedSequence] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    num_truncated: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a row and the positions of its label tokens."""

    input_ids: list[int]
    loss_spans: list[Span]


class Encoder:
    """Encodes batches of one data set; templates run in `renderer`.

    Raises DatasetError when the tokenizer lacks what the data set's rows need.
    """

    def __init__(self, tokenizer: Tokenizer, dataset: DatasetConfig, renderer: RenderProcess) -> None:
        self._tokenizer = tokenizer
        self._dataset = dataset
        self._renderer = renderer
        self._chat = _chat_templates(tokenizer, dataset) if dataset.is_chat else None
        if not dataset.is_chat and tokenizer.eos_id is None:
            raise DatasetError(
                "the tokenizer has no eos_token, so a response would have no end; set it in tokenizer_config.json"
            )

    def encode(self, batch: Sequence[Record | Reject]) -> EncodedRows:
        """Raises DatasetError for a row that is too long under the policy `error`, and for an unusable template."""
        records = [item for item in batch if isinstance(item, Record)]
        rows = self._rows(records)
        outcomes = iter(zip(rows, self._tokens(rows), strict=True))
        encoded = EncodedRows()
        for item in batch:
            if isinstance(item, Reject):
                encoded.rejects.append(item)
                continue
            row, tokens = next(outcomes)
            try:
                self._add(encoded, row, tokens)
            except RowError as error:
                detail = f"{error.detail} | " if error.detail else ""
                encoded.rejects.append(Reject(item.number, error.reason, detail + _snippet(item.values)))
        return encoded

    def _add(self, encoded: EncodedRows, row: Row | RowError, tokens: Tokens | RowError) -> None:
        if isinstance(row, RowError):
            raise row
        if isinstance(tokens, RowError):
            raise tokens
        limited = self._limited(row.number, tokens)
        sequence = EncodedSequence(tuple(limited.input_ids), tuple(limited.loss_spans), source_row=row.number)
        ratio = self._dataset.evaluation_ratio
        held_out = ratio > 0 and is_held_out(row, ratio)
        (encoded.evaluation if held_out else encoded.train).append(sequence)
        encoded.num_truncated += len(limited.input_ids) < len(tokens.input_ids)

    def _limited(self, number: int, tokens: Tokens) -> Tokens:
        if not tokens.loss_spans:
            raise RowError("no token to learn")
        longest, num_tokens = self._dataset.max_length, len(tokens.input_ids)
        if longest is None or num_tokens <= longest:
            return tokens
        if self._dataset.overlong is OverlongPolicy.DROP:
            raise RowError(OVERLONG)
        if self._dataset.overlong is OverlongPolicy.ERROR:
            raise DatasetError(
                f"row {number} of {self._dataset.path} has {num_tokens} tokens, more than dataset.max_length "
                f"{longest}; raise it, shorten the row, or set dataset.overlong to 'drop' or 'truncate'"
            )
        spans = [(start, min(end, longest)) for start, end in tokens.loss_spans if start < longest]
        if not spans:
            raise RowError(OVERLONG_PROMPT)
        return Tokens(tokens.input_ids[:longest], spans)

    def _rows(self, records: Sequence[Record]) -> list[Row | RowError]:
        rows: list[Row | RowError] = []
        for record, texts in zip(records, self._rendered(records), strict=True):
            if isinstance(texts, RowError):
                rows.append(texts)
                continue
            reads_tool_calls = self._chat is not None and self._chat.read_tool_calls(self._has_tools)
            try:
                rows.append(shape_row(record, self._dataset, texts, reads_tool_calls))
            except RowError as error:
                rows.append(error)
        return rows

    def _rendered(self, records: Sequence[Record]) -> list[Mapping[str, str] | RowError]:
        """The texts of the data set's templates for each record."""
        templates = self._dataset.templates
        if not templates:
            return [{} for _ in records]
        task = RenderTask({"templates": templates}, " or ".join(f"dataset.{key}" for key in templates))
        numbers = [record.number for record in records]
        answers = self._renderer.render(task, numbers, [record.values for record in records])
        return [answer if isinstance(answer, RowError) else answer["texts"] for answer in answers]

    def _tokens(self, rows: Sequence[Row | RowError]) -> list[Tokens | RowError]:
        chats = [row for row in rows if isinstance(row, ChatRow)]
        prompts = [row for row in rows if isinstance(row, PromptRow)]
        encoded = iter(self._chat_tokens(chats, self._chat) if self._chat is not None else self._prompt_tokens(prompts))
        return [row if isinstance(row, RowError) else next(encoded) for row in rows]

    def _prompt_tokens(self, rows: Sequence[PromptRow]) -> list[Tokens | RowError]:
        prompts = self._tokenizer.encode_all([row.prompt for row in rows])
        responses = self._tokenizer.encode_all([row.response for row in rows])
        return [self._joined(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def _joined(self, prompt: list[int], response: list[int]) -> Tokens:
        bos_id, eos_id = self._tokenizer.bos_id, self._tokenizer.eos_id
        assert eos_id is not None
        if bos_id is not None and prompt[:1] != [bos_id]:
            prompt = [bos_id, *prompt]
        if response and response[-1] != eos_id:
            response = [*response, eos_id]
        first, end = max(1, len(prompt)), len(prompt) + len(response)  # no token comes before position 0
        return Tokens(prompt + response, [(first, end)] if first < end else [])

    def _chat_tokens(self, rows: Sequence[ChatRow], templates: ChatTemplates) -> list[Tokens | RowError]:
        items = [{"messages": row.messages, "tools": row.tools} for row in rows]
        renders = self._renderer.render(templates.task(self._has_tools), [row.number for row in rows], items)
        texts = ["" if isinstance(render, RowError) else render["text"] for render in renders]
        tokens: list[Tokens | RowError] = []
        for row, render, (input_ids, offsets) in zip(
            rows, renders, self._tokenizer.encode_all_with_offsets(texts), strict=True
        ):
            try:
                if isinstance(render, RowError):
                    raise render
                if not any(message["role"] == "assistant" for message in row.messages):
                    raise RowError("no assistant turn")
                turns = assistant_turns(row.messages, render, self._tokenizer.added_tokens)
                if self._tokenizer.bos_id is not None and input_ids[:2] == [self._tokenizer.bos_id] * 2:
                    raise RowError("the rendered conversation begins with two BOS tokens")
            except RowError as error:
                tokens.append(error)
            else:
                tokens.append(Tokens(input_ids, overlapping_tokens(offsets, turns)))
        return tokens

    @property
    def _has_tools(self) -> bool:
        return self._dataset.tools_column is not None


def _chat_templates(tokenizer: Tokenizer, dataset: DatasetConfig) -> ChatTemplates:
    key = "conversations_column" if dataset.messages_column is None else "messages_column"
    if tokenizer.chat_templates is None:
        raise DatasetError(
            f"dataset.{key} is {getattr(dataset, key)!r}, but the tokenizer has no chat template; "
            "add chat_template.jinja to base_model.path, or use prompt_column and response_column"
        )
    if dataset.tools_column is not None and not tokenizer.chat_templates.read_tools:
        raise DatasetError(
            f"dataset.tools_column is {dataset.tools_column!r}, but the tokenizer's chat template reads no tools; "
            "remove tools_column, or give base_model.path a chat template that does"
        )
    return tokenizer.chat_templates


def _snippet(values: Mapping[str, object]) -> str:
    """How a row begins. Long strings are cut first, so that a large row costs no more than a small one."""
    shown = {key: value[:SNIPPET_CHARACTERS] if isinstance(value, str) else value for key, value in values.items()}
    return json.dumps(shown, ensure_ascii=False, default=str)[:SNIPPET_CHARACTERS]
