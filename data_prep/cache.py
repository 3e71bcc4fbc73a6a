"""Prepared tokens by content: equal data, tokenizer and reading rules are tokenised once.

An entry is a folder `<key>/` with tokens.arrow, evaluation.arrow, rejects.parquet and, written last, manifest.json with
their SHA-256. An entry that is incomplete or does not match its manifest counts as absent and is built anew. The
manifest's time is when the entry was last used; `lobra gc` goes by it.
"""

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.config import DatasetConfig
from data_prep.encode import ENCODER_VERSION
from data_prep.files import file_sha256, make_private_folder, replace_atomically
from data_prep.readers import RecordReader, data_sha256
from data_prep.rejects import open_reject_writer
from data_prep.token_file import SCHEMA_VERSION, open_token_writer
from data_prep.tokenizer import tokenizer_fingerprint
from data_prep.types import OVERLONG, OVERLONG_PROMPT
from data_prep.workers import EncodeBatches, EncodeJob, row_batches

# What changes neither a token nor a reject; the data file counts by its bytes.
NOT_IN_KEY = {"path", "max_reject_ratio", "max_drop_ratio"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a cache entry holds; `num_rows` and `num_tokens` are for training, truncated rows are among the rows."""

    num_rows: int
    num_tokens: int
    num_evaluation_rows: int
    num_truncated: int
    reject_reasons: dict[str, int]
    sha256: dict[str, str]

    @property
    def num_rejects(self) -> int:
        return sum(self.reject_reasons.values())

    @property
    def num_overlong(self) -> int:
        return sum(self.reject_reasons.get(reason, 0) for reason in (OVERLONG, OVERLONG_PROMPT))

    @property
    def num_broken(self) -> int:
        return self.num_rejects - self.num_overlong

    @property
    def num_all_rows(self) -> int:
        return self.num_rows + self.num_evaluation_rows + self.num_rejects


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The folder of one key; its manifest is None until it is complete."""

    folder: Path

    @property
    def token_path(self) -> Path:
        return self.folder / "tokens.arrow"

    @property
    def evaluation_path(self) -> Path:
        return self.folder / "evaluation.arrow"

    @property
    def rejects_path(self) -> Path:
        return self.folder / "rejects.parquet"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def read_manifest(self) -> Manifest | None:
        """The manifest, or None where the entry has to be built. Notes the time of use."""
        if not all(path.is_file() for path in (self.manifest_path, *self._content())):
            return None
        try:
            manifest = Manifest(**json.loads(self.manifest_path.read_text()))
        except (ValueError, TypeError):
            return None
        if manifest.sha256 != self._sha256():
            return None
        os.utime(self.manifest_path)
        return manifest

    def build(self, job: EncodeJob, encode: EncodeBatches) -> Manifest:
        """Reads, encodes and writes, a batch at a time. Raises DatasetError; then the entry stays incomplete."""
        reader = RecordReader(job.dataset)
        key = self.folder.name
        make_private_folder(self.folder)
        num_truncated = 0
        with ExitStack() as files:
            train = files.enter_context(open_token_writer(self.token_path, key))
            evaluation = files.enter_context(open_token_writer(self.evaluation_path, key))
            rejects = files.enter_context(open_reject_writer(self.rejects_path))
            for batch in encode(job, row_batches(reader)):
                train.write(batch.train)
                evaluation.write(batch.evaluation)
                rejects.write(batch.rejects)
                num_truncated += batch.num_truncated
            reader.check_columns(train.num_rows + evaluation.num_rows)
        manifest = Manifest(
            num_rows=train.num_rows,
            num_tokens=train.num_tokens,
            num_evaluation_rows=evaluation.num_rows,
            num_truncated=num_truncated,
            reject_reasons=dict(rejects.reasons),
            sha256=self._sha256(),
        )
        with replace_atomically(self.manifest_path) as temporary:
            temporary.write_text(json.dumps(asdict(manifest), indent=2))
        return manifest

    def _content(self) -> tuple[Path, ...]:
        return (self.token_path, self.evaluation_path, self.rejects_path)

    def _sha256(self) -> dict[str, str]:
        return {path.name: file_sha256(path) for path in self._content()}


def find_or_build(
    dataset: DatasetConfig, tokenizer_folder: Path, cache_dir: Path, encode: EncodeBatches
) -> tuple[CacheEntry, Manifest]:
    """The cache entry for this data set; raises DatasetError where data or tokenizer cannot be used at all."""
    fingerprint = tokenizer_fingerprint(tokenizer_folder)
    entry = CacheEntry(cache_dir / _key(dataset, fingerprint))
    manifest = entry.read_manifest()
    if manifest is None:
        manifest = entry.build(EncodeJob(dataset, tokenizer_folder, fingerprint), encode)
    return entry, manifest


def _key(dataset: DatasetConfig, fingerprint: str) -> str:
    """SHA-256 of everything that decides about tokens and rejects; the data file counts by its bytes, not its path."""
    parts = {
        "data": data_sha256(dataset.path),
        "tokenizer": fingerprint,
        "dataset": dataset.model_dump(mode="json", exclude=NOT_IN_KEY),
        "schema_version": SCHEMA_VERSION,
        "encoder_version": ENCODER_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
