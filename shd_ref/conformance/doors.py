"""The two doors: an object of this process, and a program that speaks JSON lines over stdin and stdout.

A Python module on the command line goes through the second door too, in a host of its own (``serve``): nothing that
it does there reaches the reference, the comparison or the exit status, which stay with the judge. A program is not
trusted to answer, to answer in order or to stop: every wait has a limit, an answer a largest size, and a program that
fails is started again a few times. No answer runs code or takes memory by a number that was sent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import pickle
import queue
import re
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
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shd_ref.attention import Array
from shd_ref.conformance.comparison import arrays_of, fields_of, outputs_of
from shd_ref.conformance.generator import OUTPUTS, Inputs, OwnDtype, relay
from shd_ref.conformance.specification import DTYPES, VECTORS_VERSION, error_codes, spec_edition

Calls: TypeAlias = Sequence[tuple[str, Inputs]]


@dataclass(frozen=True)
class Reply:
    """What an implementation did with a call.

    ``kind`` is ``"value"`` with ``outputs`` by name; ``"refused"`` with a code of ERR-2; ``"missing"`` with the
    option as ``code``, if it was said; or ``"broken"``, with the sentence that was broken as ``code``, if it is just
    one. ``ended``: it can answer no more of this operation (it hung or died).
    """

    kind: str
    outputs: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    ended: bool = False


def _broken(message: str, code: str = "", *, ended: bool = False) -> Reply:
    return Reply("broken", code=code, message=message, ended=ended)


@runtime_checkable
class Adapter(Protocol):
    """An implementation behind one method, for those that need the dtype's name or other arrays."""

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """Answer an operation of ``specs/shd.md``; arguments and answers are as ``specs/conformance.md`` has them.

        Raises:
            NotImplementedError: this operation, option or dtype is missing.
            Exception: with a ``code`` of chapter ERR, where the inputs must be refused.
        """


