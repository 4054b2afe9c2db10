"""Shards that are committed while the teacher runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType

from shd_ref.cache import CacheWriter, Errors, NewRecord, Receipt, Skipped
from shd_ref.teacher.run.threads import run_beside


class Commits:
    """Commits shards in the background, at most one at a time, so that the teacher waits for no disk and no upload.

    What goes wrong with one is raised by the next ``put``, or on leaving the context, which waits for the last one
    even where an error stops the run. ``on_written`` gets the size of each in the caller's thread; without callers
    nothing is left to a thread.
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
        """Begin to write a shard, see ``CacheWriter.write_shard``; raises what the one before it met with."""
        self._wait()
        write = functools.partial(self._writer.write_shard, shard, records, errors, skipped)
        self._under_way = run_beside(write, self._callers)
        if not self._callers:
            self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._on_written(under_way().size)
