"""The process in which a Python implementation lives: ``python -m shd_ref.conformance.host MODULE[:OBJECT]``.

It speaks the protocol of programs (``specs/conformance.md``) with the judge, its parent, which holds every expected
number and alone compares. What is judged here can answer; it cannot pass. Two things are the host's, as they do not
show through a pipe: arguments are laid out in memory as the judge had them, with the same strides, byte order and
write flag (``program.py``), in the very array of the last call where the judge gave that again; after each call it
checks that arguments and earlier answers are as they were, by the code of in-process judging (``adapter.Subject``).

An array is ``{"shape", "dtype", "bytes"}``, with ``"strides"`` where it is not in C order, ``"readonly"``, ``"own"``
(``OwnDtype``) or ``"scalar"`` (a number of NumPy) where it is that; ``"again"`` names the arguments that are objects
of the last call. So a law gives its arrays as it wants them, and needs nothing for the host.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import (
    OUTPUTS,
    Adapter,
    BrokenError,
    Missing,
    RefusedError,
    Subject,
    as_adapter,
    take_output,
)
from shd_ref.conformance.program import decode_argument, encode_answer
from shd_ref.conformance.specification import DTYPES


def main(path: str) -> None:
    """Answer for a module or an object in it, ``package.module:name``, until the input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the implementation reads is empty, and what it prints is for people and no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(answer: str) -> None:
        answers.write(answer.encode() + b"\n")
        answers.flush()

    hello = json.loads(requests.readline())
    try:
        subject = Subject(_load(path), "")
    except _UnusableError as error:
        send(json.dumps({**hello, "error": {"message": str(error)}}))
        return
    np.seterr(all="ignore")
    hello |= {"name": path, "operations": list(OUTPUTS), "dtypes": list(DTYPES), "arrays": "bytes"}
    send(json.dumps(hello))
    last: Mapping[str, Any] = {}
    for line in requests:
        request = json.loads(line)
        inputs = {name: decode_argument(value) for name, value in request["inputs"].items()}
        inputs |= {name: _written(last[name], inputs[name]) for name in request["again"] if name in last}
        last = inputs
        subject.dtype = request["dtype"]
        send(_answer(subject, request, inputs))
        subject.calls.clear()


class _UnusableError(Exception):
    """There is nothing to judge."""


def _load(path: str) -> Adapter:
    """Modules are looked for in the current folder too."""
    module_name, _, attribute = path.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        target: Any = importlib.import_module(module_name)
    except BaseException as error:  # Somebody else's module may fail in any way while it is imported.
        raise _UnusableError(f"cannot be imported: {type(error).__name__}: {error}") from error
    for step in attribute.split(".") if attribute else ():
        if not hasattr(target, step):
            raise _UnusableError(f"cannot be found: {module_name} has no {attribute}")
        target = getattr(target, step)
    try:
        return as_adapter(target() if isinstance(target, type) else target)
    except BaseException as error:  # so may its constructor
        raise _UnusableError(f"cannot be constructed: {type(error).__name__}: {error}") from error


def _answer(subject: Subject, request: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """The line that answers a request."""
    names, outputs, absent = OUTPUTS[request["operation"]], {}, []
    try:
        answer = subject.run(request["operation"], inputs)
        for name in names:
            try:
                outputs[name] = encode_answer(take_output(answer, name, names))
            except BrokenError as error:
                absent.append(error)
        if absent and not outputs:
            raise absent[0]
        return json.dumps({"id": request["id"], "outputs": outputs})
    except (Missing, RefusedError) as error:
        code = error.code if isinstance(error, RefusedError) else "not-implemented"
        told: Any = {"error": {"code": code, "message": str(error.__cause__ or error)}}
    except BrokenError as error:
        told = {"broken": {"message": str(error), "spec": error.spec_id}}
    except BaseException as error:
        message = f"raised {type(error).__name__} in the call or as its answer was read: {error}"
        told = {"broken": {"message": message}}
    return json.dumps({"id": request["id"], **told})


def _written(old: Any, new: Any) -> Any:
    """The old object with the new numbers, all the way down; the new one where it does not fit."""
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray):
        if (old.shape, old.strides, old.dtype) != (new.shape, new.strides, new.dtype):
            return new
        old.flags.writeable = True
        old[...] = new
        old.flags.writeable = new.flags.writeable
        return old
    if isinstance(new, list) and isinstance(old, list) and len(old) == len(new):
        old[:] = map(_written, old, new)
        return old
    return new


if __name__ == "__main__":
    main(sys.argv[1])