_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class Direct:
    """An object of this process: a module or object with the operations' functions, or an ``Adapter``.

    It is for an implementer's own tests and promises less, as the object shares the judge's process.
    """

    def __init__(self, implementation: Any) -> None:
        self.implementation = implementation
        self.name = getattr(implementation, "__name__", type(implementation).__name__)
        self._earlier: deque[tuple[str, list[Array], list[bytes]]] = deque(maxlen=4)

    def ask(self, operation: str, inputs: Inputs, dtype: str, *, layout: int = 0, kept: bool = False) -> Reply:
        """One call, its arrays lying oddly in memory by a seed; nothing that the implementation raises is raised."""
        inputs = relay(np.random.default_rng(layout), inputs) if layout else inputs
        before = {name: (_lengths(value), _bytes_of(value)) for name, value in inputs.items()}
        reply, answer = self._call(operation, inputs, dtype)
        if reply.kind not in ("value", "refused"):
            return reply
        for name, value in inputs.items():
            if (_lengths(value), _bytes_of(value)) != before[name]:
                return _broken(f"changed its argument {name}: a caller's arrays are not its own", "MAP-8")
        for earlier, arrays, held in self._earlier:
            if held != _bytes_of(arrays):
                self._earlier.clear()
                return _broken(f"changed what an earlier call of {earlier} had answered", "NUM-9")
        answered = arrays_of(answer) if reply.kind == "value" else []
        if any(np.may_share_memory(one, other) for one, other in product(answered, arrays_of(inputs))):
            return _broken("answered with memory of an argument: what a caller writes there changes both", "NUM-9")
        small = [array for array in answered if array.nbytes < 1 << 22]
        self._earlier.append((operation, small, _bytes_of(small)))
        return reply

    def ask_together(self, calls: Calls, dtype: str) -> list[Reply]:
        """These calls from as many threads at once, again and again: the first reply of each, then one unlike it."""
        replies: list[list[Reply]] = [[] for _ in calls]
        gate = threading.Barrier(len(calls))

        def work(number: int) -> None:
            gate.wait(10)
            end = time.monotonic() + 0.1
            while len(replies[number]) < 250 and (not replies[number] or time.monotonic() < end):
                replies[number].append(self._call(*calls[number], dtype)[0])

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        unlike = []
        for of_call in replies:
            contents = [(reply.kind, reply.code, _bytes_of(reply.outputs)) for reply in of_call]
            pairs = zip(of_call, contents, strict=True)
            unlike.append(next((reply for reply, content in pairs if content != contents[0]), of_call[0]))
        return [of_call[0] for of_call in replies] + unlike

    def _call(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> tuple[Reply, Any]:
        adapter = isinstance(self.implementation, Adapter)
        function: Any = None if adapter else getattr(self.implementation, operation, None)
        if not adapter and not callable(function):
            return Reply("missing", message=f"no function {operation}"), None
        try:
            with np.errstate(all="ignore"):
                run = self.implementation.run_operation if adapter else None
                answer = run(operation, inputs, dtype) if run else function(**inputs)
                return Reply("value", outputs_of(operation, answer)), answer
        except BaseException as error:
            if type(error) is KeyboardInterrupt:
                raise
            return _read_error(error, inputs, adapter), None


def _read_error(error: BaseException, inputs: Mapping[str, Any], adapter: bool) -> Reply:
    """What an exception says: a refusal is an ``Exception`` with a code of chapter ERR, and nothing else is."""
    message, name = str(error), type(error).__name__
    code = getattr(error, "code", None) if isinstance(error, Exception) else None
    unexpected = _UNEXPECTED.search(message) if isinstance(error, TypeError) else None
    if unexpected and unexpected[1] in inputs:
        return Reply("missing", code=unexpected[1], message=message)
    if isinstance(error, NotImplementedError) or code == "dependency-missing":
        return Reply("missing", message=message)
    if isinstance(code, str) and (code := str.__str__(code)) in error_codes():
        return Reply("refused", code=code, message=message)
    odd = not all(
        array.flags.carray and array.dtype.isnative and array.dtype.kind != "O" for array in arrays_of(inputs)
    )
    if adapter and odd and isinstance(error, TypeError | ValueError):
        return Reply(
            "missing", code="layouts", message=f"the adapter does not turn this array into its own: {message}"
        )
    if code:
        return _broken(f"raised {name} with the code {code!r}, which is not in ERR-2: {message}")
    return _broken(f"raised {name}: {message}, which has no code")


def _bytes_of(value: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays_of(value)]


def _lengths(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lengths(item) for item in value]
    return 0 if isinstance(value, np.ndarray) else repr(value)


def _form(value: Any, *, fixed: bool = False) -> Any:
    """What must be alike to write one value over another; of a tuple that are its plain items too."""
    if isinstance(value, dict):
        return {name: _form(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value), *(_form(item, fixed=isinstance(value, tuple)) for item in value)]
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, type(value)
    return repr(value) if fixed else type(value)


def write_over(old: Any, new: Any) -> bool:
    """Write the new numbers into the old arrays and lists; False where they do not fit, and nothing is written."""
    if _form(old) != _form(new):
        return False
    for key in old if isinstance(old, dict) else range(len(old)):
        if isinstance(old[key], np.ndarray):
            old[key][...] = new[key]
        elif isinstance(old[key], list | tuple):
            write_over(old[key], new[key])
        elif not isinstance(old, tuple):
            old[key] = new[key]
    return True


# --- how values travel --------------------------------------------------------------------------------------------

MAX_ANSWER = 1 << 26  # bytes of the longest line that is read
PROTOCOL = "1"
START_LIMIT = 60.0  # seconds for a program to start: a library may take long to load
_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


class NotSpokenError(Exception):
    """A value that the protocol has no words for."""


def encode(value: Any, *, answer: bool = False) -> Any:
    """An argument, arrays spelled out; or an answer of a host, with their bytes, and records by their fields."""
    if isinstance(value, np.generic) and not answer:
        return encode(value.item())
    if hasattr(value, "__array__") and not isinstance(value, Mapping):
        array = np.asarray(value, np.float64 if "float" in str(getattr(value, "dtype", "")) and answer else None)
        if answer and array.nbytes > MAX_ANSWER // 2:
            raise ValueError(f"an array of shape {list(array.shape)}, which is too large to be read")
        if answer and array.dtype.kind in "biufc":
            data = b2a_base64(array.tobytes(), newline=False).decode()
            return {"shape": array.shape, "dtype": array.dtype.str, "bytes": data}
        kind = {"b": "bool", "f": "float", "c": "complex128", "O": "", "V": ""}.get(array.dtype.kind, "int64")
        kind = array.dtype.newbyteorder("=").name if isinstance(value, OwnDtype) and kind == "float" else kind
        if answer or kind in ("", "float16") or (kind == "int64" and array.size and int(array.max()) >= 2**63):
            raise NotSpokenError(f"an array of {array.dtype}")
        return {"shape": list(array.shape), "dtype": kind, "data": [_number(x) for x in array.real.ravel().tolist()]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": _number(value)}
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return [encode(item, answer=answer) for item in value]
    return {str(name): encode(item, answer=answer) for name, item in fields_of(value).items()}


def decode(value: Any) -> Any:
    """An array of any form, or a plain value."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return _SPECIALS.get(value, value) if isinstance(value, str) else value
    if value.keys() == {"number"}:
        return _SPECIALS[value["number"]]
    if "shape" not in value or not {"data", "bytes"} & set(value):
        return {name: decode(item) for name, item in value.items()}
    # NumPy takes -1 for a size that it finds out; an answer says its sizes.
    if not isinstance(value["shape"], list) or not all(type(size) is int and size >= 0 for size in value["shape"]):
        raise ValueError("a shape is a list of sizes from 0 on")
    if "data" in value:
        data = [_SPECIALS[item] if isinstance(item, str) else item for item in value["data"]]
        return np.array(data, dtype=np.float64).reshape(value["shape"])
    if not _NUMBERS.fullmatch(value["dtype"]):
        raise ValueError(f"an array of {value['dtype']}")
    return np.frombuffer(a2b_base64(value["bytes"]), dtype=value["dtype"]).reshape(value["shape"])


def _number(item: Any) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if math.isnan(item) else "inf" if item > 0 else "-inf"
    return item


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def make_request(operation: str, inputs: Inputs, dtype: str, number: int = 1) -> dict[str, Any]:
    """The question that asks a program for one call."""
    encoded = {name: encode(value) for name, value in inputs.items()}
    return {"type": "call", "id": number, "operation": operation, "dtype": dtype, "inputs": encoded}


# --- the host of a module -----------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Answer for a module or an object in it, ``package.module:name``, until the input ends.

    ``Direct`` checks here, where memory shows, that arguments and earlier answers are as they were; arrays that the
    judge wrote over are written over.
    """
    error_codes()  # read before the module can change the file
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the implementation reads is empty, and what it prints is for people and no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    hello = json.loads(requests.readline())
    try:
        direct = Direct(_load(path))
    except ProgramError as error:
        send({**hello, "error": {"message": str(error)}})
        return
    send({**hello, "name": path, "operations": list(OUTPUTS), "dtypes": list(DTYPES), "arrays": "bytes"})
    old: Inputs = {}
    for request in map(json.loads, requests):
        calls = pickle.loads(a2b_base64(request["pickled"]))  # of the judge, which started this process
        if request["type"] == "together":
            replies = direct.ask_together(calls, request["dtype"])
        else:
            ((operation, inputs),) = calls
            if request["kept"]:
                old = inputs = old if write_over(old, inputs) else inputs
            replies = [direct.ask(operation, inputs, request["dtype"], layout=request["layout"])]
        send({"id": request["id"], "answers": [_describe(reply) for reply in replies]})


def _load(path: str) -> Any:
    """Modules are looked for in the current folder too; somebody else's may fail in any way."""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        target: Any = importlib.import_module(module_name)
    except BaseException as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0])
        hint = "; give a module's name, without .py, of the current folder or PYTHONPATH" if absent else ""
        raise ProgramError(f"cannot be imported: {type(error).__name__}: {error}{hint}") from error
    for step in attribute.split(".") if attribute else ():
        if not hasattr(target, step):
            raise ProgramError(f"cannot be found: {module_name} has no {attribute}")
        target = getattr(target, step)
    try:
        return target() if isinstance(target, type) else target
    except BaseException as error:
        raise ProgramError(f"cannot be constructed: {type(error).__name__}: {error}") from error


