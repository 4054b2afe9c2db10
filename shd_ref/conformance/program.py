"""Door 3: an implementation in any language, as a program that speaks JSON lines over stdin and stdout.

The protocol is written down in ``specs/conformance.md``. A program is not trusted to answer, to answer in order or to
stop: every wait has a limit, an answer has a largest size, and a program that fails is started again a few times.
Programs get arrays spelled out; a Python host gets them as bytes with their strides, and answers in bytes too. No
answer runs code or takes memory by a number that was sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import time
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.adapter import PLAIN, BrokenError, Missing, OwnDtype, RefusedError, fields_of
from shd_ref.conformance.specification import VECTORS_VERSION, error_codes, spec_edition

MAX_ANSWER = 1 << 26  # bytes of the longest line that is read
_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


def encode(value: Any, *, exact: bool = False) -> Any:
    """An argument: arrays spelled out, with special numbers as strings; ``exact``, for a Python host, as bytes."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic) and exact:
        return _as_bytes(value, layout=True)
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            raise NotImplementedError("a program cannot be given an array of objects")
        kind = {"b": "bool", "f": "float", "c": "complex128"}.get(value.dtype.kind, "int64")
        if isinstance(value, OwnDtype):
            kind = value.dtype.name
        flat = value.real if kind == "complex128" else value
        data = [_number(item) for item in flat.reshape(-1).tolist()]
        return {"shape": list(value.shape), "dtype": kind, "data": data}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, list | tuple):
        items = [encode(item, exact=exact) for item in value]
        return {"tuple": items} if exact and isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": _number(value)}
    return value


