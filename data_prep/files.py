"""Files that appear whole or not at all, and that only their owner reads."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planning.errors import InputError, LobraError


def make_private_folder(folder: Path) -> None:
    """Creates the folder with mode 0700; an existing one is left as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def create_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`; on success its files are fsynced and it is renamed to `path`, else removed.

    Raises InputError where `path` is a file or holds anything, LobraError when the disk refuses.
    """
    path = path.absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} exists and is not empty; name another folder")
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for item in (*temporary.rglob("*"), temporary):
            sync_to_disk(item)
        temporary.replace(path)
        sync_to_disk(path.parent)
    except OSError as error:
        raise LobraError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
