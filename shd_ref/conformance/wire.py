"""Arguments and answers as JSON, and back.

Programs get arrays spelled out. A Python host gets them as bytes with their strides, so that it can lay them out as
the judge had them; it answers in bytes too. No answer is trusted: nothing here runs code or takes memory by a number
that was sent.
"""

from __future__ import annotations

import json
import math
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.adapter import PLAIN, BrokenError, OwnDtype, fields_of

MAX_ANSWER = 1 << 26
"""Bytes of the longest line that is read."""

_SPECIALS = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


def encode(value: Any, *, exact: bool = False) -> Any:
    """An argument.

    Args:
        value: arrays, numbers, names, and lists and mappings of them.
        exact: for a Python host: arrays as bytes and strides. Without it they are spelled out as
            ``{"shape", "dtype", "data"}``, with special numbers as strings.
    """
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
    if isinstance(value, Mapping):
        return {"record": {name: encode(item, exact=exact) for name, item in value.items()}}
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
    if "record" in value:
        return {name: decode_argument(item) for name, item in value["record"].items()}
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
    """An answer: ``{"shape", "data"}`` or ``{"shape", "dtype", "bytes"}`` as an array, anything else as it is.

    Raises:
        BrokenError: an array whose data do not fill its shape, or are not numbers.
    """
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
