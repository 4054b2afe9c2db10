"""Work that is killed at a call of a function, in a child process (not a test itself)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def run_killed(work: Callable[[], Any], module: Any, name: str, calls: int) -> bool:
    """Run in a child process that is killed at a call of a function; whether it came so far."""
    child = os.fork()
    if not child:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads do not live on in a child
        plain, left = getattr(module, name), [calls]

        def kill(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments, **options)

        setattr(module, name, kill)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