def decode_argument(value: Any) -> Any:
    """What ``encode`` made with ``exact``, as it was."""
    if isinstance(value, list):
        return [decode_argument(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return _SPECIALS[value["number"]]
    if "tuple" in value:
        return tuple(decode_argument(item) for item in value["tuple"])
    array = _from_bytes(value)
    if value.get("scalar"):
        return array[()]
    if "strides" in value:
        array = _laid_out(array, value["strides"])
    if "readonly" in value:
        array.flags.writeable = False
    return array.view(OwnDtype) if "own" in value else array


def encode_answer(value: Any) -> Any:
    """An answer of a Python implementation: what ``numpy.asarray`` takes as bytes, records by their fields."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, Mapping):
        return {str(name): encode_answer(item) for name, item in value.items()}
    if hasattr(value, "__array__"):
        value = np.asarray(value)
        if value.dtype.kind in "biufc":
            return _as_bytes(value, layout=False)
        if "float" in value.dtype.name:  # bfloat16 and others that NumPy has from elsewhere
            return _as_bytes(value.astype(np.float64), layout=False)
        return {"other": f"an array of {value.dtype}"}
    fields = fields_of(value)
    if fields:
        return encode_answer(fields)
    if isinstance(value, list | tuple):
        return [encode_answer(item) for item in value]
    return {"other": f"a {type(value).__name__}"}


def decode(value: Any) -> Any:
    """An answer: ``{"shape", "data"}`` or ``{"shape", "dtype", "bytes"}`` as an array, anything else as it is."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, str):
        return _SPECIALS.get(value, value)
    if not isinstance(value, dict):
        return value
    if "shape" not in value or not {"data", "bytes"} & set(value):
        return {name: decode(item) for name, item in value.items()}
    try:
        shape = value["shape"]
        # NumPy takes -1 for a size that it finds out; an answer says its sizes.
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("a shape is a list of sizes from 0 on")
        if "bytes" in value:
            return _from_bytes(value)
        data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
        return np.array(data, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise BrokenError(
            f"answered an array that cannot be read ({error!r}): {shorten(json.dumps(value))}"
        ) from error


def shorten(text: str, limit: int = 200) -> str:
    """At most ``limit`` characters, for a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _as_bytes(value: NDArray[Any] | np.generic, *, layout: bool) -> dict[str, Any]:
    if value.nbytes > MAX_ANSWER // 2:
        raise BrokenError(f"answered an array of shape {list(value.shape)}, which is too large to be read")
    encoded: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype.str}
    if value.dtype.kind == "O":
        encoded["items"] = value.reshape(-1).tolist()
    else:
        encoded["bytes"] = b2a_base64(value.tobytes(), newline=False).decode()
    if isinstance(value, np.generic):
        encoded["scalar"] = True
    elif layout:
        if not value.flags.c_contiguous:
            encoded["strides"] = value.strides
        if not value.flags.writeable:
            encoded["readonly"] = True
        if isinstance(value, OwnDtype):
            encoded["own"] = True
    return encoded


def _from_bytes(value: Mapping[str, Any]) -> NDArray[Any]:
    if "items" in value:
        array = np.empty(len(value["items"]), dtype=object)
        array[:] = value["items"]
        return array.reshape(value["shape"])
    if not _NUMBERS.fullmatch(value["dtype"]):
        raise ValueError(f"an array of {value['dtype']}")
    data = bytearray(a2b_base64(value["bytes"], strict_mode=True))
    return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"])


def _laid_out(array: NDArray[Any], strides: list[int]) -> NDArray[Any]:
    """The same numbers at these distances in memory; what lies between them is noise."""
    if array.size == 0 or array.dtype.kind == "O":
        return array
    reach = [stride * (size - 1) for stride, size in zip(strides, array.shape, strict=True)]
    first = -sum(step for step in reach if step < 0)
    memory = np.full(first + sum(step for step in reach if step > 0) + array.itemsize, 0xA5, dtype=np.uint8)
    laid: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory.data, first, strides)
    laid[...] = array
    return laid


def _number(item: Any) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if math.isnan(item) else "inf" if item > 0 else "-inf"
    return item


PROTOCOL = "1"
START_LIMIT = 60.0  # seconds for a program to start, where an answer has fewer: a library may take long to load
_CHUNK = 1 << 16
_KEPT_STDERR = 2000


class ProgramError(RuntimeError):
    """A program that cannot be judged at all: it does not start, or does not know the protocol."""


class Program:
    """An adapter that asks a program, a context manager that stops it.

    An answer has ``timeout`` seconds and ``max_answer`` bytes; a program that crashed, hung or answered garbage is
    started again ``max_restarts`` times. ``name`` is for reports, until the program says one.
    """

    remote = True  # the judge's arrays are not in its memory

    def __init__(
        self,
        command: Sequence[str],
        *,
        timeout: float = 20.0,
        max_answer: int = MAX_ANSWER,
        max_restarts: int = 10,
        name: str | None = None,
    ) -> None:
        self.command, self.timeout, self.max_answer = list(command), timeout, max_answer
        self.name = name or " ".join(command)
        self.operations: tuple[str, ...] = ()
        self.dtypes: tuple[str, ...] = ()
        self._restarts_left = self._max_restarts = max_restarts
        self._process: _Process | None = None
        self._last_id = 0
        self._last_inputs: Mapping[str, Any] = {}
        self._exact = False

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
        request = make_request(operation, inputs, dtype, self._last_id, exact=self._exact)
        if self._exact:
            again = [name for name, value in inputs.items() if value is self._last_inputs.get(name)]
            request["again"] = again
            self._last_inputs = dict(inputs)
        try:
            answer = process.ask(request, self.timeout, self.max_answer)
            if answer.get("id") != self._last_id:
                raise BrokenError(f"answered question {answer.get('id')!r} when asked question {self._last_id}")
        except BrokenError:
            # What it may still say belongs to no question: start it again.
            process.stop()
            self._process = None
            raise
        try:
            return _read_answer(answer)
        except RecursionError:
            raise BrokenError("answered with lists in lists too deep to be read") from None

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
        versions = {"protocol": PROTOCOL, "spec_edition": spec_edition(), "vectors_version": VECTORS_VERSION}
        try:
            answer = process.ask({"type": "hello", **versions}, max(self.timeout, START_LIMIT), self.max_answer)
            if isinstance(answer.get("error"), Mapping):
                process.stop()
                raise ProgramError(f"{self.name} {answer['error'].get('message')}")
            self._read_hello(answer)
        except BrokenError as error:
            process.stop()
            raise ProgramError(f"no handshake from {self.name}: {error}") from error
        return process

    def _read_hello(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") != "hello" or answer.get("protocol") != PROTOCOL:
            raise BrokenError(f"expected type 'hello' and protocol {PROTOCOL!r}; got {shorten(json.dumps(answer))}")
        for key in ("operations", "dtypes"):
            names = answer.get(key)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BrokenError(f"expected a list of names as {key!r}; got {shorten(repr(names))}")
        self.operations, self.dtypes = tuple(answer["operations"]), tuple(answer["dtypes"])
        self.name, self._exact = str(answer.get("name") or self.name), answer.get("arrays") == "bytes"


def _read_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    error, broken, outputs = (answer.get(name) for name in ("error", "broken", "outputs"))
    if isinstance(broken, Mapping):  # a host saw what no other program is asked about
        spec = broken.get("spec")
        raise BrokenError(str(broken.get("message", "")), spec if isinstance(spec, str) else None)
    if isinstance(error, Mapping) and isinstance(error.get("code"), str):
        code, message = error["code"], str(error.get("message", ""))
        if code == "not-implemented":
            raise NotImplementedError(message)
        if code == "dependency-missing":
            raise Missing(message)
        if code not in error_codes():
            raise BrokenError(f"answered with the error code {code!r}, which is not in ERR-2: {message}")
        raise RefusedError(code, message)
    if not isinstance(outputs, Mapping):
        raise BrokenError(
            f"answered with neither 'outputs' nor an 'error' that has a code: {shorten(json.dumps(answer))}"
        )
    return {name: decode(value) for name, value in outputs.items()}


class _Process:
    """A running program; one thread reads and writes as its pipes allow, so that none of them can block the judge."""

    def __init__(self, command: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own group, so that its children end with it.
            start_new_session=True,
        )
        pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        self._pipes = [pipe for pipe in pipes if pipe]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)
        for number in (self._in, self._out, self._err):
            os.set_blocking(number, False)
        self._unsent, self._buffer, self._stderr = bytearray(), bytearray(), bytearray()

    def ask(self, message: Mapping[str, Any], timeout: float, max_answer: int) -> Mapping[str, Any]:
        """Send one line and wait for one: in time, not too long, and a JSON object."""
        deadline = time.monotonic() + timeout
        self._unsent += json.dumps(message).encode() + b"\n"
        self._send()
        line = self._read_line(deadline, timeout, max_answer)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BrokenError(
                f"answered a line that is not JSON ({error}): {shorten(repr(bytes(line[:300])))}"
            ) from None
        if not isinstance(answer, dict):
            raise BrokenError(f"must answer a JSON object a line; got {shorten(repr(answer))}")
        return answer

    def close(self) -> None:
        """Let the program see the end of its input and stop by itself; end it where it does not."""
        self._pipes[0].close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2.0)
        self.stop()

    def stop(self) -> None:
        """End the program and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()

    def _send(self) -> None:
        """Write as much as the pipe takes, and watch it for room for the rest."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            if self._in not in self._selector.get_map():
                self._selector.register(self._in, selectors.EVENT_WRITE)
            return
        except OSError:  # A program that ended or closed its input cannot be written to; the reader says so.
            self._unsent.clear()
        if self._in in self._selector.get_map():
            self._selector.unregister(self._in)

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
            # An endless drip of bytes is not an answer either.
            left = deadline - time.monotonic()
            ready = {key.fd for key, _ in self._selector.select(left)} if left > 0 else set()
            if not ready:
                raise BrokenError(f"no answer within {timeout:g} seconds{self._said()}")
            if self._in in ready:
                self._send()
            if self._err in ready:
                self._read_stderr()
            if self._out in ready:
                chunk = os.read(self._out, _CHUNK)
                if not chunk:
                    raise BrokenError(self._describe_end())
                self._buffer += chunk

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1.0)
        with contextlib.suppress(BlockingIOError):
            while self._read_stderr():
                pass
        status = self._popen.poll()
        how = "closed its output" if status is None else f"ended with status {status}"
        return f"the program {how} instead of answering{self._said()}"

    def _read_stderr(self) -> bool:
        chunk = os.read(self._err, _CHUNK)
        if not chunk and self._err in self._selector.get_map():
            self._selector.unregister(self._err)
        self._stderr = (self._stderr + chunk)[-_KEPT_STDERR:]
        return bool(chunk)

    def _said(self) -> str:
        text = bytes(self._stderr).decode("utf-8", errors="replace").strip()
        return f"; the end of its stderr: {shorten(text[-300:])}" if text else ""


def make_request(
    operation: str, inputs: Mapping[str, Any], dtype: str, number: int = 1, *, exact: bool = False
) -> dict[str, Any]:
    """The question that asks a program for one call; ``exact`` as in ``encode``."""
    encoded = {name: encode(value, exact=exact) for name, value in inputs.items()}
    return {"type": "call", "id": number, "operation": operation, "dtype": dtype, "inputs": encoded}
