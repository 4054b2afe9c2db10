"""The two doors: an object of this process, and a program that speaks JSON lines over stdin and stdout.

A Python module on the command line goes through the second door too, in a host (``serve``): nothing that it does
there reaches the reference, the comparison or the exit status, which stay with the judge. A program is not trusted to
answer, to answer in order or to stop: every wait has a limit, an answer a largest size, and a program that fails is
started again a few times. No answer runs code or takes memory by a number that was sent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import operator
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
from binascii import a2b_base64, b2a_base64
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.comparison import abbreviate, arrays_of, fields_of, outputs_of
from shd_ref.conformance.generator import OUTPUTS, Inputs, OwnDtype, relay
from shd_ref.conformance.specification import DTYPES, VECTORS_VERSION, error_codes, spec_edition

Calls: TypeAlias = Sequence[tuple[str, Inputs]]
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class Reply:
    """The reply of an implementation to a call.

    ``kind`` is ``"value"`` with ``outputs`` by name; ``"refused"`` with a code of ERR-2; ``"missing"`` with the
    option as ``code``, if it was said; or ``"broken"``, with the sentence that was broken as ``code``, if it is just
    one. ``ended``: it can answer no more of this operation (it hung or died).
    """

    kind: str
    outputs: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    ended: bool = False


class Direct:
    """An object of this process: the operations' functions, or ``run_operation(operation, inputs, dtype)``."""

    dtypes = DTYPES

    def __init__(self, implementation: Any) -> None:
        self.implementation = implementation
        self.name = getattr(implementation, "__name__", type(implementation).__name__)
        self._earlier: deque[tuple[str, Any, Any]] = deque(maxlen=4)

    def ask(self, calls: Calls, dtype: str, *, layout: int = 0, over: bool = False) -> list[Reply]:
        """One call, its arrays lying oddly in memory by a seed; nothing that the implementation raises is raised.

        Or several from as many threads at once, again and again: the first reply to each, then one unlike it.
        """
        if len(calls) > 1:
            return self._ask_together(calls, dtype)
        ((operation, inputs),) = calls
        inputs = relay(np.random.default_rng(layout), inputs) if layout else inputs
        before = _image(inputs)
        reply, answer = self._call(operation, inputs, dtype)
        if reply.kind not in ("value", "refused"):
            return [reply]
        for (name, after), (_, earlier) in zip(_image(inputs), before, strict=True):
            if after != earlier:
                return [
                    Reply("broken", {}, "MAP-8", f"changed its argument {name}: a caller's arrays are not its own")
                ]
        for name, arrays, image in self._earlier:
            if image != _image(arrays):
                self._earlier.clear()
                return [Reply("broken", {}, "NUM-9", f"changed what an earlier call of {name} had answered")]
        answered = arrays_of(answer) if reply.kind == "value" else []
        if any(np.may_share_memory(*pair) for pair in product(answered, arrays_of(inputs))):
            problem = "answered with memory of an argument: what a caller writes there changes both"
            return [Reply("broken", {}, "NUM-9", problem)]
        small = [array for array in answered if array.nbytes < 1 << 22]
        self._earlier.append((operation, small, _image(small)))
        return [reply]

    def _ask_together(self, calls: Calls, dtype: str) -> list[Reply]:
        gate = threading.Barrier(len(calls))

        def work(call: tuple[str, Inputs]) -> tuple[Reply, Reply]:
            gate.wait(10)
            # After each line of Python the others may go on: on a busy core the interpreter alone seldom lets them.
            sys.settrace(pause)
            replies, end, late = [self._call(*call, dtype)[0]], time.process_time() + 0.04, time.monotonic() + 1.0
            while len(replies) < 250 and time.process_time() < end and time.monotonic() < late:
                replies.append(self._call(*call, dtype)[0])
            sys.settrace(None)
            images = [(reply.kind, reply.code, _image(reply.outputs)) for reply in replies]
            return replies[0], next((r for r, i in zip(replies, images, strict=True) if i != images[0]), replies[0])

        def pause(*_: Any) -> Any:
            time.sleep(0)
            return pause

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
        with ThreadPoolExecutor(len(calls)) as pool:
            firsts, others = zip(*pool.map(work, calls), strict=True)
        sys.setswitchinterval(interval)
        return [*firsts, *others]

    def _call(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> tuple[Reply, Any]:
        adapter = hasattr(self.implementation, "run_operation")
        function: Any = getattr(self.implementation, "run_operation" if adapter else operation, None)
        if not callable(function):
            return Reply("missing", message=f"no function {operation}"), None
        try:
            with np.errstate(all="ignore"):
                answer = function(operation, inputs, dtype) if adapter else function(**inputs)
                return Reply("value", outputs_of(operation, answer)), answer
        except BaseException as error:
            if type(error) is KeyboardInterrupt:
                raise
            return _read_error(error, inputs, adapter), None


def _read_error(error: BaseException, inputs: Mapping[str, Any], adapter: bool) -> Reply:
    """An exception as a reply: a refusal is an ``Exception`` with a code of chapter ERR, and nothing else is."""
    message = str(error)
    code = getattr(error, "code", None) if isinstance(error, Exception) else None
    unexpected = _UNEXPECTED.search(message) if isinstance(error, TypeError) else None
    if unexpected and unexpected[1] in inputs:
        return Reply("missing", {}, unexpected[1], message)
    if isinstance(error, NotImplementedError) or code == "dependency-missing":
        return Reply("missing", message=message)
    if isinstance(code, str) and (code := str.__str__(code)) in error_codes():
        return Reply("refused", {}, code, message)
    odd = not all(
        array.flags.carray and array.dtype.isnative and array.dtype != object for array in arrays_of(inputs)
    )
    if adapter and odd and isinstance(error, TypeError | ValueError):
        return Reply("missing", {}, "layouts", f"the adapter does not turn this array into its own: {message}")
    about = f"with the code {code!r}, which is not in ERR-2: {message}" if code else f"{message}, which has no code"
    return Reply("broken", message=f"raised {type(error).__name__} {about}")


def _image(value: Any) -> Any:
    """The contents of a value, to see later whether they changed."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    items = list(enumerate(value)) if isinstance(value, list | tuple) else list(fields_of(value).items())
    return [(name, _image(item)) for name, item in items] if items else repr(value)


def write_over(old: Any, new: Any) -> Any:
    """The new value, in the old arrays and lists where these have its shapes and dtypes."""
    if isinstance(new, np.ndarray):
        if (type(old), getattr(old, "shape", ()), getattr(old, "dtype", "")) != (type(new), new.shape, new.dtype):
            return new.copy()
        old[...] = new
        return old
    if isinstance(new, dict):
        return {name: write_over(old.get(name), item) for name, item in new.items()}
    if not isinstance(new, list | tuple):
        return new
    olds = [*old, *[None] * len(new)] if type(old) is type(new) else [None] * len(new)
    items = [write_over(*pair) for pair in zip(olds, new, strict=False)]
    if type(old) is not list or type(new) is not list:
        return type(new)(items)
    old[:] = items
    return old


# --- how values travel --------------------------------------------------------------------------------------------

MAX_ANSWER = 1 << 26  # bytes of the longest line that is read
PROTOCOL = "1"
START_LIMIT = 60.0  # seconds for a program to start: a library may take long to load
_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}
_KINDS = {"b": "bool", "f": "float", "c": "complex128", "i": "int64", "u": "int64"}


class NotSpokenError(Exception):
    """A value that the protocol has no words for."""


def make_request(operation: str, inputs: Inputs, dtype: str, number: int = 1) -> dict[str, Any]:
    """The question that asks a program for one call."""
    encoded = {name: _encode(value, _spell) for name, value in inputs.items()}
    return {"type": "call", "id": number, "operation": operation, "dtype": dtype, "inputs": encoded}


def _encode(value: Any, write: Callable[[Any], Any]) -> Any:
    """A value in JSON: arrays as ``write`` has them, records by their fields."""
    if hasattr(value, "__array__") and not isinstance(value, Mapping):
        return write(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": _number(value)}
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return [_encode(item, write) for item in value]
    return {str(name): _encode(item, write) for name, item in fields_of(value).items()}


def _spell(array: Any) -> Any:
    """An array of a question, spelled out."""
    if isinstance(array, np.generic):
        return _encode(array.item(), _spell)
    kind = _KINDS.get(array.dtype.kind, "")
    kind = array.dtype.newbyteorder("=").name if isinstance(array, OwnDtype) and kind == "float" else kind
    if kind in ("", "float16") or (kind == "int64" and array.size and int(array.max()) >= 2**63):
        raise NotSpokenError(f"an array of {array.dtype}")
    numbers = array.real.ravel()
    data = numbers.tolist()
    for place in np.flatnonzero(~np.isfinite(numbers)):  # few, where an array may hold a million
        data[place] = _number(data[place])
    return {"shape": array.shape, "dtype": kind, "data": data}


def _pack(value: Any) -> Any:
    """An array of a host's answer, as its bytes."""
    array = np.asarray(value, np.float64 if "float" in str(getattr(value, "dtype", "")) else None)
    if array.nbytes > MAX_ANSWER // 2:
        raise ValueError(f"an array of shape {list(array.shape)}, which is too large to be read")
    data = b2a_base64(array.astype(array.dtype.newbyteorder("<")).tobytes(), newline=False).decode()
    return {"shape": array.shape, "dtype": array.dtype.name, "bytes": data}


def _number(item: Any) -> Any:
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item


def _decode(value: Any) -> Any:
    """An array of any form, or a plain value."""
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return _SPECIALS.get(value, value) if isinstance(value, str) else value
    if value.keys() == {"number"}:
        return _SPECIALS[value["number"]]
    if "shape" not in value or not {"data", "bytes"} & set(value):
        return {name: _decode(item) for name, item in value.items()}
    # NumPy takes -1 for a size that it finds out; an answer says its sizes.
    if not isinstance(value["shape"], list) or not all(type(size) is int and size >= 0 for size in value["shape"]):
        raise ValueError("a shape is a list of sizes from 0 on")
    if "data" in value:
        data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
        return np.array(data, dtype=np.float64).reshape(value["shape"])
    if not re.fullmatch("bool|u?int[0-9]+|float[0-9]+|complex[0-9]+", value["dtype"]):
        raise ValueError(f"an array of {value['dtype']}")
    return np.frombuffer(a2b_base64(value["bytes"]), dtype=value["dtype"]).reshape(value["shape"])


# --- the host of a module -----------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Answer for a module or an object in it, ``package.module:name``, until the input ends.

    ``Direct`` checks here, where memory shows, that arguments and earlier answers are as they were; arrays that the
    judge wrote over are written over.
    """
    error_codes()  # read before the module can change the file
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the implementation reads is empty, and what it prints is for people and no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    hello = json.loads(questions.readline())
    try:
        direct = Direct(_load(path))
    except ProgramError as error:
        send({**hello, "error": {"message": str(error)}})
        return
    send({**hello, "name": path, "operations": list(OUTPUTS), "dtypes": list(DTYPES), "arrays": "bytes"})
    old: Inputs = {}
    for question in map(json.loads, questions):
        calls = pickle.loads(a2b_base64(question["pickled"]))  # of the judge, which started this process
        if question["over"]:
            old = write_over(old, calls[0][1])
            calls = [(calls[0][0], old)]
        replies = direct.ask(calls, question["dtype"], layout=question["layout"])
        send({"id": question["id"], "answers": [_write_reply(reply) for reply in replies]})


def _load(path: str) -> Any:
    """Modules are looked for in the current folder too; somebody else's may fail in any way."""
    name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    step = "imported"
    try:
        target: Any = importlib.import_module(name)
        step = "found"
        target = operator.attrgetter(attribute)(target) if attribute else target
        step = "constructed"
        return target() if isinstance(target, type) else target
    except BaseException as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0])
        hint = "; give a module's name, without .py, of the current folder or PYTHONPATH" if absent else ""
        raise ProgramError(f"cannot be {step}: {type(error).__name__}: {error}{hint}") from error


