"""Sample keys: hashes of what the teacher saw, which no shuffling or rank can misalign (CACHE-30 to 37)."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import RunningHash, xxh3_128
from shd_ref.errors import ShdError

_KEY_FORM: Final = re.compile(r"[0-9a-f]{32}")


def sample_key(inputs: Mapping[str, NDArray[Any]]) -> str:
    """The key of one sample, 32 hex digits: XXH3-128 over its inputs by name, without a batch axis (CACHE-30, 31).

    Integers of every width count as int64, floats as float32 and booleans as uint8, so the key does not depend on the
    framework that made the arrays. ``inputs-invalid`` for no inputs, another dtype, or an integer beyond int64.
    """
    if not inputs:
        raise ShdError("inputs-invalid", "inputs must hold at least one array; got none", "CACHE-30")
    parts = [b"shd-sample-key-1\n"]
    for name in sorted(inputs):
        array = _canonical(name, np.asarray(inputs[name]))
        encoded_name, encoded_dtype = name.encode(), array.dtype.name.encode()
        parts.append(struct.pack("<I", len(encoded_name)) + encoded_name)
        parts.append(struct.pack("<I", len(encoded_dtype)) + encoded_dtype)
        parts.append(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
        parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return xxh3_128(b"".join(parts))


def trim_sample(inputs: Mapping[str, NDArray[Any]], mask_name: str) -> tuple[dict[str, NDArray[Any]], int]:
    """Cut trailing padding, so that it changes neither key nor map; inputs (views) and the length n left (CACHE-32).

    Of one sample without a batch axis every input whose first axis is as long as the mask ``(L,)`` is cut after the
    mask's last nonzero entry; padding before or between tokens stays. Raises ``inputs-invalid`` for a mask that is
    absent, not one-dimensional, or leaves no token.
    """
    if mask_name not in inputs:
        raise ShdError("inputs-invalid", f"inputs must hold the mask {mask_name!r}; got {sorted(inputs)}", "CACHE-32")
    mask = np.asarray(inputs[mask_name])
    if mask.ndim != 1:
        raise ShdError("inputs-invalid", f"{mask_name} must be (L,); got {mask.shape}", "CACHE-32")
    tokens = np.flatnonzero(mask)
    if not len(tokens):
        raise ShdError("inputs-invalid", f"{mask_name} must leave at least one token; got none", "CACHE-32")
    length = int(tokens[-1]) + 1
    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    cut = {name: array[:length] for name, array in arrays.items() if array.ndim and len(array) == len(mask)}
    return arrays | cut, length


def trim_inputs(
    inputs: Mapping[str, NDArray[Any]],
    mask: str | None,
    decoder: Collection[str] = (),
    decoder_mask: str | None = None,
) -> tuple[dict[str, NDArray[Any]], int | None, int | None]:
    """Cut trailing padding of a sample with one or two sequences, each by its own mask (CACHE-32, CACHE-33).

    ``decoder`` names the inputs of the second sequence, ``decoder_mask`` their mask, if there is one. Gives the cut
    inputs, and the lengths that the two masks leave; None without a mask. Raises as ``trim_sample``.
    """
    second = {name: array for name, array in inputs.items() if name in decoder}
    first = {name: array for name, array in inputs.items() if name not in decoder}
    length, decoder_length = None, None
    if mask is not None:
        first, length = trim_sample(first, mask)
    if decoder_mask is not None:
        second, decoder_length = trim_sample(second, decoder_mask)
    return first | second, length, decoder_length


def dataset_fingerprint(keys: Iterable[str]) -> str:
    """XXH3-128 over the keys of a data set in the order of its samples (CACHE-37); ``argument-value``."""
    running = RunningHash()
    running.update(b"shd-dataset-1\n")
    for key in keys:
        running.update(bytes.fromhex(check_key(key)))
    return running.hexdigest()


def check_key(key: str) -> str:
    """The key itself, if it is 32 lower-case hex digits; otherwise ``argument-value`` (CACHE-30)."""
    if not isinstance(key, str) or not _KEY_FORM.fullmatch(key):
        raise ShdError("argument-value", f"a sample key must be 32 lower-case hex digits; got {key!r}", "CACHE-30")
    return key


def _canonical(name: str, array: NDArray[Any]) -> NDArray[Any]:
    kind = array.dtype.kind
    if kind == "b":
        return array.astype(np.uint8)
    if kind == "f":
        return array.astype(np.float32)
    if kind not in "iu":
        message = f"input {name!r} must be integer, floating or boolean; got {array.dtype}"
        raise ShdError("inputs-invalid", message, "CACHE-31")
    if kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ShdError("inputs-invalid", f"input {name!r} must fit int64; got {array.max()}", "CACHE-31")
    return array.astype(np.int64)
