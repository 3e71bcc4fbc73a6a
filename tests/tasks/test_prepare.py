"""A run that goes on must find the data that it began with, held-out rows included."""

from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from data_prep.config import DatasetConfig
from data_prep.prepare import Outcome, PreparedTenant, PrepareRequest
from planning.errors import InputError
from tasks.prepare import prepare
from tasks.run_folder import RunFolder

NUM_ROWS = 10


@pytest.fixture
def prepare_rows(tokenizer_folder: Path, jsonl: Callable[..., Path], tmp_path: Path) -> Callable[..., list[Outcome]]:
    """`prepare_rows(changed)`: prepares ten rows in one run folder; `changed` is the row with another answer."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()

    def run(changed: int | None = None) -> list[Outcome]:
        answers = {row: f"answer {row}" for row in range(NUM_ROWS)} | ({} if changed is None else {changed: "no"})
        path = jsonl([{"question": f"question {row}", "answer": answer} for row, answer in answers.items()])
        dataset = DatasetConfig(path=path, prompt_column="question", response_column="answer", evaluation_ratio=0.4)
        request = PrepareRequest("maths", dataset, tokenizer_folder, tmp_path / "cache", folder.path)
        with disable_run_logger():
            return prepare.fn([request], 0, allow_failures=False, folder=folder)

    return run


def test_a_changed_row_is_refused_whether_it_is_trained_on_or_held_out(
    prepare_rows: Callable[..., list[Outcome]],
) -> None:
    (before,) = prepare_rows()
    assert isinstance(before, PreparedTenant)
    assert 0 < before.num_evaluation_rows < NUM_ROWS
    for row in range(NUM_ROWS):
        with pytest.raises(InputError, match="'maths': its data or the tokenizer changed since this run started"):
            prepare_rows(changed=row)
    assert prepare_rows() == [before]
