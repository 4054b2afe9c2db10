"""Door 3: an implementation in any language, as a program that speaks JSON lines over stdin and stdout.

The protocol is written down in ``specs/conformance.md``. A program is not trusted to answer, to answer in order or to
stop: every wait has a limit, an answer has a largest size, and a program that fails is started again a few times.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import BrokenError, OwnDtype
from shd_ref.conformance.specification import VECTORS_VERSION, spec_edition

PROTOCOL = "1"

_CHUNK = 1 << 16
_KEPT_STDERR = 2000
_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}


class ProgramError(RuntimeError):
    """A program that cannot be judged at all: it does not start, or does not know the protocol."""


class _AnswerError(Exception):
    """The program refused the inputs; has the ``code`` that the judge looks for."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Program:
    """An adapter that asks a program. Use as a context manager, so that the program is stopped.

    Args:
        command: the program and its arguments.
        timeout: seconds for one answer, and for the handshake.
        max_answer: bytes of the longest line that is read.
        max_restarts: how often a program that crashed, hung or answered garbage is started again.
    """

    def __init__(
        self, command: Sequence[str], *, timeout: float = 20.0, max_answer: int = 1 << 26, max_restarts: int = 10
    ) -> None:
        self.command = list(command)
        self.timeout = timeout
        self.max_answer = max_answer
        self.name = " ".join(command)
        self.operations: tuple[str, ...] = ()
        self.dtypes: tuple[str, ...] = ()
        self._restarts_left = max_restarts
        self._max_restarts = max_restarts
        self._process: _Process | None = None
        self._last_id = 0

    def __enter__(self) -> Program:
        self._process = self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """One request and its answer."""
        if operation not in self.operations:
            raise NotImplementedError(f"the program does not list {operation}")
        if dtype not in self.dtypes:
            raise NotImplementedError(f"the program does not list the dtype {dtype}")
        process = self._running()
        self._last_id += 1
        request = make_request(operation, inputs, dtype, self._last_id)
        try:
            answer = process.ask(request, self.timeout, self.max_answer)
            return self._read_answer(answer)
        except BrokenError:
            # What it may still say belongs to no question: start it again.
            process.stop()
            self._process = None
            raise

    def _running(self) -> _Process:
        if self._process is None:
            if not self._restarts_left:
                raise BrokenError(f"not asked: the program failed {self._max_restarts + 1} times and is given up")
            self._restarts_left -= 1
            try:
                self._process = self._start()
            except ProgramError as error:
                raise BrokenError(f"the program could not be started again: {error}") from error
        return self._process

    def _start(self) -> _Process:
        try:
            process = _Process(self.command)
        except OSError as error:
            raise ProgramError(f"{self.name} cannot be started: {error}") from error
        hello = {
            "type": "hello",
            "protocol": PROTOCOL,
            "spec_edition": spec_edition(),
            "vectors_version": VECTORS_VERSION,
        }
        try:
            answer = process.ask(hello, self.timeout, self.max_answer)
            self._read_hello(answer)
        except (BrokenError, ProgramError) as error:
            process.stop()
            raise ProgramError(f"no handshake from {' '.join(self.command)}: {error}") from error
        return process

    def _read_hello(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") != "hello" or answer.get("protocol") != PROTOCOL:
            raise ProgramError(f"expected type 'hello' and protocol {PROTOCOL!r}; got {_shorten(json.dumps(answer))}")
        for key in ("operations", "dtypes"):
            names = answer.get(key)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ProgramError(f"expected a list of names as {key!r}; got {_shorten(repr(names))}")
        self.operations, self.dtypes = tuple(answer["operations"]), tuple(answer["dtypes"])
        self.name = str(answer.get("name") or self.name)

    def _read_answer(self, answer: Mapping[str, Any]) -> Any:
        if answer.get("id") != self._last_id:
            raise BrokenError(f"answered question {answer.get('id')!r} when asked question {self._last_id}")
        error = answer.get("error")
        if isinstance(error, Mapping):
            if error.get("code") == "not-implemented":
                raise NotImplementedError(str(error.get("message", "")))
            if isinstance(error.get("code"), str):
                raise _AnswerError(error["code"], str(error.get("message", "")))
        outputs = answer.get("outputs")
        if not isinstance(outputs, Mapping):
            raise BrokenError(
                f"answered with neither 'outputs' nor an 'error' that has a code: {_shorten(json.dumps(answer))}"
            )
        return {name: decode(value) for name, value in outputs.items()}


class _Process:
    """A running program, with threads that read and write so that no pipe can block the judge."""

    def __init__(self, command: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own group, so that its children end with it.
            start_new_session=True,
        )
        self._chunks: queue.Queue[bytes] = queue.Queue(maxsize=8)
        self._to_write: queue.Queue[bytes | None] = queue.Queue()
        self._buffer = bytearray()
        self._stderr = bytearray()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_stdout, self._read_stderr, self._write_stdin)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, message: Mapping[str, Any], timeout: float, max_answer: int) -> Mapping[str, Any]:
        """Send one line and wait for one line.

        Raises:
            BrokenError: no line in time, the end of the output, a line that is too long or not a JSON object.
        """
        self._to_write.put(json.dumps(message).encode() + b"\n")
        line = self._read_line(time.monotonic() + timeout, timeout, max_answer)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BrokenError(
                f"answered a line that is not JSON ({error}): {_shorten(repr(bytes(line[:300])))}"
            ) from None
        if not isinstance(answer, dict):
            raise BrokenError(f"must answer a JSON object a line; got {_shorten(repr(answer))}")
        return answer

    def close(self) -> None:
        """Let the program see the end of its input and stop by itself; end it where it does not."""
        self._to_write.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2.0)
        self.stop()

    def stop(self) -> None:
        """End the program and everything it started."""
        self._stopped.set()
        self._to_write.put(None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._popen.pid, signal.SIGKILL)
            else:
                self._popen.kill()
        self._popen.wait()
        for thread in self._threads:
            thread.join(timeout=5.0)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read_line(self, deadline: float, timeout: float, max_answer: int) -> bytearray:
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            searched = end if end >= 0 else len(self._buffer)
            if searched > max_answer:
                raise BrokenError(f"answered a line of more than {max_answer} bytes")
            if end >= 0:
                line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
                return line
            try:
                chunk = self._chunks.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                chunk = None
            # An endless drip of bytes is not an answer either.
            if chunk is None or (chunk and time.monotonic() > deadline and b"\n" not in chunk):
                raise BrokenError(f"no answer within {timeout:g} seconds{self._said()}")
            if not chunk:
                raise BrokenError(self._describe_end())
            self._buffer += chunk

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1.0)
        # What it wrote before it ended may still be on its way.
        self._threads[1].join(timeout=1.0)
        status = self._popen.poll()
        how = "closed its output" if status is None else f"ended with status {status}"
        return f"the program {how} instead of answering{self._said()}"

    def _said(self) -> str:
        text = bytes(self._stderr).decode("utf-8", errors="replace").strip()
        return f"; the end of its stderr: {_shorten(text[-300:])}" if text else ""

    def _read_stdout(self) -> None:
        pipe = self._popen.stdout
        if pipe is None:
            return
        while not self._stopped.is_set():
            try:
                chunk = os.read(pipe.fileno(), _CHUNK)
            except (OSError, ValueError):
                chunk = b""
            # A full queue holds the program back, so that a flood fills no memory.
            while not self._stopped.is_set():
                try:
                    self._chunks.put(chunk, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if not chunk:
                return

    def _read_stderr(self) -> None:
        pipe = self._popen.stderr
        if pipe is None:
            return
        while True:
            try:
                chunk = os.read(pipe.fileno(), _CHUNK)
            except (OSError, ValueError):
                return
            if not chunk:
                return
            self._stderr = (self._stderr + chunk)[-_KEPT_STDERR:]

    def _write_stdin(self) -> None:
        pipe = self._popen.stdin
        if pipe is None:
            return
        while True:
            line = self._to_write.get()
            # A program that ended or closed its input cannot be written to; the reader says so.
            with contextlib.suppress(OSError, ValueError):
                if line is None:
                    pipe.close()
                    return
                pipe.write(line)
                pipe.flush()


def make_request(operation: str, inputs: Mapping[str, Any], dtype: str, number: int = 1) -> dict[str, Any]:
    """The question that asks a program for one call."""
    encoded = {name: encode(value) for name, value in inputs.items()}
    return {"type": "call", "id": number, "operation": operation, "dtype": dtype, "inputs": encoded}


def encode(value: Any) -> Any:
    """An argument as JSON: arrays spelled out as ``{"shape", "dtype", "data"}``, special numbers as strings."""
    if isinstance(value, np.ndarray):
        kind = {"b": "bool", "f": "float", "c": "complex128"}.get(value.dtype.kind, "int64")
        if isinstance(value, OwnDtype):
            kind = value.dtype.name
        flat = value.real if kind == "complex128" else value
        return {
            "shape": list(value.shape),
            "dtype": kind,
            "data": [_number(item) for item in flat.reshape(-1).tolist()],
        }
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"record": {name: encode(item) for name, item in value.items()}}
    if isinstance(value, float) and not np.isfinite(value):
        return {"number": _number(value)}
    return value


def decode(value: Any) -> Any:
    """An output from JSON: ``{"shape", "data"}`` as an array, anything else as it is.

    Raises:
        BrokenError: an array whose data does not fill its shape, or is not numbers.
    """
    if isinstance(value, Mapping):
        if "shape" not in value or "data" not in value:
            return {name: decode(item) for name, item in value.items()}
        try:
            data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
            array, shape = np.array(data, dtype=np.float64), value["shape"]
            # NumPy takes -1 for a size that it finds out; an answer says its sizes.
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError("a shape is a list of sizes from 0 on")
            return array.reshape(shape)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            text = _shorten(json.dumps(value))
            raise BrokenError(f"answered an array that cannot be read ({error!r}): {text}") from error
    if isinstance(value, list):
        return [decode(item) for item in value]
    return _SPECIALS.get(value, value) if isinstance(value, str) else value


def _number(item: Any) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if np.isnan(item) else "inf" if item > 0 else "-inf"
    return item


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
