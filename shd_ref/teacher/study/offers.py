"""What KD on logits can be stored as: exact targets, the likeliest classes, or whole rows, measured on a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import VECTOR_CODECS, Exact, Logits, TeacherHead
from shd_ref.cache.codecs.logits import logits_error
from shd_ref.errors import ShdError
from shd_ref.teacher.graph.targets import find_head, find_logits
from shd_ref.teacher.run.teacher import TeacherRun


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
        head = find_head(work.graph.model, find_logits(work.graph.model, options.logits_output))
        states, logits = work.run_head(index, head)
        return tuple(_offers(states, logits, head.head.cut(logits.shape[-1]), work))
    except ShdError:
        return ()


def _offers(
    states: NDArray[np.float32], logits: NDArray[np.float32], head: TeacherHead, work: TeacherRun
) -> Iterator[TargetOffer]:
    form, (_, *tensors) = Exact.of_head(head, VECTOR_CODECS[0], "positions", "states")
    size = sum(tensor.nbytes for tensor in tensors)
    for codec in VECTOR_CODECS:
        coded = replace(form, codec=codec)
        logits_made = head.logits(coded.decode_rows(coded.encode(states)))
        error = logits_error(logits, 1.0, lambda rows, logits_made=logits_made: logits_made[rows])  # type: ignore[misc]
        asks = f"--hidden last --hidden-codec {codec}"
        yield TargetOffer(f"exact {codec}", asks, coded.row_sizes[0], size, error.gradient_mean)
    options, top = work.options, min(work.options.logits_top or 1, len(head.weight))
    whole = Logits(codec="float16", rows="positions", tensor="logits", vocab_size=len(head.weight))
    softened, bits = options.logits_temperature, options.logits_bits
    likeliest = replace(whole, codec="topk", head=top, value_bits=bits, temperature=softened)
    for way, asks, rows in (
        (f"top {top}", f"--logits topk --logits-top {top}", likeliest),
        ("whole float16", "--logits float16", whole),
    ):
        cost: Any = rows.measure(logits, rows.encode(logits))
        yield TargetOffer(way, asks, rows.row_sizes[0], 0, cost.gradient_mean)
