"""Errors of data preparation."""

from planning.errors import InputError


class DatasetError(InputError):
    """A tenant's data set, or the tokenizer that reads it, cannot be used. Never carries text of a row."""


class RowError(InputError):
    """One row cannot be trained on: `reason` is counted and shown, `detail` may hold row text and goes into the
    rejects file only."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail
