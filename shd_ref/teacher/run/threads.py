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
    """Run a function on a new thread; ``result()`` waits for it, and returns its value or raises its error.

    Args:
        work: the function.
        daemon: do not wait for it when the process ends.
    """
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised by result()
            found.set_exception(error)

    threading.Thread(target=run, daemon=daemon).start()
    return found
