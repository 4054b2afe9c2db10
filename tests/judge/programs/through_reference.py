"""A right program: the reference behind the protocol. With an argument, it misbehaves so at one operation."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

import shd_ref

OPERATIONS = ("merge_plan", "solve_alpha", "shd_loss", "softmax", "soften", "squeeze_heads")
SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}


def decode(value: Any, dtype: str) -> Any:
    if isinstance(value, list):
        return [decode(item, dtype) for item in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return SPECIALS[value["number"]]
    kinds = {"float": "float64" if dtype == "float64" else "float32"}
    data = [SPECIALS.get(item, item) if isinstance(item, str) else item for item in value["data"]]
    return np.array(data, dtype=kinds.get(value["dtype"], value["dtype"])).reshape(value["shape"])


def encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = [str(x) if not np.isfinite(x) else x for x in value.reshape(-1).tolist()]
        return {"shape": list(value.shape), "data": data}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def answer(ask: dict[str, Any]) -> dict[str, Any]:
    try:
        inputs = {name: decode(value, ask["dtype"]) for name, value in ask["inputs"].items()}
        result = getattr(shd_ref, ask["operation"])(**inputs)
    except shd_ref.ShdError as error:
        return {"id": ask["id"], "error": {"code": error.code, "message": str(error)}}
    names = {"merge_plan": "plan", "solve_alpha": "alpha", "shd_loss": "loss", "softmax": "attn_probs"}
    named = vars(result) if dataclasses.is_dataclass(result) else {names.get(ask["operation"], "attn_probs"): result}
    return {"id": ask["id"], "outputs": {name: encode(value) for name, value in named.items()}}


def say(value: Any) -> None:
    print(value if isinstance(value, str) else json.dumps(value), flush=True)


def misbehave(how: str, ask: dict[str, Any]) -> None:
    number, escapes = ask["id"], "\x1b[2J\x1b]0;title\x07all passed\u202e"
    said: dict[str, list[Any]] = {
        "garbage": ["I feel fine"],
        "twice": [answer(ask), answer(ask)],
        "shape": [{"id": number, "outputs": {"alpha": {"shape": [4], "data": [0.5, "x"]}}}],
        "escapes": [{"id": number, "error": {"code": "argument-value\x1b[1m", "message": escapes}}],
        "empty": [{"id": number, "outputs": {}}],
        "nothing": [{"id": number}],
        "deep": ["[" * 100_000],
    }
    if how == "hang":
        # With a child that would hold the pipes open.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    elif how == "crash":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    elif how == "huge":
        while True:
            sys.stdout.write("7" * 65536)
    elif how == "drip":
        while True:
            print("7", end="", flush=True)
            time.sleep(0.01)
    elif how == "escapes":
        print(escapes, file=sys.stderr, flush=True)
    for line in said.get(how, []):
        say(line)


def main(how: str = "") -> None:
    for line in sys.stdin:
        if how == "stderr":
            sys.stderr.write("noise " * 100_000)
        ask = json.loads(line)
        if ask["type"] == "hello":
            if how == "other-protocol":
                say({"type": "hello", "protocol": "7"})
                continue
            hello = {"type": "hello", "protocol": "1", "name": "through reference", "operations": OPERATIONS}
            say({**hello, "dtypes": ["float64", "float32"]})
        elif how and how != "stderr" and ask["operation"] == "solve_alpha":
            misbehave(how, ask)
        else:
            say(answer(ask))


main(*sys.argv[1:])
