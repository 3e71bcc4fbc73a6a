"""The sections of a run file that data preparation reads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from jinja2 import Environment, TemplateSyntaxError, nodes
from pydantic import Field, field_validator, model_validator

from planning.config import Section

TemplateText = Annotated[str | None, Field(max_length=2**16)]


class DataFormat(StrEnum):
    """How the file stores rows; a name that ends in .gz is unpacked while reading, Parquet excepted."""

    JSONL = "jsonl"
    JSON = "json"
    JSON_BY_ID = "json_by_id"
    CSV = "csv"
    PARQUET = "parquet"


# Names that tell their format; .json is left out, because many JSONL files are called so.
FORMAT_OF_SUFFIX = {".jsonl": DataFormat.JSONL, ".csv": DataFormat.CSV, ".parquet": DataFormat.PARQUET}


class OverlongPolicy(StrEnum):
    """What happens to a row longer than `max_length`: left out and counted, cut from the right, or an error."""

    DROP = "drop"
    TRUNCATE = "truncate"
    ERROR = "error"


class DatasetConfig(Section):
    """Where a tenant's rows are and how one of them is read. There are four ways, and a data set has one of them:

    * `prompt_column` or `prompt_template`, with `response_column` or `response_template`: loss on the response. A
      column holds strings; a template is jinja2 over the row's columns (all of them also in `row`), without the line
      break that it may end with;
    * `instruction_column`: Alpaca. Column `input` may add to the instruction; the response is `response_column`, else
      the column `output` or `response`. The prompt has the wording that Alpaca models are trained with;
    * `messages_column`: chat turns `[{"role", "content"}]` for the tokenizer's chat template; loss on assistant turns;
    * `conversations_column`: ShareGPT turns `[{"from", "value"}]` (human, gpt, system, function_call, observation),
      for the chat template too; loss on gpt and function_call.

    The last two take `tools_column`, the tools that the assistant may call. `evaluation_ratio` holds out rows by a
    hash of their text: equal rows stay together, and added rows move no other.
    """

    path: Path
    format: Annotated[DataFormat, Field(title="File format; JSONL, JSON and CSV may be gzipped (.gz)")] = (
        DataFormat.JSONL
    )
    prompt_column: Annotated[str | None, Field(title="Column with the prompt")] = None
    response_column: Annotated[str | None, Field(title="Column with the response")] = None
    messages_column: Annotated[str | None, Field(title="Column with chat turns [{role, content}]")] = None
    conversations_column: Annotated[str | None, Field(title="Column with ShareGPT turns [{from, value}]")] = None
    tools_column: Annotated[str | None, Field(title="Column with the tools of a conversation")] = None
    instruction_column: Annotated[str | None, Field(title="Column with the instruction (Alpaca)")] = None
    prompt_template: Annotated[TemplateText, Field(title="Prompt as jinja2 template over the row")] = None
    response_template: Annotated[TemplateText, Field(title="Response as jinja2 template over the row")] = None
    max_length: Annotated[int | None, Field(gt=1, title="Longest sequence (tokens); empty: what the plan can hold")] = (
        None
    )
    overlong: Annotated[OverlongPolicy, Field(title="Rows longer than that: drop, truncate, or an error")] = (
        OverlongPolicy.DROP
    )
    evaluation_ratio: Annotated[float, Field(ge=0, lt=1, title="Rows held out for evaluation, as part of all rows")] = (
        0.0
    )
    max_reject_ratio: Annotated[float, Field(ge=0, le=1, title="Broken rows allowed, as part of all rows")] = 0.0
    max_drop_ratio: Annotated[float, Field(ge=0, le=1, title="Over-long rows dropped, as part of all rows")] = 0.05

    @field_validator("prompt_template", "response_template")
    @classmethod
    def _compiles(cls, template: str | None) -> str | None:
        if template is not None:
            try:
                Environment().parse(template)
            except TemplateSyntaxError as error:
                raise ValueError(f"line {error.lineno} of the template: {error.message}; correct it") from error
            except RecursionError as error:
                raise ValueError("the template is nested too deeply; simplify it") from error
        return template

    @model_validator(mode="after")
    def _one_way_to_read_a_row(self) -> Self:
        for side in ("prompt", "response"):
            if getattr(self, f"{side}_column") is not None and getattr(self, f"{side}_template") is not None:
                raise ValueError(f"give either {side}_column or {side}_template, not both")
        prompt = self.prompt_column is not None or self.prompt_template is not None
        response = self.response_column is not None or self.response_template is not None
        ways = {
            "messages_column": self.messages_column is not None,
            "conversations_column": self.conversations_column is not None,
            "instruction_column": self.instruction_column is not None,
            "prompt_column (or prompt_template)": prompt or (response and self.instruction_column is None),
        }
        given = [way for way, is_given in ways.items() if is_given]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(ways)}, not {' and '.join(given) or 'none of them'}")
        if self.instruction_column is None and not self.is_chat and not (prompt and response):
            raise ValueError("give both a prompt and a response: prompt_column and response_column, or templates")
        if self.instruction_column is not None and self.response_template is not None:
            raise ValueError("instruction_column takes a response_column, not a response_template")
        if self.tools_column is not None and not self.is_chat:
            raise ValueError("tools_column belongs to messages_column or conversations_column")
        return self

    @model_validator(mode="after")
    def _format_fits_the_name(self) -> Self:
        suffixes = self.path.suffixes
        if suffixes[-1:] == [".gz"]:
            if self.format is DataFormat.PARQUET:
                raise ValueError(f"format: {self.path} is gzipped, and Parquet compresses itself; unpack the file")
            suffixes = suffixes[:-1]
        named = FORMAT_OF_SUFFIX.get(suffixes[-1]) if suffixes else None
        if named is not None and named is not self.format:
            raise ValueError(
                f"format is {self.format.value!r}, but {self.path} is called {suffixes[-1]}; "
                f"set format: {named.value}, or rename the file"
            )
        return self

    @property
    def is_chat(self) -> bool:
        return self.messages_column is not None or self.conversations_column is not None

    @property
    def templates(self) -> dict[str, str]:
        """The row templates given, by their key."""
        texts = {"prompt_template": self.prompt_template, "response_template": self.response_template}
        return {key: text for key, text in texts.items() if text is not None}

    def required_columns(self) -> dict[str, str]:
        """Columns that at least one row must have, with the key that asks for each."""
        columns: dict[str, str] = {}
        for key, text in self.templates.items():
            columns |= dict.fromkeys(sorted(template_fields(text)), key)
        keys = [name for name in type(self).model_fields if name.endswith("_column")]
        return columns | {getattr(self, key): key for key in keys if getattr(self, key) is not None}


def template_fields(template: str) -> set[str]:
    """Names that a template reads and does not set itself. Only parses: nothing in the template is evaluated."""
    environment = Environment()
    names = list(environment.parse(template).find_all(nodes.Name))
    own = {name.name for name in names if name.ctx != "load"} | set(environment.globals)
    return {name.name for name in names} - own - {"row", "loop", "self", "caller", "varargs", "kwargs"}


class DataConfig(Section):
    """Where prepared tokens are kept, and how many processes prepare them."""

    cache_dir: Path = Path("runs/.cache")
    num_workers: Annotated[
        int, Field(ge=0, title="Dask worker processes; 0 prepares in this process. DASK_SCHEDULER_ADDRESS overrides")
    ] = 0
