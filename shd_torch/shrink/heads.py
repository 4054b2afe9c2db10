"""One layer's heads: what its attention says over the calibration set, and the closed form of the student's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shd_ref.errors import need
from shd_ref.shrink.heads import HeadMerge, HeadWeights, concatenate_heads, low_rank_heads, mix_queries
from shd_torch.maps.gram import gram_tensor
from shd_torch.shrink.calibration import GRAM_ENTRIES, Batch, recorded_attention, run_layer
from shd_torch.shrink.families import Array, Family, as_array, find_part

SLOW_ANGLE = 1.0
"""A rotated pair that turns by less than this, in radians, over a calibration sample is slow."""


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """What one layer's attention says over the whole calibration set."""

    length: int  # of the longest sample
    with_maps: bool  # whether maps were read; without them gram is zeros
    gram: Array  # the gram tensor, summed (H, H, H, H)
    augmented: Array  # second moment of the inputs with a one, [x, 1], (D + 1, D + 1)
    centred: Array  # of the inputs less their mean over the sample, (D, D)
    query_size: Array  # root mean square of each head's queries (H,)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What one teacher layer did, batch by batch: all that the making of a student layer needs of its streams."""

    neuron_squares: Array  # mean over counted rows of the squares of what the FFN's last matrix reads (F,)
    inputs: tuple[Tensor, ...]  # what queries, keys and values read
    middles: tuple[Tensor, ...]  # the stream after the attention
    ffn_inputs: tuple[Tensor, ...]  # what the FFN reads
    ends: tuple[Tensor, ...]  # the stream after the FFN, before a norm that lies on it
    outputs: tuple[Tensor, ...]  # what the layer returns


@torch.no_grad()
def study_layer(
    model: nn.Module,
    family: Family,
    number: int,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    weights: HeadWeights,
    *,
    with_maps: bool,
    statistics: AttentionStatistics | None = None,
) -> tuple[AttentionStatistics, LayerTrace]:
    """Gram tensor and input moments of one teacher layer, and its streams.

    Without maps the gram tensor is zeros: no heads merge. ``statistics`` of an earlier study are not gathered again.
    """
    layer, device = family.layers_of(model)[number], streams[0].device
    names = [family.projections[0], family.middle, family.ffn[0][0], family.ffn[1]]
    names += [name for name in (family.end, family.maps if with_maps else None) if name is not None]
    sums = None if statistics is not None else AttentionSums(weights, device)
    squares, rows, seen = torch.zeros((), dtype=torch.float64, device=device), 0, []
    masks = iter([batch.counted for batch in batches])  # the attention runs once for each batch

    def take(probs: Tensor, values: Tensor, rows: slice) -> None:
        if sums is not None:
            sums.add_maps(probs, values, next(masks) if rows.start == 0 else sums.counted, rows)

    watched = find_part(layer, family.attention) if sums is not None and with_maps else None
    with recorded_attention(model, watched, take):
        runs = run_layer(layer, streams, batches, number, [find_part(layer, name) for name in names])
        for (out, read), stream, batch in zip(runs, streams, batches, strict=True):
            if family.maps is not None and with_maps:  # an attention that transformers cannot exchange
                take(read.pop(), project(read[0], weights.value, weights.value_bias), slice(0, None))
            if sums is not None:
                sums.add(read[0], batch.counted)
            squares = squares + batch.rows(read[3]).double().square().sum(0)
            rows += int(batch.counted.sum())
            seen.append((read[0], family.middle_of(read[1], stream), read[2], read[4] if family.end else out, out))
    need(rows > 0, "argument-value", "data", "hold a row that counts", "an attention_mask of zeros")
    finite = bool(torch.isfinite(squares).all() and (sums is None or torch.isfinite(sums.gram).all()))
    need(finite, "not-finite", "the teacher", "give finite numbers", f"NaN or infinity in layer {number}")
    if sums is not None:
        statistics = sums.read(max(stream.shape[1] for stream in streams), rows, with_maps=with_maps)
    assert statistics is not None  # one of the two is there
    return statistics, LayerTrace(as_array(squares / rows), *zip(*seen, strict=True))


