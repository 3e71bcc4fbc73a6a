import stat
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from data_prep import token_file
from data_prep.errors import DatasetError
from data_prep.histogram import measure_lengths, read_histogram, workload_arrays, write_histogram
from data_prep.names import folder_name
from data_prep.prepare import PreparedTenant
from data_prep.token_file import TokenFile, write_token_file
from data_prep.types import EncodedSequence

SEQUENCES = [
    EncodedSequence((5, 6, 7), ((1, 3),), source_row=1),
    EncodedSequence((2**32 - 1, 0), ((1, 2),), source_row=4),
    EncodedSequence(tuple(range(10)), ((2, 4), (6, 7), (9, 10)), source_row=5, file_index=1),
]


def prepared(tenant, path):
    return PreparedTenant(tenant, path, "", 1, 0, {}, path, 1)


def test_sequences_come_back_from_a_token_file_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "BATCH_ROWS", 2)
    path = tmp_path / "tokens.arrow"
    write_token_file(path, iter(SEQUENCES), key="abc")
    tokens = TokenFile(path)
    assert tokens.num_rows == 3
    assert tokens.key == "abc"
    assert [tuple(tokens.row(i).input_ids.tolist()) for i in range(3)] == [s.input_ids for s in SEQUENCES]
    assert [tokens.row(i).loss_spans for i in range(3)] == [s.loss_spans for s in SEQUENCES]
    assert tokens.num_tokens.dtype == np.int64
    assert tokens.num_tokens.tolist() == [3, 2, 10]
    assert tokens.num_supervised_tokens.tolist() == [2, 1, 4]
    for index in (-1, 3):
        with pytest.raises(IndexError):
            tokens.row(index)


def test_a_token_file_is_plain_arrow_that_others_can_read(tmp_path):
    path = tmp_path / "tokens.arrow"
    write_token_file(path, SEQUENCES)
    table = pl.read_ipc(path)
    assert table["input_ids"].to_list() == [list(s.input_ids) for s in SEQUENCES]
    assert table["source_row"].to_list() == [1, 4, 5]
    assert table["file_index"].to_list() == [0, 0, 1]
    assert table["loss_spans"].to_list()[0] == [{"start": 1, "end": 3}]
    schema = pa.ipc.open_file(path).schema
    assert schema.metadata[b"schema_version"] == b"1"
    assert str(schema.field("input_ids").type.value_type) == "uint32"


def test_rows_are_views_of_the_mapped_file_that_nobody_can_write(tmp_path):
    path = tmp_path / "tokens.arrow"
    write_token_file(path, SEQUENCES)
    before = pa.total_allocated_bytes()
    row = TokenFile(path).row(0)
    assert pa.total_allocated_bytes() == before
    assert row.input_ids.dtype == np.uint32
    assert not row.input_ids.flags.writeable


def test_only_the_owner_reads_a_token_file(tmp_path):
    path = tmp_path / "tokens.arrow"
    write_token_file(path, SEQUENCES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_writer_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "tokens.arrow"
    write_token_file(path, SEQUENCES)
    before = path.read_bytes()

    def broken():
        yield SEQUENCES[0]
        raise DatasetError("the row is bad")

    with pytest.raises(DatasetError, match="the row is bad"):
        write_token_file(path, broken())
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens.arrow"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_a_damaged_token_file_is_named_with_its_remedy(tmp_path, keep):
    path = tmp_path / "tokens.arrow"
    write_token_file(path, SEQUENCES)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=r"tokens\.arrow is damaged .*prepare again"):
        TokenFile(path)


def test_a_missing_token_file_is_named_with_its_remedy(tmp_path):
    with pytest.raises(DatasetError, match=r"tokens\.arrow does not exist; prepare"):
        TokenFile(tmp_path / "tokens.arrow")


def test_a_token_file_of_another_schema_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "tokens.arrow"
    monkeypatch.setattr(token_file, "SCHEMA_VERSION", 2)
    write_token_file(path, SEQUENCES)
    monkeypatch.undo()
    with pytest.raises(DatasetError, match="has schema version 2, this program reads 1"):
        TokenFile(path)


def test_the_histogram_counts_every_length_exactly_and_survives_the_file(tmp_path):
    rng = np.random.default_rng(0)
    lengths = {"b": rng.integers(2, 9, 200).tolist(), "a": [3, 3, 70_000]}
    tenants = []
    for tenant, values in lengths.items():
        path = tmp_path / f"{tenant}.arrow"
        write_token_file(path, [EncodedSequence(tuple(range(n)), ((1, 2),)) for n in values])
        tenants.append(prepared(tenant, path))
    write_histogram(measure_lengths(tenants), tmp_path / "histogram.parquet")
    histogram = read_histogram(tmp_path / "histogram.parquet")
    assert histogram.schema == {"tenant": pl.String, "length": pl.Int64, "count": pl.Int64}
    assert pl.read_parquet_metadata(tmp_path / "histogram.parquet")["schema_version"] == "1"
    for tenant, values in lengths.items():
        found, counts = workload_arrays(histogram.reverse(), tenant)
        assert list(zip(found, counts, strict=True)) == [(n, values.count(n)) for n in sorted(set(values))]


def test_the_longest_row_held_out_is_in_the_histogram_once_where_no_row_to_train_on_is_as_long(tmp_path):
    for name, lengths in {"train": [3, 5, 5], "longer": [4, 9, 9], "shorter": [4, 5]}.items():
        write_token_file(tmp_path / f"{name}.arrow", [EncodedSequence(tuple(range(n)), ((1, 2),)) for n in lengths])
    tenants = [
        replace(prepared(name, tmp_path / "train.arrow"), evaluation_path=tmp_path / f"{name}.arrow")
        for name in ("longer", "shorter")
    ]
    histogram = measure_lengths(tenants)
    assert [array.tolist() for array in workload_arrays(histogram, "longer")] == [[3, 5, 9], [1, 2, 1]]
    assert [array.tolist() for array in workload_arrays(histogram, "shorter")] == [[3, 5], [1, 2]]


def test_a_histogram_that_cannot_be_read_or_lacks_the_tenant_is_an_input_error(tmp_path):
    path = tmp_path / "histogram.parquet"
    with pytest.raises(DatasetError, match="cannot be read"):
        read_histogram(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_histogram(path)
    measure_lengths([]).write_parquet(path)
    with pytest.raises(DatasetError, match="schema version None"):
        read_histogram(path)
    with pytest.raises(DatasetError, match="no tenant 'ann'"):
        workload_arrays(measure_lengths([]), "ann")


def test_folder_names_are_safe_recognisable_and_distinct():
    # sha256("Ann's data") begins with the digits that coreutils' sha256sum prints
    assert folder_name("Ann's data") == "ann-s-data-" + "c64d279e"
    names = ["../../etc/passwd", "a/b", "a b", "A B", "..", "", "日本", "日本語", "x" * 300, "é"]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(set(folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for folder in folders)
    assert all(0 < len(folder) <= 49 and folder[0] != "-" for folder in folders)
