"""The journal survives a kill at any byte."""

from pathlib import Path

from training.journal import Journal, effective_steps, overhead_gpu_seconds, read_journal


def step(number: int, gpu_seconds: float) -> dict:
    return {"event": "step", "step": number, "gpu_seconds": gpu_seconds}


def test_a_torn_last_line_is_passed_over_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with Journal(path) as journal:
        journal.append(step(0, 1.0))
        journal.append(step(1, 2.0))
    whole = path.read_bytes()
    for cut in range(len(whole.split(b"\n")[0]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_journal(path) == [step(0, 1.0)]
    with Journal(path) as journal:
        journal.append(step(1, 3.0))
    assert read_journal(path) == [step(0, 1.0), step(1, 3.0)]


def test_a_redone_step_counts_once_and_its_first_try_is_overhead() -> None:
    records = [
        {"event": "launch", "step": 0, "overhead_gpu_seconds": 10.0},
        step(0, 1.0),
        step(1, 2.0),
        {"event": "launch", "step": 1, "overhead_gpu_seconds": 20.0},
        step(1, 4.0),
    ]
    assert effective_steps(records) == [step(0, 1.0), step(1, 4.0)]
    assert overhead_gpu_seconds(records) == 32.0


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none.jsonl") == []
