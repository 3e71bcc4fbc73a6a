"""The sections of a run file that data preparation reads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from planning.config import Section


class DataFormat(StrEnum):
    """How the file stores rows."""

    JSONL = "jsonl"


class OverlongPolicy(StrEnum):
    """What happens to a row longer than `max_length`."""

    DROP = "drop"
    ERROR = "error"


class DatasetConfig(Section):
    """Where a tenant's rows are and which columns hold them.

    Either `prompt_column` and `response_column` name two string columns, or `messages_column` names a column of
    chat turns `[{"role", "content"}]`, rendered with the tokenizer's chat template; loss falls on assistant turns.
    """

    path: Path
    format: DataFormat = DataFormat.JSONL
    prompt_column: str | None = None
    response_column: str | None = None
    messages_column: str | None = None
    max_length: Annotated[int | None, Field(gt=1, title="Longest sequence (tokens); empty: what the plan can hold")] = (
        None
    )
    overlong: OverlongPolicy = OverlongPolicy.DROP
    max_reject_ratio: Annotated[float, Field(ge=0, le=1, title="Broken rows allowed, as part of all rows")] = 0.0
    max_drop_ratio: Annotated[float, Field(ge=0, le=1, title="Over-long rows dropped, as part of all rows")] = 0.05

    @model_validator(mode="after")
    def _one_way_to_read_a_row(self) -> Self:
        pair = (self.prompt_column is not None, self.response_column is not None)
        if self.messages_column is not None and any(pair):
            raise ValueError("give either messages_column or prompt_column and response_column, not both")
        if self.messages_column is None and not all(pair):
            raise ValueError("give messages_column, or both prompt_column and response_column")
        return self


class DataConfig(Section):
    """Where prepared tokens are kept, and how many processes prepare them."""

    cache_dir: Path = Path("runs/.cache")
    num_workers: Annotated[
        int, Field(ge=0, title="Dask worker processes; 0 prepares in this process. DASK_SCHEDULER_ADDRESS overrides")
    ] = 0
