"""Files that appear whole or not at all, and that only their owner reads."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Creates the folder with mode 0700; an existing one is left as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary file (mode 0600) beside `path`; on success it is fsynced and renamed to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(path)
        sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
