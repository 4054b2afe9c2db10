"""How many threads NumPy's matrix products take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

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
