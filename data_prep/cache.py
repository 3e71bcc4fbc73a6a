"""Prepared tokens by content: equal data, tokenizer and reading rules are tokenised once.

An entry is a folder `<key>/` with tokens.arrow, rejects.parquet and, written last, manifest.json with their SHA-256.
An entry that is incomplete or does not match its manifest counts as absent and is built anew. Nothing is evicted.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.config import DatasetConfig
from data_prep.encode import ENCODER_VERSION, check_tokenizer, encode_row
from data_prep.errors import RowError
from data_prep.files import file_sha256, make_private_folder, replace_atomically
from data_prep.readers import data_sha256, read_rows
from data_prep.rejects import write_rejects
from data_prep.token_file import SCHEMA_VERSION, TokenFile, write_token_file
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint
from data_prep.types import OVERLONG, EncodedSequence, Reject

# What changes neither a token nor a reject; the data file counts by its bytes.
NOT_IN_KEY = {"path", "max_reject_ratio", "max_drop_ratio"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a cache entry holds."""

    num_rows: int
    num_tokens: int
    reject_reasons: dict[str, int]
    tokens_sha256: str
    rejects_sha256: str

    @property
    def num_rejects(self) -> int:
        return sum(self.reject_reasons.values())

    @property
    def num_overlong(self) -> int:
        return self.reject_reasons.get(OVERLONG, 0)

    @property
    def num_broken(self) -> int:
        return self.num_rejects - self.num_overlong


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The folder of one key; its manifest is None until it is complete."""

    folder: Path

    @property
    def token_path(self) -> Path:
        return self.folder / "tokens.arrow"

    @property
    def rejects_path(self) -> Path:
        return self.folder / "rejects.parquet"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def read_manifest(self) -> Manifest | None:
        """The manifest, or None where the entry has to be built."""
        if not all(path.is_file() for path in (self.manifest_path, self.token_path, self.rejects_path)):
            return None
        try:
            manifest = Manifest(**json.loads(self.manifest_path.read_text()))
        except (ValueError, TypeError):
            return None
        actual = (file_sha256(self.token_path), file_sha256(self.rejects_path))
        return manifest if actual == (manifest.tokens_sha256, manifest.rejects_sha256) else None

    def write_manifest(self, reject_reasons: dict[str, int]) -> Manifest:
        tokens = TokenFile(self.token_path)
        manifest = Manifest(
            num_rows=tokens.num_rows,
            num_tokens=int(tokens.num_tokens.sum()),
            reject_reasons=reject_reasons,
            tokens_sha256=file_sha256(self.token_path),
            rejects_sha256=file_sha256(self.rejects_path),
        )
        with replace_atomically(self.manifest_path) as temporary:
            temporary.write_text(json.dumps(asdict(manifest), indent=2))
        return manifest


def cache_key(dataset: DatasetConfig, tokenizer_folder: Path) -> str:
    """SHA-256 of everything that decides about tokens and rejects; the data file counts by its bytes, not its path."""
    parts = {
        "data": data_sha256(dataset),
        "tokenizer": tokenizer_fingerprint(tokenizer_folder),
        "dataset": dataset.model_dump(mode="json", exclude=NOT_IN_KEY),
        "schema_version": SCHEMA_VERSION,
        "encoder_version": ENCODER_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_or_build(dataset: DatasetConfig, tokenizer_folder: Path, cache_dir: Path) -> tuple[CacheEntry, Manifest]:
    """The cache entry for this data set; raises DatasetError where data or tokenizer cannot be used at all."""
    key = cache_key(dataset, tokenizer_folder)
    entry = CacheEntry(cache_dir / key)
    manifest = entry.read_manifest()
    if manifest is None:
        manifest = _build(entry, key, dataset, tokenizer_folder)
    return entry, manifest


def _build(entry: CacheEntry, key: str, dataset: DatasetConfig, tokenizer_folder: Path) -> Manifest:
    tokenizer = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer, dataset)
    rejects: list[Reject] = []

    def sequences() -> Iterator[EncodedSequence]:
        for row in read_rows(dataset):
            if isinstance(row, Reject):
                rejects.append(row)
                continue
            try:
                sequence = encode_row(row, tokenizer, dataset, dataset.max_length)
            except RowError as error:
                detail = f"{error.detail} | " if error.detail else ""
                rejects.append(Reject(row.number, error.reason, detail + row.snippet))
                continue
            yield sequence

    make_private_folder(entry.folder)
    write_token_file(entry.token_path, sequences(), key)
    write_rejects(entry.rejects_path, rejects)
    return entry.write_manifest(dict(Counter(reject.reason for reject in rejects)))