def _write_reply(reply: Reply) -> dict[str, Any]:
    """A reply in the words of the protocol; an output that cannot be read is left out."""
    outputs, problem = {}, ""
    for name, value in reply.outputs.items():
        try:
            outputs[name] = _encode(value, _pack)
        except BaseException as error:
            problem = f"answered as {name} what cannot be read: {type(error).__name__}: {error}"
    if reply.kind == "value" and (outputs or not problem):
        return {"outputs": outputs}
    code = {"missing": "not-implemented", "refused": reply.code}.get(reply.kind, "internal")
    return {"error": {"code": code, "message": problem or reply.message, "detail": reply.code}}


def _read_reply(answer: Any) -> Reply:
    answer = answer if isinstance(answer, Mapping) else {}
    error, outputs = answer.get("error"), answer.get("outputs")
    if isinstance(error, Mapping) and isinstance(error.get("code"), str):
        code, message, detail = (str(error.get(name) or "") for name in ("code", "message", "detail"))
        if code in error_codes():
            return Reply("refused", {}, code, message)
        if code in ("not-implemented", "dependency-missing"):
            return Reply("missing", {}, detail, message)
        other = "" if code == "internal" else f"answered with the error code {code!r}, which is not in ERR-2: "
        return Reply("broken", {}, detail, other + message)
    if not isinstance(outputs, Mapping):
        problem = f"answered with neither 'outputs' nor an 'error' that has a code: {abbreviate(answer)}"
        return Reply("broken", message=problem)
    try:
        return Reply("value", {name: _decode(value) for name, value in outputs.items()})
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as problem:
        return Reply("broken", message=f"answered an array that cannot be read ({problem!r}): {abbreviate(answer)}")


