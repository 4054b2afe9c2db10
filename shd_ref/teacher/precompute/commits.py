"""Shards that are committed while the teacher runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType

from shd_ref.cache import CacheWriter, Errors, NewRecord, Receipt, Skipped
from shd_ref.teacher.run.threads import run_beside


class Commits:
    """Commits shards in the background, one after another, so that the teacher waits for no disk and no upload.

    At most one shard is under way: the next one waits for it, and raises what went wrong with it. Leaving the
    context waits for the last one, which is committed also where an error stops the run.

    Args:
        writer: of the cache.
        on_written: called with the size in bytes of a committed shard, in the thread that uses this object.
        callers: of the run, see ``share_threads``; 0 to write each shard before ``put`` returns.
    """

    def __init__(self, writer: CacheWriter, on_written: Callable[[int], None], callers: int = 1) -> None:
        self._writer = writer
        self._on_written = on_written
        self._callers = callers
        self._under_way: Callable[[], Receipt] | None = None

    def __enter__(self) -> Commits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._wait()
        elif self._under_way is not None:
            try:
                self._under_way()
            except Exception as failure:
                error.add_note(f"the shard that was being written failed too: {failure}")

    def put(self, shard: int, records: Sequence[NewRecord], errors: Errors, skipped: Sequence[Skipped]) -> None:
        """Begin to write a shard, see ``CacheWriter.write_shard``.

        Raises:
            ShdError: what the shard before this one met with.
        """
        self._wait()
        write = functools.partial(self._writer.write_shard, shard, records, errors, skipped)
        self._under_way = run_beside(write, self._callers)
        if not self._callers:
            self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._on_written(under_way().size)
