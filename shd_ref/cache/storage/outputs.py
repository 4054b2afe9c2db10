"""Places of files that are made from a cache: local paths, and never inside the cache itself."""

from __future__ import annotations

import os
from pathlib import Path

from shd_ref.cache.storage.places import Folder, is_address, open_storage
from shd_ref.cache.storage.storage import check_path, write_errors
from shd_ref.errors import ShdError


def output_path(out: str | os.PathLike[str], *, cache: Folder | None = None, argument: str = "out") -> Path:
    """A place on this machine that may be written.

    Args:
        out: what the user gave.
        cache: what the output is made from; nothing may be written into it.
        argument: name of ``out``, for messages.

    Raises:
        ShdError: ``argument-value`` for an address, for nothing, and for a place in the cache.
    """
    if is_address(os.fspath(out)):
        raise ShdError(
            "argument-value",
            f"{argument} must be a path on this machine; got the address {out}: write it here, then copy it there",
        )
    if not os.fspath(out):
        raise ShdError("argument-value", f"{argument} must be a path; got nothing")
    path = Path(check_path(out, argument))
    root = None if cache is None else open_storage(cache).root
    if isinstance(root, Path):
        with write_errors(path):
            path.exists()  # refused here if the system cannot say
            real = path.resolve()  # links and '..' may lead into the cache too
        if any(_is_same(place, root) for place in (real, *real.parents)):
            raise ShdError("argument-value", f"{argument} must lie outside the cache {root}; got {path}")
    return path


def output_file(out: str | os.PathLike[str], *, cache: Folder | None = None, argument: str = "out") -> Path:
    """The same for one file, whose folder must be there: found before the work is done, not after.

    Raises:
        ShdError: as ``output_path``; ``write-failed``.
    """
    path = output_path(out, cache=cache, argument=argument)
    with write_errors(path):
        fits = not path.is_dir() and path.parent.is_dir()
    if not fits:
        reason = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise ShdError("write-failed", f"{path} could not be written: {reason}: name another {argument}")
    return path


def _is_same(place: Path, root: Path) -> bool:
    try:
        return place.samefile(root)
    except OSError:  # not there yet
        return False
