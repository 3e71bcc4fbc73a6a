import os
import time

import pytest

from data_prep.prepare import prepare_tenant
from data_prep.prune import prune_cache
from data_prep.token_file import TokenFile

DAY = 86400
ROW = {"question": "Why?", "answer": "So."}


@pytest.fixture
def entries(request_for, jsonl):
    """Folders of two cache entries, both last used ten days ago."""
    folders = []
    for name in ("a", "b"):
        done = prepare_tenant(request_for(jsonl([ROW | {"name": name}], f"{name}.jsonl")))
        folder = done.token_path.parent
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time.time() - 10 * DAY,) * 2)
        folders.append(folder)
    return folders


def test_entries_unused_for_long_are_removed_and_their_bytes_counted(entries, tmp_path):
    num_bytes = sum(path.stat().st_size for folder in entries for path in folder.iterdir())
    report = prune_cache(tmp_path / "cache", 9, [])
    assert sorted(report.removed) == sorted(entries)
    assert (report.num_kept, report.freed_bytes) == (0, num_bytes)
    assert list((tmp_path / "cache").iterdir()) == []


def test_entries_used_lately_or_in_use_stay(entries, tmp_path, request_for):
    assert prune_cache(tmp_path / "cache", 11, []).num_kept == 2
    report = prune_cache(tmp_path / "cache", 0, [entries[0] / "tokens.arrow"])
    assert (report.removed, report.num_kept) == ((entries[1],), 1)
    prepare_tenant(request_for(tmp_path / "a.jsonl"))
    assert prune_cache(tmp_path / "cache", 1, []).num_kept == 1


def test_what_is_no_entry_is_left_alone(tmp_path):
    cache = tmp_path / "cache"
    (cache / "profiles").mkdir(parents=True)
    (cache / ("g" * 64)).mkdir()
    assert prune_cache(cache, 0, []).num_kept == 0
    assert len(list(cache.iterdir())) == 2
    assert prune_cache(tmp_path / "none", 0, []).removed == ()


def test_a_removed_entry_that_is_mapped_stays_readable_and_is_built_anew_when_asked_for(entries, tmp_path, request_for):
    tokens = TokenFile(entries[0] / "tokens.arrow")
    before = tokens.row(0).input_ids.tolist()
    prune_cache(tmp_path / "cache", 0, [])
    assert tokens.row(0).input_ids.tolist() == before
    assert TokenFile(prepare_tenant(request_for(tmp_path / "a.jsonl")).token_path).row(0).input_ids.tolist() == before


def test_an_entry_whose_removal_was_interrupted_is_removed_next_time(entries, tmp_path):
    entries[0].rename(entries[0].with_name(f".pruned-{entries[0].name}"))
    assert len(prune_cache(tmp_path / "cache", 9, []).removed) == 2
    assert list((tmp_path / "cache").iterdir()) == []