def _describe(reply: Reply) -> dict[str, Any]:
    """A reply in the words of the protocol; an output that cannot be read is left out."""
    if reply.kind == "missing":
        return {"error": {"code": "not-implemented", "message": reply.message, "option": reply.code}}
    if reply.kind == "refused":
        return {"error": {"code": reply.code, "message": reply.message}}
    if reply.kind == "broken":
        return {"broken": {"message": reply.message, "spec": reply.code}}
    outputs, problem = {}, ""
    for name, value in reply.outputs.items():
        try:
            outputs[name] = encode(value, answer=True)
        except BaseException as error:
            problem = f"answered as {name} what cannot be read: {type(error).__name__}: {error}"
    return {"broken": {"message": problem}} if problem and not outputs else {"outputs": outputs}


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
        self._host = False

    def __enter__(self) -> Program:
        self._process = self._start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def ask(self, operation: str, inputs: Inputs, dtype: str, *, layout: int = 0, kept: bool = False) -> Reply:
        """One question and its answer; ``kept`` inputs are the very ones of the last such question."""
        return self._ask([(operation, inputs)], dtype, {"type": "call", "layout": layout, "kept": kept})[0]

    def ask_together(self, calls: Calls, dtype: str) -> list[Reply]:
        """Calls at once, in a host of Python; of another program one after another."""
        if self._host:
            return self._ask(calls, dtype, {"type": "together"})
        return [self.ask(*call, dtype) for call in calls]

    def _ask(self, calls: Calls, dtype: str, more: Mapping[str, Any]) -> list[Reply]:
        self._last_id += 1
        request: dict[str, Any] = {"id": self._last_id, "dtype": dtype, **more}
        operation, inputs = calls[0]
        if operation not in self.operations or dtype not in self.dtypes:
            lacked = operation if operation not in self.operations else f"the dtype {dtype}"
            return [Reply("missing", message=f"the program does not list {lacked}")]
        try:
            if self._host:
                request["pickled"] = b2a_base64(pickle.dumps(calls), newline=False).decode()
            else:
                request = make_request(operation, inputs, dtype, self._last_id)
            answer = self._running().ask(request, self.timeout * len(calls))
            if answer.get("id") != self._last_id:
                raise _SilentError(f"answered question {answer.get('id')!r} when asked question {self._last_id}")
        except NotSpokenError as error:
            return [Reply("missing", code="unspoken", message=str(error))]
        except _SilentError as error:
            # What it may still say belongs to no question: start it again.
            if self._process:
                self._process.stop()
            self._process = None
            return [_broken(str(error), ended=True)]
        replies = answer.get("answers") if self._host else None
        return [_read_reply(reply) for reply in (replies if isinstance(replies, list) and replies else [answer])]

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
            hint = "give its path, such as ./my_shd, and its interpreter before it where it is not executable"
            raise ProgramError(f"{self.name} cannot be started: {error}; {hint}") from error
        versions = {"protocol": PROTOCOL, "spec_edition": spec_edition(), "vectors_version": VECTORS_VERSION}
        try:
            answer = process.ask({"type": "hello", **versions}, max(self.timeout, START_LIMIT))
            problem = answer["error"].get("message") if isinstance(answer.get("error"), Mapping) else ""
            if not problem:
                self._read_hello(answer)
        except _SilentError as error:
            problem = f"gave no handshake: {error}; it must answer one line of JSON, ended and flushed"
        if problem:
            process.stop()
            raise ProgramError(f"{self.name} {problem}")
        return process

    def _read_hello(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") != "hello" or answer.get("protocol") != PROTOCOL:
            raise _SilentError(f"expected type 'hello' and protocol {PROTOCOL!r}; got {_short(json.dumps(answer))}")
        for key in ("operations", "dtypes"):
            names = answer.get(key)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise _SilentError(f"expected a list of names as {key!r}; got {_short(names)}")
        self.operations, self.dtypes = tuple(answer["operations"]), tuple(answer["dtypes"])
        self.name, self._host = str(answer.get("name") or self.name), answer.get("arrays") == "bytes"


def _read_reply(answer: Any) -> Reply:
    answer = answer if isinstance(answer, Mapping) else {}
    error, broken, outputs = (answer.get(name) for name in ("error", "broken", "outputs"))
    if isinstance(broken, Mapping):  # a host saw what no other program is asked about
        return _broken(str(broken.get("message", "")), str(broken.get("spec") or ""))
    if isinstance(error, Mapping) and isinstance(error.get("code"), str):
        code, message = error["code"], str(error.get("message", ""))
        if code in ("not-implemented", "dependency-missing"):
            return Reply("missing", code=str(error.get("option") or ""), message=message)
        if code not in error_codes():
            return _broken(f"answered with the error code {code!r}, which is not in ERR-2: {message}")
        return Reply("refused", code=code, message=message)
    if not isinstance(outputs, Mapping):
        text = _short(json.dumps(answer))
        return _broken(f"answered with neither 'outputs' nor an 'error' that has a code: {text}")
    try:
        return Reply("value", {name: decode(value) for name, value in outputs.items()})
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as problem:
        return _broken(f"answered an array that cannot be read ({problem!r}): {_short(json.dumps(answer))}")


class _Process:
    """A running program; threads write to it and read what it says, so that no pipe can block the judge."""

    def __init__(self, command: Sequence[str]) -> None:
        # Its own group, so that its children end with it.
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._lines: queue.Queue[bytes] = queue.Queue(maxsize=1)  # more than was asked for waits in the pipe
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said = b""  # the end of its stderr
        for work in (self._read, self._write, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def ask(self, message: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        """Send one line and wait for one: in time, not too long, and a JSON object."""
        self._questions.put(json.dumps(message).encode() + b"\n")
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise _SilentError(f"no answer within {timeout:g} seconds{self._words()}") from None
        if len(line) > MAX_ANSWER:
            raise _SilentError(f"answered a line of more than {MAX_ANSWER} bytes")
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=1.0)
            status = self._popen.poll()
            how = "closed its output" if status is None else f"ended with status {status}"
            raise _SilentError(f"the program {how} instead of answering{self._words()}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _SilentError(f"answered a line that is not JSON ({error}): {_short(line[:300])}") from None
        if not isinstance(answer, dict):
            raise _SilentError(f"must answer a JSON object a line; got {_short(answer)}")
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

    def _read(self) -> None:
        assert self._popen.stdout
        with self._popen.stdout as answers:
            line = b"\n"
            while line.endswith(b"\n"):
                line = answers.readline(MAX_ANSWER + 1)
                self._lines.put(line)

    def _write(self) -> None:
        assert self._popen.stdin
        # A program that ended cannot be written to; the reader says so.
        with contextlib.suppress(OSError), self._popen.stdin as questions:
            while (question := self._questions.get()) is not None:
                questions.write(question)
                questions.flush()

    def _listen(self) -> None:
        assert self._popen.stderr
        with self._popen.stderr as words:
            while said := os.read(words.fileno(), 1 << 16):
                self._said = (self._said + said)[-300:]

    def _words(self) -> str:
        time.sleep(0.1)  # its last words may still be in the pipe
        text = self._said.decode("utf-8", errors="replace").strip()
        return f"; the end of its stderr: {_short(text)}" if text else ""