# --- programs -----------------------------------------------------------------------------------------------------


class ProgramError(RuntimeError):
    """A program that cannot be judged at all: it does not start, or does not know the protocol."""


class _SilentError(Exception):
    """No answer that can be read; the program must be started again."""


def _ends(process: subprocess.Popen[bytes]) -> list[int]:
    """The judge's ends of its input, output and stderr."""
    return [pipe.fileno() for pipe in (process.stdin, process.stdout, process.stderr) if pipe]


class Program:
    """A program behind the protocol of ``specs/conformance.md``, a context manager that stops it.

    An answer has ``timeout`` seconds; a program that crashed, hung or answered garbage is started again when it is
    next asked, which the judge does for another operation. ``name`` is for reports, until the program says one.
    """

    def __init__(self, command: Sequence[str], *, timeout: float = 2.0, name: str | None = None) -> None:
        self.command, self.timeout, self.name = list(command), timeout, name or " ".join(command)
        self.operations: tuple[str, ...] = ()
        self.dtypes: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread, self._last_words, self._last_id, self._host = b"", b"", 0, False

    def __enter__(self) -> Program:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        """Let the program see the end of its input and stop by itself; end it where it does not."""
        if self._process and self._process.stdin:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)
        self._stop()

    def ask(self, calls: Calls, dtype: str, *, layout: int = 0, over: bool = False) -> list[Reply]:
        """A question and its answer, as of ``Direct``; ``over``: in the arrays of the last such call."""
        if len(calls) > 1 and not self._host:
            return [reply for call in calls for reply in self.ask([call], dtype)]
        self._last_id += 1
        operation, inputs = calls[0]
        if operation not in self.operations or dtype not in self.dtypes:
            lacked = operation if operation not in self.operations else f"the dtype {dtype}"
            return [Reply("missing", message=f"the program does not list {lacked}")]
        try:
            if self._host:
                data = b2a_base64(pickle.dumps(calls), newline=False).decode()
                question = {"id": self._last_id, "dtype": dtype, "layout": layout, "over": over, "pickled": data}
            else:
                question = make_request(operation, inputs, dtype, self._last_id)
            if not self._process:
                self._start()
            answer = self._exchange(question, self.timeout * len(calls))
            if answer.get("id") != self._last_id:
                raise _SilentError(f"answered question {answer.get('id')!r} when asked question {self._last_id}")
        except NotSpokenError as error:
            return [Reply("missing", {}, "unspoken", str(error))]
        except (_SilentError, ProgramError) as error:
            self._stop()  # what it may still say belongs to no question
            return [Reply("broken", message=str(error), ended=True)]
        replies = answer.get("answers") if self._host else None
        return [_read_reply(reply) for reply in (replies if isinstance(replies, list) and replies else [answer])]

    def _start(self) -> None:
        self._unread, self._last_words, pipe = b"", b"", subprocess.PIPE
        try:
            # Its own group, so that its children end with it; pipes that never block, whatever it does.
            self._process = process = subprocess.Popen(
                self.command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            hint = "give its path, such as ./my_shd, and its interpreter before it where it is not executable"
            raise ProgramError(f"{self.name} cannot be started: {error}; {hint}") from error
        for end in _ends(process):
            os.set_blocking(end, False)
        versions = {"protocol": PROTOCOL, "spec_edition": spec_edition(), "vectors_version": VECTORS_VERSION}
        try:
            answer = self._exchange({"type": "hello", **versions}, max(self.timeout, START_LIMIT))
            problem = answer["error"].get("message") if isinstance(answer.get("error"), Mapping) else ""
            lists: list[Any] = [answer.get(key) for key in ("operations", "dtypes")]
            listed = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
            if not problem and (answer.get("type"), answer.get("protocol"), listed) != ("hello", PROTOCOL, True):
                expected = f"type 'hello', protocol {PROTOCOL!r} and lists of names as operations and dtypes"
                raise _SilentError(f"expected {expected}; got {abbreviate(answer)}")
        except _SilentError as error:
            problem = f"gave no handshake: {error}; it must answer one line of JSON, ended and flushed"
        if problem:
            self._stop()
            raise ProgramError(f"{self.name} {problem}")
        self.operations, self.dtypes = map(tuple, lists)
        self.name, self._host = str(answer.get("name") or self.name), answer.get("arrays") == "bytes"

    def _exchange(self, message: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """Send one line and wait for one: in time, not too long, and a JSON object."""
        process, end = self._process, time.monotonic() + timeout
        assert process
        inlet, outlet, aside = _ends(process)
        question, sources = memoryview(json.dumps(message).encode() + b"\n"), {outlet, aside}
        chunk, line = self._unread, bytearray(self._unread)
        while b"\n" not in chunk:
            ready, room, _ = select.select(sources, [inlet] if question else (), (), max(0.0, end - time.monotonic()))
            if not ready + room or time.monotonic() > end:
                raise _SilentError(f"no answer within {timeout:g} seconds{self._words()}")
            if room:
                try:
                    question = question[os.write(inlet, question) :]
                except OSError:  # it ended, as the other pipe will show
                    question = question[:0]
            if aside in ready:
                words = os.read(aside, 1 << 16)
                self._last_words = (self._last_words + words)[-300:]
                sources -= {aside} if not words else set()
            if outlet in ready:
                chunk = os.read(outlet, 1 << 16)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=1.0)
                    status = process.poll()
                    how = "closed its output" if status is None else f"ended with status {status}"
                    raise _SilentError(f"the program {how} instead of answering{self._words()}")
                line += chunk
            if len(line) > MAX_ANSWER:
                raise _SilentError(f"answered a line of more than {MAX_ANSWER} bytes")
        text, _, self._unread = bytes(line).partition(b"\n")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _SilentError(f"answered a line that is not JSON ({error}): {abbreviate(text[:300])}") from None
        if not isinstance(answer, dict):
            raise _SilentError(f"must answer a JSON object a line; got {abbreviate(answer)}")
        return answer

    def _words(self) -> str:
        if self._process:
            with contextlib.suppress(OSError):  # its last words may still be in the pipe
                self._last_words += os.read(_ends(self._process)[2], 1 << 16)
        text = self._last_words[-300:].decode("utf-8", errors="replace").strip()
        return f"; the end of its stderr: {abbreviate(text)}" if text else ""

    def _stop(self) -> None:
        """End the program and everything it started."""
        process, self._process = self._process, None
        if process:
            with process, contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
