"""Threads: how many NumPy's matrix products take, and one for what is needed later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

T = TypeVar("T")

SMALL_PRODUCT: Final = 2**27
"""Multiplications of a product that is not worth threads: hundredths of a second on one core."""


def threads_for(multiplications: int) -> AbstractContextManager[object]:
    """One thread while products are of this size or smaller, if that is small; else as many as ever.

    Threads of BLAS wait for each other at the end of every product: on a machine that is busy with something else,
    small ones take ten times as long as on one thread.
    """
    if multiplications > SMALL_PRODUCT:
        return nullcontext()
    import threadpoolctl

    limits: AbstractContextManager[object] = threadpoolctl.threadpool_limits(1, user_api="blas")
    return limits


def run_beside(work: Callable[[], T], *, daemon: bool = False) -> Future[T]:
    """Begin some work on a thread of its own; what it gives, or what went wrong, is told by ``result()``.

    Args:
        work: what to do.
        daemon: the process may end before it is done.
    """
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # told where the result is asked for
            found.set_exception(error)

    threading.Thread(target=run, daemon=daemon).start()
    return found
