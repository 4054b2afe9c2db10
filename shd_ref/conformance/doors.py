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
import re
import selectors
import signal
import subprocess
import sys
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
_ROUNDS = 25  # of calls in several threads
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
        """These calls from as many threads at once, again and again; of each a wrong reply, if there is one."""
        replies: list[list[Reply]] = [[] for _ in calls]
        gate = threading.Barrier(len(calls))

        def work(number: int) -> None:
            operation, inputs = calls[number]
            for _ in range(_ROUNDS):
                gate.wait(10)
                replies[number].append(self._call(operation, inputs, dtype)[0])

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        return [one for each in zip(*replies, strict=True) for one in each]

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
    if value is None or type(value) in (bool, int, str):
        return value
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


def decode_argument(value: Any) -> Any:
    """What ``encode`` made with ``exact``, as it was: with its strides, byte order and write flag."""
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
    if hasattr(value, "__array__") and not isinstance(value, Mapping):
        array = np.asarray(value)
        if (
            "float" in array.dtype.name and array.dtype.kind != "f"
        ):  # bfloat16 and others that NumPy has from elsewhere
            array = array.astype(np.float64)
        return (
            _as_bytes(array, layout=False) if array.dtype.kind in "biufc" else {"other": f"an array of {array.dtype}"}
        )
    if fields := fields_of(value):
        return {str(name): encode_answer(item) for name, item in fields.items()}
    return (
        [encode_answer(item) for item in value]
        if isinstance(value, list | tuple)
        else {"other": f"a {type(value).__name__}"}
    )


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
    shape = value["shape"]
    # NumPy takes -1 for a size that it finds out; an answer says its sizes.
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("a shape is a list of sizes from 0 on")
    if "bytes" in value:
        return _from_bytes(value)
    data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
    return np.array(data, dtype=np.float64).reshape(shape)


def _as_bytes(value: Any, *, layout: bool) -> dict[str, Any]:
    if value.nbytes > MAX_ANSWER // 2:
        raise ValueError(f"an array of shape {list(value.shape)}, which is too large to be read")
    encoded: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype.str}
    if value.dtype.kind == "O":
        encoded["items"] = [encode(item, exact=True) for item in value.reshape(-1).tolist()]
    else:
        encoded["bytes"] = b2a_base64(value.tobytes(), newline=False).decode()
    if isinstance(value, np.generic):
        encoded["scalar"] = True
    elif layout:
        encoded |= {"strides": value.strides} if not value.flags.c_contiguous else {}
        encoded |= {"readonly": True} if not value.flags.writeable else {}
        encoded |= {"own": True} if isinstance(value, OwnDtype) else {}
    return encoded


def _from_bytes(value: Mapping[str, Any]) -> Array:
    if "items" in value:
        array = np.empty(len(value["items"]), dtype=object)
        array[:] = [decode_argument(item) for item in value["items"]]
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
            answer = self._running().ask(request, self.timeout)
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


_CHUNK = 1 << 16
_KEPT_STDERR = 2000


class _Process:
    """A running program; one thread reads and writes as its pipes allow, so that none of them can block the judge."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # Its own group, so that its children end with it.
        self._popen = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._pipes = [pipe for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr) if pipe]
        self._in, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)
        for number in (self._in, self._out, self._err):
            os.set_blocking(number, False)
        self._unsent, self._buffer, self._stderr = bytearray(), bytearray(), bytearray()

    def ask(self, message: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """Send one line and wait for one: in time, not too long, and a JSON object."""
        deadline = time.monotonic() + timeout
        self._unsent += json.dumps(message).encode() + b"\n"
        self._send()
        line = self._read_line(deadline, timeout)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _SilentError(
                f"answered a line that is not JSON ({error}): {shorten(repr(bytes(line[:300])))}"
            ) from None
        if not isinstance(answer, dict):
            raise _SilentError(f"must answer a JSON object a line; got {shorten(repr(answer))}")
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

    def _read_line(self, deadline: float, timeout: float) -> bytearray:
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            searched = end if end >= 0 else len(self._buffer)
            if searched > MAX_ANSWER:
                raise _SilentError(f"answered a line of more than {MAX_ANSWER} bytes")
            if end >= 0:
                line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
                return line
            # An endless drip of bytes is not an answer either.
            left = deadline - time.monotonic()
            ready = {key.fd for key, _ in self._selector.select(left)} if left > 0 else set()
            if not ready:
                raise _SilentError(f"no answer within {timeout:g} seconds{self._said()}")
            if self._in in ready:
                self._send()
            if self._err in ready:
                self._read_stderr()
            if self._out in ready:
                chunk = os.read(self._out, _CHUNK)
                if not chunk:
                    raise _SilentError(self._describe_end())
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
