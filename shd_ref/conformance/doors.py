"""The two doors: an object of this process, and a program that speaks JSON lines over stdin and stdout.

A Python module on the command line goes through the second door too, in a host of its own (``host.py``): nothing that
it does there reaches the reference, the comparison or the exit status, which stay with the judge. A program is not
trusted to answer, to answer in order or to stop: every wait has a limit, an answer a largest size, and a program that
fails is started again a few times. No answer runs code or takes memory by a number that was sent.

The object door is for an implementer's own tests and promises less: the object shares the judge's process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from binascii import a2b_base64, b2a_base64
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shd_ref.attention import Array
from shd_ref.conformance.comparison import arrays_of, fields_of, outputs_of
from shd_ref.conformance.generator import OwnDtype
from shd_ref.conformance.specification import VECTORS_VERSION, error_codes, spec_edition


@dataclass(frozen=True)
class Reply:
    """What an implementation did with a call.

    Attributes:
        kind: ``"value"``, ``"refused"`` (with a code of ERR-2), ``"missing"`` (the operation or an option), or
            ``"broken"`` (neither: it crashed, raised something else, changed its inputs).
        outputs: by name, of a value.
        code: of a refusal; of what is missing the option, if it said so; of a value that broke a rule its sentence.
        message: its own words, or what was broken.
        ended: whether it can answer no more of this operation (it hung or died).
    """

    kind: str
    outputs: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    ended: bool = False


@runtime_checkable
class Adapter(Protocol):
    """An implementation behind one method, for those that need the dtype's name or other arrays."""

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """Run one operation of ``specs/shd.md``.

        Args:
            operation: its name, such as ``"solve_alpha"``.
            inputs: the arguments by name. Float arrays are float64 for dtype float64, else float32 arrays
                that hold only numbers of that dtype; masks are boolean. An ``OwnDtype`` array keeps its dtype.
            dtype: ``float64``, ``float32``, ``float16`` or ``bfloat16``: what to compute in.

        Returns:
            The output; for several, a tuple in order, or a mapping or object with their names.

        Raises:
            NotImplementedError: this operation, option or dtype is missing.
            Exception: with a ``code`` of chapter ERR, where the inputs must be refused.
        """


_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_ROUNDS = 100  # of calls in several threads, in a tenth of a second
_LARGE = 1 << 22  # bytes from which on an answer is not kept to see whether it changes


