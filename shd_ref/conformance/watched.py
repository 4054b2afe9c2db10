"""Door 2 runs in a process that is watched: a Python implementation may hang, exit or crash the interpreter.

The parent starts a child with the command line that it was given. The child judges, says before every call that it is
alive, and ends with its verdict. A child that ends without one has not conformed, with any exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NamedTuple

from shd_ref.conformance.adapter import Adapter, BrokenError

GRACE: Final = 60.0
"""Seconds beyond a call's limit before the parent ends a child that is silent; the judge's own work between two calls
takes a few at most."""


_CHILD: Final = "SHD_CONFORMANCE_CHILD"
"""Set in the environment of a child."""


class _OverdueError(BaseException):
    """A call's time is up. Not an ``Exception``, so that few implementations catch it."""


@dataclass
class Limited:
    """An adapter whose calls end after some seconds, where the interpreter can still be interrupted.

    Attributes:
        adapter: the implementation.
        timeout: seconds for one call.
        begin: called with the operation before every call.
    """

    adapter: Adapter
    timeout: float
    begin: Callable[[str], None]

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """One call, as the adapter makes it.

        Raises:
            BrokenError: no answer in time.
        """
        self.begin(operation)
        try:
            with _alarm(self.timeout):
                return self.adapter.run_operation(operation, inputs, dtype)
        except _OverdueError:
            raise BrokenError(f"no answer within {self.timeout:g} seconds") from None


class Verdict(NamedTuple):
    """How a run ended: its exit status, and what it says on standard output and on standard error."""

    status: int
    out: str
    err: str


def judge_watched(arguments: Sequence[str], name: str, timeout: float) -> Verdict:
    """Judge in a child process.

    Args:
        arguments: of the command line, for the child.
        name: of the implementation, for messages.
        timeout: seconds for one call.

    Returns:
        The child's verdict. Where it ended without one: that it failed (1) if a call had begun, else that nothing
        could be judged (2).
    """
    # The child finds what the parent finds; ``-m`` adds the current folder.
    paths = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.Popen(
        [sys.executable, "-m", "shd_ref.conformance", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, _CHILD: "1"},
    )
    begun, silent = None, False
    try:
        for message in _messages(child, timeout + GRACE):
            if message is None:
                silent = True
            elif "begin" in message:
                begun = message["begin"]
            else:
                return Verdict(int(message["status"]), message["out"], message["err"])
    finally:
        child.kill()
        child.wait()
    where = f"in {begun}; nothing after it was judged" if begun else "while it was imported"
    how = (
        f"gave no answer within {timeout:g} seconds and could not be interrupted"
        if silent
        else f"ended the judge's process with status {child.returncode}"
    )
    return Verdict(1 if begun else 2, "", f"shd_ref.conformance: {name} {how} {where}\n")


def is_child() -> bool:
    """Whether this process was started by ``judge_watched``."""
    return _CHILD in os.environ


def tell_parent(judge_here: Callable[[Callable[[str], None]], Verdict]) -> None:
    """The child's whole life: judge, and send the verdict to the parent.

    Args:
        judge_here: makes the verdict; calls its argument with the operation before every call.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the implementation prints is for people, and no message
    del os.environ[_CHILD]

    def send(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    send(judge_here(lambda operation: send({"begin": operation}))._asdict())
    # Threads and exit handlers of the implementation have no say in the verdict.
    os._exit(0)


def _messages(child: subprocess.Popen[bytes], patience: float) -> Iterator[Mapping[str, Any] | None]:
    """What the child says, until it ends; None where it says nothing for too long."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        if child.stdout is not None:
            for line in child.stdout:
                lines.put(line)
            child.stdout.close()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    heard = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            if child.poll() is not None:
                # The reader may not have had its turn yet, on a busy machine; and something that the implementation
                # started may hold the pipe open after the child's end.
                reader.join(timeout=1.0)
                if lines.empty():
                    return
            if time.monotonic() - heard > patience:
                yield None
                return
        else:
            heard = time.monotonic()
            yield json.loads(line)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise in the main thread when the time is up, and again every second, for those who catch everything."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
