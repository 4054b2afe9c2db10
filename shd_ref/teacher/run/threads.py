"""How many threads a run has, and the two ways onto them; a run of one does all on the caller's, for debuggers."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

SMALL_PRODUCT: Final = 2**27
"""Multiplications of a product that is not worth threads: hundredths of a second on one core."""


def threads_for(multiplications: int) -> AbstractContextManager[object]:
    """One thread for small products, after which BLAS threads would wait for each other on a busy machine."""
    if multiplications > SMALL_PRODUCT:
        return nullcontext()
    import threadpoolctl

    limits: AbstractContextManager[object] = threadpoolctl.threadpool_limits(1, user_api="blas")
    return limits


def share_threads(num_threads: int | None, *, on_cpu: bool) -> tuple[int, int | None]:
    """How many batches run at once (0: on the caller's thread), and threads of a session (None: its choice)."""
    threads = count_cores() if num_threads is None and on_cpu else num_threads
    if threads == 1:
        return 0, 1
    # The second caller runs beside the session's threads, which include the first.
    return 2, threads - 1 if on_cpu and threads is not None else threads


def count_cores() -> int:
    """Physical cores that this process may use, as far as the system tells; hyperthreads gain a session nothing."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def run_beside(work: Callable[[], T], callers: int, *, daemon: bool = False) -> Callable[[], T]:
    """Begin a piece of work (without callers when asked for); what is returned waits and gives its result."""
    if not callers:
        return functools.cache(work)
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=daemon).start()
    return future.result


def run_ahead(run: Callable[[T], R], items: Iterable[T], callers: int) -> Generator[tuple[T, R], None, None]:
    """Results in the order of the items, computed while earlier ones are handled; errors come in their turn."""
    if not callers:
        for item in items:
            yield item, run(item)
        return
    under_way: deque[tuple[T, Future[R]]] = deque()

    def take() -> tuple[T, R]:  # nothing here keeps what it returns
        item, future = under_way.popleft()
        return item, future.result()

    left, failure = iter(items), None
    with ThreadPoolExecutor(callers, thread_name_prefix="shd-batch") as pool:
        try:
            while True:
                try:
                    item = next(left)
                except StopIteration:
                    break
                except Exception as error:  # raised below, after what is under way
                    failure = error
                    break
                under_way.append((item, pool.submit(run, item)))
                if len(under_way) > callers:
                    yield take()
            while under_way:
                yield take()
            if failure is not None:
                raise failure
        finally:  # an error, or the consumer stopped early
            for _, future in under_way:
                future.cancel()
