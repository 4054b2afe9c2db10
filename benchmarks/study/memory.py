"""A teacher's outputs on a whole training set, kept in memory: the teacher runs once, and every run takes rows.

Values are those of a live teacher to the last bit, since nothing is coded: what a cache's codecs change is measured
elsewhere (benchmarks/stories_distillation.py). Only for models whose attention needs no mask beside causality.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.study.rivals import Rival, TeacherOutputs
from shd_torch.capture import AttentionCall
from shd_torch.supervision.supervision import Dense

CHUNK = 64


class Remembered:
    """Outputs of a rival's teacher on every sample.

    Args:
        rival: what teaches.
        inputs: arguments of the teacher by name, ``(N, ...)`` each.
    """

    def __init__(self, rival: Rival, inputs: Mapping[str, Tensor]) -> None:
        started = time.process_time()
        size = len(next(iter(inputs.values())))
        parts = [
            rival.teach(**{name: value[start : start + CHUNK] for name, value in inputs.items()})
            for start in range(0, size, CHUNK)
        ]
        self.seconds = time.process_time() - started
        self._lesson = _join(parts, rival.temperature)

    def __call__(self, index: Tensor, _: Mapping[str, Tensor]) -> TeacherOutputs:
        """The outputs of some samples, in any order."""
        return _take(self._lesson, index)


def bytes_a_sample(rival: Rival, outputs: TeacherOutputs) -> float:
    """What of the teacher a sample's loss reads, in half precision: merged maps, logits or features.

    Of causal maps the half that may be above zero counts.
    """
    reads = rival.kind.reads
    if reads == "hidden":
        return 2.0 * sum(hidden[0].numel() for hidden in outputs.hidden.values())
    if reads == "vectors":
        vectors = (tensor for call in outputs.calls.values() for tensor in (call.query, call.key, call.value))
        return 2.0 * sum(tensor[0].numel() for tensor in vectors if tensor is not None)
    causal = next(iter(outputs.calls.values())).rule.is_causal
    if outputs.attention is not None:
        shapes = [supervision.shape[1:] for supervision in outputs.attention.supervise()]
    else:
        calls = outputs.calls.values()
        shapes = [(1 if reads == "one" else call.num_heads, *_lengths(call)) for call in calls]
    return 2.0 * sum(h * (rows * (rows + 1) // 2 if causal else rows * keys) for h, rows, keys in shapes)


def _lengths(call: AttentionCall) -> tuple[int, int]:
    return call.query.shape[2], call.key.shape[2]


def _join(parts: list[TeacherOutputs], temperature: float) -> TeacherOutputs:
    """Outputs of chunks as one of all samples, merged maps formed."""
    calls = {
        layer: _rebuild_call(
            call, *(torch.cat([getattr(p.calls[layer], f) for p in parts]) for f in ("query", "key", "value"))
        )
        for layer, call in parts[0].calls.items()
    }
    hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in parts[0].hidden}
    attention = parts[0].attention
    if attention is not None:
        taught = [part.attention for part in parts if part.attention is not None]
        supervisions = [
            Dense(torch.cat([one.supervise()[number].probs(temperature=temperature) for one in taught]), temperature)
            for number in range(len(attention.squeezes))
        ]
        attention = replace(
            attention,
            squeezes=tuple(
                replace(squeeze, supervision=each)
                for squeeze, each in zip(attention.squeezes, supervisions, strict=True)
            ),
            output=None,
            logits=None,
        )
    return TeacherOutputs(attention, calls, hidden)


def _take(outputs: TeacherOutputs, index: Tensor) -> TeacherOutputs:
    calls = {
        layer: _rebuild_call(call, *(getattr(call, f)[index] for f in ("query", "key", "value")))
        for layer, call in outputs.calls.items()
    }
    attention = outputs.attention
    if attention is not None:
        squeezes = [
            replace(squeeze, supervision=replace(squeeze.supervision, maps=squeeze.supervision.maps[index]))
            for squeeze in attention.squeezes
        ]
        attention = replace(attention, squeezes=tuple(squeezes))
    return TeacherOutputs(attention, calls, {layer: hidden[index] for layer, hidden in outputs.hidden.items()})


def _rebuild_call(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
    assert call.rule.attn_mask is None, "samples with separate masks cannot be taken apart"
    return AttentionCall(query, key, call.rule, value=value)
