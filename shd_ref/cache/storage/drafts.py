"""Outputs other than caches are written whole or not at all, and the next run replaces the draft of a killed one.

The draft of ``NAME`` is in ``.NAME.part`` next to it; its writer holds the file ``lock`` there, so it is not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from shd_ref.cache.storage.storage import Folder, check_path, is_address, open_storage, write_errors
from shd_ref.errors import ShdError

LOCK: Final = "lock"
_NEW_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def part_folder(out: Path) -> Path:
    """Where a run that makes ``out`` keeps what is under way."""
    return out.with_name(f".{out.name}.part")


class DraftFolder:
    """A ``part_folder`` for one run, removed when the ``with`` block ends; ``write-failed`` while another has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with write_errors(folder):
            if folder.is_symlink():
                raise ShdError("write-failed", f"{folder} must be a folder of an unfinished run; it is a link")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = os.open(folder / LOCK, _NEW_LOCK, 0o666)
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not os.path.samestat(os.fstat(self._lock), (folder / LOCK).stat()):
                        raise BlockingIOError  # a run that ended took the file away, and another has made its own
                except BaseException:
                    os.close(self._lock)
                    raise
            except (BlockingIOError, FileNotFoundError):
                message = f"another run is at work in {folder}: wait for it, or name another out"
                raise ShdError("write-failed", message) from None
            except OSError:  # a file system without locks, or without room: nothing stays that was not there
                with contextlib.suppress(OSError):
                    if all(child.name == LOCK for child in folder.iterdir()):
                        (folder / LOCK).unlink(missing_ok=True)
                        folder.rmdir()
                raise

    def clear(self) -> None:
        """Remove what an earlier run left."""
        with write_errors(self.folder):
            for child in self.folder.iterdir():
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                elif child.name != LOCK:
                    child.unlink()

    def close(self, *, remove: bool) -> None:
        """Let the next run in, and first remove the folder, if so told."""
        if remove:
            with contextlib.suppress(OSError, ShdError):
                self.clear()
                (self.folder / LOCK).unlink()  # last, so that what a kill leaves is known by it
                self.folder.rmdir()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(remove=True)


@contextlib.contextmanager
def drafting(target: Path, folder: Path | None = None) -> Iterator[Path]:
    """A path for a new file or folder, which takes the place of ``target`` when the block ends, or is removed."""
    with write_errors(target), DraftFolder(folder or part_folder(target)) as drafts:
        drafts.clear()
        yield drafts.folder / target.name
        put(drafts.folder / target.name, target)


def put(draft: Path, target: Path) -> None:
    """Give a draft its place: all of it is on the disk before, and its name after."""
    settle(draft)
    draft.replace(target)
    sync(target.parent)


def settle(path: Path) -> None:
    """Wait until a file or a folder is on the disk, with the mode of new files: safetensors' are for their owner."""
    mask = os.umask(0o077)  # no other way to read it
    os.umask(mask)
    for part in (*path.rglob("*"), path):
        if part.is_file():
            part.chmod(0o666 & ~mask)
        sync(part)


def hash_files(folder: Path, pattern: str) -> dict[str, str]:
    """SHA-256 of files by name, as they are on the disk."""
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    for path in files:
        settle(path)
    return {str(path.relative_to(folder)): hash_file(path) for path in files}


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def remove_finished(folder: Path) -> None:
    """Remove the drafts of a run that has finished its output, unless another run is using the folder."""
    if (folder / LOCK).is_file():
        with contextlib.suppress(ShdError), DraftFolder(folder):
            pass
    else:  # the run was killed before its last step, when the folder was empty
        with contextlib.suppress(OSError):
            folder.rmdir()


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of files is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def output_path(out: str | os.PathLike[str], *, cache: Folder | None = None, argument: str = "out") -> Path:
    """A place on this machine, outside ``cache``, from which the output is made: ``argument-value``."""
    if is_address(os.fspath(out)):
        message = f"{argument} must be a path on this machine; got the address {out}: write it here, then copy it"
        raise ShdError("argument-value", message)
    if not os.fspath(out):
        raise ShdError("argument-value", f"{argument} must be a path; got nothing")
    path = Path(check_path(out, argument))
    root = None if cache is None else open_storage(cache).root
    if isinstance(root, Path):
        with write_errors(path):
            path.exists()  # refused here if the system cannot say
            real = path.resolve()  # links and '..' may lead into the cache too
        if any(_is_same(candidate, root) for candidate in (real, *real.parents)):
            raise ShdError("argument-value", f"{argument} must lie outside the cache {root}; got {path}")
    return path


def output_file(out: str | os.PathLike[str], *, cache: Folder | None = None, argument: str = "out") -> Path:
    """The same for one file, whose folder must be there: ``write-failed`` before the work, not after."""
    path = output_path(out, cache=cache, argument=argument)
    with write_errors(path):
        fits = not path.is_dir() and path.parent.is_dir()
    if not fits:
        reason = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise ShdError("write-failed", f"{path} could not be written: {reason}: name another {argument}")
    return path


def _is_same(path: Path, root: Path) -> bool:
    try:
        return path.samefile(root)
    except OSError:  # not there yet
        return False
