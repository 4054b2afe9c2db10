"""The process in which a Python implementation lives: ``python -m shd_ref.conformance.host MODULE[:OBJECT]``.

It speaks the protocol of programs with the judge, its parent, which holds the reference and alone compares. What is
judged here can answer; it cannot pass. Two things are the host's, as they do not show through a pipe: arguments are
laid out in memory as the judge had them, in the very array of the last call where the judge gave that ``again``; and
``Direct`` checks after each call that arguments and earlier answers are as they were.
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

from shd_ref.conformance.doors import Direct, Reply, decode, encode_answer
from shd_ref.conformance.specification import DTYPES, OUTPUTS, error_codes


def main(path: str) -> None:
    """Answer for a module or an object in it, ``package.module:name``, until the input ends."""
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
    except _UnusableError as error:
        send({**hello, "error": {"message": str(error)}})
        return
    send({**hello, "name": path, "operations": list(OUTPUTS), "dtypes": list(DTYPES), "arrays": "bytes"})
    last: Mapping[str, Any] = {}
    for line in requests:
        request = json.loads(line)
        if request["type"] == "together":
            calls = [(call["operation"], _inputs_of(call)) for call in request["calls"]]
            replies = direct.ask_together(calls, request["calls"][0]["dtype"])
            send({"id": request["id"], "answers": [_told(reply) for reply in replies]})
            continue
        inputs = _inputs_of(request)
        inputs |= {name: _written(last[name], inputs[name]) for name in request["again"] if name in last}
        last = inputs
        send({"id": request["id"], **_told(direct.ask(request["operation"], inputs, request["dtype"]))})


class _UnusableError(Exception):
    """There is nothing to judge."""


def _load(path: str) -> Any:
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
        return target() if isinstance(target, type) else target
    except BaseException as error:  # so may its constructor
        raise _UnusableError(f"cannot be constructed: {type(error).__name__}: {error}") from error


def _inputs_of(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: decode(value, exact=True) for name, value in request["inputs"].items()}


def _told(reply: Reply) -> dict[str, Any]:
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
            outputs[name] = encode_answer(value)
        except BaseException as error:
            problem = f"answered as {name} what cannot be read: {type(error).__name__}: {error}"
    return {"broken": {"message": problem}} if problem and not outputs else {"outputs": outputs}


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
