"""Calls of the product's functions, seen by the interpreter's profiler: nothing is replaced (not a test itself)."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def calls_of(*names: str) -> Iterator[list[dict[str, Any]]]:
    """Every call in this thread and in threads that begin here: ``name``, ``thread`` and the arguments."""
    calls: list[dict[str, Any]] = []
    with _watched(names, lambda name, given: calls.append(given | {"name": name})):
        yield calls


def run_killed(work: Callable[[], Any], name: str, calls: int) -> bool:
    """Run in a child process that is killed at a call of a function; whether it came so far."""
    child = os.fork()
    if not child:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads do not live on in a child
        left = [calls]

        def kill(*_: Any) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with _watched((name,), kill):
                work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@contextmanager
def _watched(names: tuple[str, ...], seen: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    def profile(frame: Any, event: str, function: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in names:
            if "/shd_" in frame.f_code.co_filename:
                seen(frame.f_code.co_qualname, {**frame.f_locals, "thread": threading.current_thread().name})
        elif event == "c_call" and function.__name__ in names:
            seen(function.__name__, {})

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