def project(inputs: Tensor, heads: Array, bias: Array | None) -> Tensor:
    """What each head gives for inputs ``(B, L, D)``, float64 ``(B, H, L, d)``."""
    shift = 0.0 if bias is None else torch.from_numpy(bias)[:, None].to(inputs.device)
    return inputs.double()[:, None] @ torch.from_numpy(heads).to(inputs.device) + shift


class AttentionSums:
    """What ``AttentionStatistics`` are made of, batch by batch."""

    def __init__(self, weights: HeadWeights, device: torch.device) -> None:
        width, heads = weights.query.shape[1], weights.num_heads
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.gram = zeros((heads,) * 4)
        self._augmented, self._centred, self._sizes = zeros(width + 1, width + 1), zeros(width, width), zeros(heads)
        self._weights, self._projection = weights, torch.from_numpy(weights.output).to(device).flatten(0, 1)

    def add_maps(self, probs: Tensor, values: Tensor, counted: Tensor, rows: slice) -> None:
        """Some rows of a batch's maps, with the values; ``counted`` are all rows that count."""
        self.counted, there = counted, counted[:, rows]
        batch, heads, height, _ = probs.shape
        size = max(1, GRAM_ENTRIES // (heads * heads * height * values.shape[3]))
        for start in range(0, batch, size):
            some = slice(start, start + size)
            gram = gram_tensor(probs[some], values[some], self._projection, query_mask=there[some], check=False)
            self.gram += gram.sum(0)

    def add(self, inputs: Tensor, counted: Tensor) -> None:
        """What the projections read ``(B, L, D)``, and the rows that count."""
        there = counted[..., None]
        x = inputs.double() * there
        mean = x.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp_min(1)
        away = ((x - mean) * there).flatten(0, 1)
        ones = torch.cat([x, there.double()], dim=2).flatten(0, 1)
        self._augmented += ones.mT @ ones
        self._centred += away.mT @ away
        queries = project(x, self._weights.query, self._weights.query_bias) * there[:, None]
        self._sizes += queries.square().sum((0, 2, 3))

    def read(self, length: int, rows: int, *, with_maps: bool) -> AttentionStatistics:
        """Over so many rows that count, of samples of at most this length."""
        query_size = (self._sizes / rows / self._weights.head_dim).sqrt()
        means = (self._augmented / rows, self._centred / rows, query_size)
        return AttentionStatistics(length, with_maps, *map(as_array, (self.gram, *means)))


@dataclass(frozen=True, eq=False)
class Squeezed:
    """A student's attention, the case that made it, and whether that is exact."""

    weights: HeadWeights
    case: str
    exact: bool


def squeeze_attention(
    weights: HeadWeights,
    merge: HeadMerge,
    statistics: AttentionStatistics,
    num_kv_heads: int,
    head_dim: int,
    *,
    frequencies: Array | None = None,
    query_norm: bool = False,
) -> Squeezed:
    """The best case that applies (``shd_ref/shrink/heads.py``), for a student of these sizes.

    ``frequencies`` are of rotary positions, one a pair of entries i and ``i + d / 2``; ``query_norm`` says whether
    queries are normed before their product with keys.
    """
    same_shape = num_kv_heads == weights.num_kv_heads and head_dim == weights.head_dim
    if len(merge.groups) == weights.num_heads and same_shape:
        return Squeezed(weights, "copied", True)
    if same_shape and merge.shares_keys(num_kv_heads):
        mixed = mix_queries(weights, merge, statistics.query_size if query_norm else None)
        return Squeezed(mixed, "queries", not query_norm)
    rule = "merge inside key and value heads where queries are normed, since keys are normed too: ask for a multiple"
    rule += f" of the teacher's {weights.num_kv_heads} key and value heads"
    need(not query_norm, "shrink-unsupported", "heads", rule, f"groups {merge.groups}")
    longest = max(len(group) for group in merge.groups)
    if frequencies is None and num_kv_heads == len(merge.groups) and longest * weights.head_dim <= head_dim:
        return Squeezed(concatenate_heads(weights, merge, head_dim), "side-by-side", True)
    slow = None if frequencies is None else frequencies * statistics.length < SLOW_ANGLE
    moments = statistics.augmented, statistics.centred
    nearest = low_rank_heads(weights, merge, num_kv_heads, head_dim, *moments, slow=slow)
    return Squeezed(nearest, "low-rank" if slow is None else "rotary", False)
