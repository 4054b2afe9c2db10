"""What KD on logits can be stored as: exact targets, the likeliest classes, or whole rows, measured on a sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import VECTOR_CODECS, Logits, TeacherHead
from shd_ref.cache.codecs.codecs import to_float16, to_int8
from shd_ref.cache.codecs.logits import check_padding, logits_error
from shd_ref.errors import ShdError
from shd_ref.teacher.graph.head import find_head
from shd_ref.teacher.graph.targets import find_logits
from shd_ref.teacher.precompute.forms.exact import cut_head
from shd_ref.teacher.run.teacher import TeacherRun

ROWS: Final = 64
"""Rows of the sample that are measured, spread over it."""


@dataclass(frozen=True)
class TargetOffer:
    """A way to store what KD on logits learns from.

    Attributes:
        way: ``"exact"``, ``"topk"`` or ``"whole"``, with its codec.
        asks: the options of precompute.
        bytes_per_token: of a record.
        head_bytes: of the head, once in the cache and in the device's memory.
        gradient_error: of the gradient of KL by the logits, relative to the teacher's part of it (CACHE-170).
    """

    way: str
    asks: str
    bytes_per_token: int
    head_bytes: int
    gradient_error: float


def offer_targets(work: TeacherRun, index: int) -> tuple[TargetOffer, ...]:
    """What a language model's graph allows; nothing where it has no head that is known, or several teachers."""
    options = work.options
    if work.others:
        return ()
    try:
        reader = copy.copy(work)
        reader.head = find_head(work.model, find_logits(work.model, options.logits_output))
        states, logits = reader.run_head([index])
        few = np.linspace(0, len(states) - 1, min(len(states), ROWS)).astype(int)
        states, logits = states[few], logits[few]
        size = options.vocab_size or logits.shape[-1]
        check_padding(logits, size, 1.0)
        return tuple(_offers(states, logits[:, :size], cut_head(reader.head.head, size), work))
    except ShdError:
        return ()


def _offers(
    states: NDArray[np.float32], logits: NDArray[np.float32], head: TeacherHead, work: TeacherRun
) -> Iterator[TargetOffer]:
    size, width = head.weight.shape
    head_bytes = head.weight.nbytes + (0 if head.bias is None else head.bias.nbytes)
    for codec, cost in zip(VECTOR_CODECS, (4 * width, 2 * width, width + 4), strict=True):
        logits_made = head.logits(_stored(states, codec))
        error = logits_error(logits, 1.0, lambda rows, logits_made=logits_made: logits_made[rows])  # type: ignore[misc]
        asks = f"--hidden last --hidden-codec {codec}"
        yield TargetOffer(f"exact {codec}", asks, cost, head_bytes, error.gradient_mean)
    options, common = work.options, {"rows": "positions", "tensor": "logits", "vocab_size": size}
    top, bits = min(options.logits_top or 1, size), options.logits_bits
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        f"top {top}": (f"--logits topk --logits-top {top}", {"codec": "topk", "head": top, "value_bits": bits}),
        "whole float16": ("--logits float16", {"codec": "float16"}),
    }
    for way, (asks, members) in kinds.items():
        temperature = options.logits_temperature if members["codec"] == "topk" else None
        form = Logits(**common, **members, temperature=temperature)
        error = form.measure(logits, form.encode(logits))
        yield TargetOffer(way, asks, form.row_bytes, 0, error.gradient_mean)


def _stored(states: NDArray[np.float32], codec: str) -> NDArray[np.float32]:
    if codec == "int8":
        codes, steps = to_int8(states)
        return np.asarray(codes * steps[:, None], np.float32)
    return to_float16("last state", states).astype(np.float32) if codec == "float16" else states