class Direct:
    """An object of this process: a module or object with the operations' functions, or an ``Adapter``."""

    def __init__(self, implementation: Any) -> None:
        self.implementation, self.name = (
            implementation,
            getattr(implementation, "__name__", type(implementation).__name__),
        )
        self._earlier: deque[tuple[str, list[Array], list[bytes]]] = deque(maxlen=4)

    def ask(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Reply:
        """One call; nothing that the implementation raises is raised here."""
        before = {name: [(array, array.tobytes()) for array in arrays_of(value)] for name, value in inputs.items()}
        sizes = {name: _lengths(value) for name, value in inputs.items()}
        reply, answer = self._call(operation, inputs, dtype)
        if reply.kind not in ("value", "refused"):
            return reply
        for name, value in inputs.items():
            if _lengths(value) != sizes[name] or any(array.tobytes() != held for array, held in before[name]):
                _restore(before[name])
                return Reply(
                    "broken", code="MAP-8", message=f"changed its argument {name}: a caller's arrays are not its own"
                )
        for earlier, arrays, held in self._earlier:
            if held != [array.tobytes() for array in arrays]:
                self._earlier.clear()
                return Reply(
                    "broken", code="NUM-9", message=f"changed what an earlier call of {earlier} had answered"
                )
        answered = arrays_of(answer) if reply.kind == "value" else []
        if any(np.may_share_memory(one, other) for one, other in product(answered, arrays_of(inputs))):
            return Reply(
                "broken",
                code="NUM-9",
                message="answered with memory of an argument: what a caller writes there changes both",
            )
        small = [array for array in answered if array.nbytes < _LARGE]
        self._earlier.append((operation, small, [array.tobytes() for array in small]))
        return reply

    def ask_together(self, calls: Sequence[tuple[str, Mapping[str, Any]]], dtype: str) -> list[Reply]:
        """These calls from as many threads at once, again and again: the first reply of each, then one unlike it."""
        replies: list[list[Reply]] = [[] for _ in calls]
        gate = threading.Barrier(len(calls))

        def work(number: int) -> None:
            operation, inputs = calls[number]
            gate.wait(10)
            end = time.monotonic() + 0.1
            for _ in range(_ROUNDS):
                replies[number].append(self._call(operation, inputs, dtype)[0])
                if time.monotonic() > end:
                    return

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        unlike = [next((one for one in each if _content(one) != _content(each[0])), each[0]) for each in replies]
        return [each[0] for each in replies] + unlike

    def _call(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> tuple[Reply, Any]:
        adapter = isinstance(self.implementation, Adapter)
        function: Any = None if adapter else getattr(self.implementation, operation, None)
        if not adapter and not callable(function):
            return Reply("missing", message=f"no function {operation}"), None
        try:
            with np.errstate(all="ignore"):
                answer = (
                    self.implementation.run_operation(operation, inputs, dtype) if adapter else function(**inputs)
                )
                return Reply("value", outputs_of(operation, answer)), answer
        except KeyboardInterrupt as error:
            if type(error) is KeyboardInterrupt:
                raise
            return Reply("broken", message=f"raised {type(error).__name__}"), None
        except BaseException as error:
            return _read_error(error, inputs, adapter), None


def _read_error(error: BaseException, inputs: Mapping[str, Any], adapter: bool) -> Reply:
    """What an exception says: a refusal is an ``Exception`` with a code of chapter ERR, and nothing else is."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError):
        return Reply("missing", message=str(error))
    unexpected = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if unexpected and unexpected[1] in inputs:
        return Reply("missing", code=unexpected[1], message=str(error))
    code = getattr(error, "code", None) if isinstance(error, Exception) else None
    if isinstance(code, str) and (code := str.__str__(code)) in error_codes():
        return Reply("refused", code=code, message=str(error))
    if code == "dependency-missing":
        return Reply("missing", message=str(error))
    odd = not all(
        array.flags.carray and array.dtype.isnative and array.dtype.kind != "O" for array in arrays_of(inputs)
    )
    if adapter and odd and isinstance(error, TypeError | ValueError):
        return Reply("missing", code="layouts", message=f"the adapter does not turn this array into its own: {error}")
    if code:
        return Reply(
            "broken", message=f"raised {type(error).__name__} with the code {code!r}, which is not in ERR-2: {error}"
        )
    return Reply("broken", message=f"raised {told}, which has no code")


def _content(reply: Reply) -> Any:
    return reply.kind, reply.code, [array.tobytes() for array in arrays_of(reply.outputs)]


def _lengths(value: Any) -> Any:
    return (
        [_lengths(item) for item in value]
        if isinstance(value, list | tuple)
        else 0
        if isinstance(value, np.ndarray)
        else repr(value)
    )


def _restore(held: Sequence[tuple[Array, bytes]]) -> None:
    for array, numbers in held:
        if array.flags.writeable and array.dtype.kind != "O":
            array[...] = np.frombuffer(numbers, array.dtype).reshape(array.shape)


# --- how values travel --------------------------------------------------------------------------------------------

MAX_ANSWER = 1 << 26  # bytes of the longest line that is read
PROTOCOL = "1"
START_LIMIT = 60.0  # seconds for a program to start: a library may take long to load
_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


class NotSpokenError(Exception):
    """A value that the protocol has no words for."""


def encode(value: Any, *, exact: bool = False) -> Any:
    """An argument: arrays spelled out, with special numbers as strings; ``exact``, for a Python host, as bytes."""
    if isinstance(value, np.ndarray | np.generic) and exact:
        return _as_bytes(value, layout=True)
    if isinstance(value, np.ndarray):
        kind = {"b": "bool", "f": "float", "c": "complex128", "O": "", "V": ""}.get(value.dtype.kind, "int64")
        kind = value.dtype.newbyteorder("=").name if isinstance(value, OwnDtype) and kind == "float" else kind
        if kind in ("", "float16") or (kind == "int64" and value.size and int(value.max()) >= 2**63):
            raise NotSpokenError(f"an array of {value.dtype}")
        data = [_number(item) for item in (value.real if kind == "complex128" else value).reshape(-1).tolist()]
        return {"shape": list(value.shape), "dtype": kind, "data": data}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, list | tuple):
        items = [encode(item, exact=exact) for item in value]
        return {"tuple": items} if exact and isinstance(value, tuple) else items
    return {"number": _number(value)} if isinstance(value, float) and not math.isfinite(value) else value


def encode_answer(value: Any) -> Any:
    """An answer of a Python implementation: what ``numpy.asarray`` takes as bytes, records by their fields."""
    if hasattr(value, "__array__") and not isinstance(value, Mapping):
        array = np.asarray(value)
        if array.dtype.kind == "V" and "float" in array.dtype.name:  # bfloat16, which NumPy has from elsewhere
            array = array.astype(np.float64)
        kind = array.dtype.kind
        return _as_bytes(array, layout=False) if kind in "biufc" else {"other": f"an array of {array.dtype}"}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if fields := fields_of(value):
        return {str(name): encode_answer(item) for name, item in fields.items()}
    if isinstance(value, list | tuple):
        return [encode_answer(item) for item in value]
    return {"other": f"a {type(value).__name__}"}


def decode(value: Any, *, exact: bool = False) -> Any:
    """An array of any form, or a plain value; ``exact``, in the host alone, with strides and write flag."""
    if isinstance(value, list):
        return [decode(item, exact=exact) for item in value]
    if isinstance(value, str):
        return value if exact else _SPECIALS.get(value, value)
    if not isinstance(value, dict):
        return value
    if exact and "number" in value:
        return _SPECIALS[value["number"]]
    if exact and "tuple" in value:
        return tuple(decode(item, exact=True) for item in value["tuple"])
    if "shape" not in value or not {"data", "bytes", "items"} & set(value):
        return {name: decode(item) for name, item in value.items()}
    # NumPy takes -1 for a size that it finds out; an answer says its sizes.
    if not isinstance(value["shape"], list) or not all(type(size) is int and size >= 0 for size in value["shape"]):
        raise ValueError("a shape is a list of sizes from 0 on")
    if "data" in value:
        data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
        return np.array(data, dtype=np.float64).reshape(value["shape"])
    array = _from_bytes(value)
    if not exact:
        return array
    array = _laid_out(array, value["strides"]) if "strides" in value else array
    array.flags.writeable = "readonly" not in value
    return array[()] if "scalar" in value else array.view(OwnDtype) if "own" in value else array


def _as_bytes(value: Any, *, layout: bool) -> dict[str, Any]:
    if value.nbytes > MAX_ANSWER // 2:
        raise ValueError(f"an array of shape {list(value.shape)}, which is too large to be read")
    encoded: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype.str}
    if value.dtype.kind == "O":
        encoded["items"] = [encode(item, exact=True) for item in value.reshape(-1).tolist()]
    else:
        encoded["bytes"] = b2a_base64(value.tobytes(), newline=False).decode()
    if isinstance(value, np.generic):
        return encoded | {"scalar": True}
    if layout and not value.flags.c_contiguous:
        encoded["strides"] = value.strides
    flags = {"readonly": not value.flags.writeable, "own": isinstance(value, OwnDtype)} if layout else {}
    return encoded | {name: True for name, holds in flags.items() if holds}


def _from_bytes(value: Mapping[str, Any]) -> Array:
    if "items" in value:
        array = np.empty(len(value["items"]), dtype=object)
        array[:] = [decode(item, exact=True) for item in value["items"]]
        return array.reshape(value["shape"])
    if not _NUMBERS.fullmatch(value["dtype"]):
        raise ValueError(f"an array of {value['dtype']}")
    data = bytearray(a2b_base64(value["bytes"], strict_mode=True))
    return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"])


def _laid_out(array: Array, strides: list[int]) -> Array:
    """The same numbers at these distances in memory; what lies between them is noise."""
    if array.size == 0 or array.dtype.kind == "O":
        return array
    reach = [stride * (size - 1) for stride, size in zip(strides, array.shape, strict=True)]
    first = -sum(step for step in reach if step < 0)
    memory = np.full(first + sum(step for step in reach if step > 0) + array.itemsize, 0xA5, dtype=np.uint8)
    laid: Array = np.ndarray(array.shape, array.dtype, memory.data, first, strides)
    laid[...] = array
    return laid


def _number(item: Any) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if math.isnan(item) else "inf" if item > 0 else "-inf"
    return item


def shorten(text: str, limit: int = 200) -> str:
    """At most ``limit`` characters, for a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- programs -----------------------------------------------------------------------------------------------------


class ProgramError(RuntimeError):
    """A program that cannot be judged at all: it does not start, or does not know the protocol."""


class _SilentError(Exception):
    """No answer that can be read; the program must be started again."""


class Program:
    """A program behind the protocol of ``specs/conformance.md``, a context manager that stops it.

    An answer has ``timeout`` seconds; a program that crashed, hung or answered garbage is started again
    ``max_restarts`` times. ``name`` is for reports, until the program says one.
    """

    def __init__(
        self, command: Sequence[str], *, timeout: float = 2.0, max_restarts: int = 10, name: str | None = None
    ) -> None:
        self.command, self.timeout, self.name = list(command), timeout, name or " ".join(command)
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

    def __exit__(self, *error: object) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def ask(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Reply:
        """One question and its answer."""
        return self._ask([(operation, inputs)], dtype, "call")[0]

    def ask_together(self, calls: Sequence[tuple[str, Mapping[str, Any]]], dtype: str) -> list[Reply]:
        """Calls at once, in a host of Python; of another program one after another."""
        return self._ask(calls, dtype, "together") if self._exact else [self.ask(*call, dtype) for call in calls]

    def _ask(self, calls: Sequence[tuple[str, Mapping[str, Any]]], dtype: str, kind: str) -> list[Reply]:
        for operation, _ in calls:
            if operation not in self.operations or dtype not in self.dtypes:
                lacked = operation if operation not in self.operations else f"the dtype {dtype}"
                return [Reply("missing", message=f"the program does not list {lacked}")] * len(calls)
        try:
            asked = [make_request(*call, dtype, self._last_id + 1, exact=self._exact) for call in calls]
        except NotSpokenError as error:
            return [Reply("missing", code="unspoken", message=str(error))] * len(calls)
        self._last_id += 1
        if kind == "together":
            request: dict[str, Any] = {"type": kind, "id": self._last_id, "calls": asked}
        else:
            (request,), (_, inputs) = asked, calls[0]
            if self._exact:
                request["again"] = [name for name, value in inputs.items() if value is self._last_inputs.get(name)]
                self._last_inputs = dict(inputs)
        try:
            answer = self._running().ask(request, self.timeout * len(calls))
            if answer.get("id") != self._last_id:
                raise _SilentError(f"answered question {answer.get('id')!r} when asked question {self._last_id}")
        except _SilentError as error:
            # What it may still say belongs to no question: start it again.
            if self._process:
                self._process.stop()
            self._process = None
            return [Reply("broken", message=str(error), ended=True)] * len(calls)
        replies = answer.get("answers") if kind == "together" else [answer]
        return [_read_reply(reply) for reply in replies] if isinstance(replies, list) else [_read_reply(answer)]

    def _running(self) -> _Process:
        if self._process is None:
            if not self._restarts_left:
                raise _SilentError(f"not asked: the program failed {self._max_restarts + 1} times and is given up")
            self._restarts_left -= 1
            try:
                self._process = self._start()
            except ProgramError as error:
                raise _SilentError(f"the program could not be started again: {error}") from error
        return self._process

    def _start(self) -> _Process:
        try:
            process = _Process(self.command)
        except OSError as error:
            raise ProgramError(f"{self.name} cannot be started: {error}") from error
        versions = {"protocol": PROTOCOL, "spec_edition": spec_edition(), "vectors_version": VECTORS_VERSION}
        try:
            answer = process.ask({"type": "hello", **versions}, max(self.timeout, START_LIMIT))
            if isinstance(answer.get("error"), Mapping):
                process.stop()
                raise ProgramError(f"{self.name} {answer['error'].get('message')}")
            self._read_hello(answer)
        except _SilentError as error:
            process.stop()
            raise ProgramError(f"no handshake from {self.name}: {error}") from error
        return process

    def _read_hello(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") != "hello" or answer.get("protocol") != PROTOCOL:
            raise _SilentError(f"expected type 'hello' and protocol {PROTOCOL!r}; got {shorten(json.dumps(answer))}")
        for key in ("operations", "dtypes"):
            names = answer.get(key)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise _SilentError(f"expected a list of names as {key!r}; got {shorten(repr(names))}")
        self.operations, self.dtypes = tuple(answer["operations"]), tuple(answer["dtypes"])
        self.name, self._exact = str(answer.get("name") or self.name), answer.get("arrays") == "bytes"


def make_request(
    operation: str, inputs: Mapping[str, Any], dtype: str, number: int = 1, *, exact: bool = False
) -> dict[str, Any]:
    """The question that asks a program for one call; ``exact`` as in ``encode``."""
    encoded = {name: encode(value, exact=exact) for name, value in inputs.items()}
    return {"type": "call", "id": number, "operation": operation, "dtype": dtype, "inputs": encoded}


def _read_reply(answer: Any) -> Reply:
    error, broken, outputs = (
        answer.get(name) if isinstance(answer, Mapping) else None for name in ("error", "broken", "outputs")
    )
    if isinstance(broken, Mapping):  # a host saw what no other program is asked about
        return Reply("broken", code=str(broken.get("spec") or ""), message=str(broken.get("message", "")))
    if isinstance(error, Mapping) and isinstance(error.get("code"), str):
        code, message = error["code"], str(error.get("message", ""))
        if code in ("not-implemented", "dependency-missing"):
            return Reply("missing", code=str(error.get("option") or ""), message=message)
        if code not in error_codes():
            return Reply("broken", message=f"answered with the error code {code!r}, which is not in ERR-2: {message}")
        return Reply("refused", code=code, message=message)
    if not isinstance(outputs, Mapping):
        return Reply(
            "broken",
            message=f"answered with neither 'outputs' nor an 'error' that has a code: {shorten(json.dumps(answer))}",
        )
    try:
        return Reply("value", {name: decode(value) for name, value in outputs.items()})
    except (TypeError, ValueError, KeyError, OverflowError) as problem:
        return Reply(
            "broken", message=f"answered an array that cannot be read ({problem!r}): {shorten(json.dumps(answer))}"
        )
    except RecursionError:
        return Reply("broken", message="answered with lists in lists too deep to be read")


class _Process:
    """A running program; a thread reads what it says and another writes, so that neither pipe can block the judge."""

    def __init__(self, command: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (until ``stop``)
        pipe = subprocess.PIPE
        # Its own group, so that its children end with it.
        try:
            self._popen = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._stderr, start_new_session=True
            )
        except OSError:
            self._stderr.close()
            raise
        self._lines: queue.Queue[bytes] = queue.Queue(maxsize=1)  # more than was asked for waits in the pipe
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def ask(self, message: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """Send one line and wait for one: in time, not too long, and a JSON object."""
        self._questions.put(json.dumps(message).encode() + b"\n")
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise _SilentError(f"no answer within {timeout:g} seconds{self._said()}") from None
        if len(line) > MAX_ANSWER:
            raise _SilentError(f"answered a line of more than {MAX_ANSWER} bytes")
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=1.0)
            status = self._popen.poll()
            how = "closed its output" if status is None else f"ended with status {status}"
            raise _SilentError(f"the program {how} instead of answering{self._said()}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _SilentError(f"answered a line that is not JSON ({error}): {shorten(repr(line[:300]))}") from None
        if not isinstance(answer, dict):
            raise _SilentError(f"must answer a JSON object a line; got {shorten(repr(answer))}")
        return answer

    def close(self) -> None:
        """Let the program see the end of its input and stop by itself; end it where it does not."""
        self._questions.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2.0)
        self.stop()

    def stop(self) -> None:
        """End the program and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._questions.put(None)
        self._stderr.close()

    def _read(self) -> None:
        assert self._popen.stdout
        with self._popen.stdout as answers:
            while True:
                line = answers.readline(MAX_ANSWER + 1)
                self._lines.put(line)
                if not line.endswith(b"\n"):
                    return

    def _write(self) -> None:
        assert self._popen.stdin
        # A program that ended cannot be written to; the reader says so.
        with contextlib.suppress(OSError), self._popen.stdin as questions:
            while (question := self._questions.get()) is not None:
                questions.write(question)
                questions.flush()

    def _said(self) -> str:
        # The program's own offset in the file must not move.
        file, size = self._stderr.fileno(), os.fstat(self._stderr.fileno()).st_size
        text = os.pread(file, 300, max(0, size - 300)).decode("utf-8", errors="replace").strip()
        return f"; the end of its stderr: {shorten(text)}" if text else ""
