"""A scorer of keys and the teacher's layers that it serves, checked, and cut into tiles of query rows.

No tile holds more than a few rows, and the target of a tile is summed over the teacher's heads a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer, check_number
from shd_torch.checks import INTEGERS, check_option, check_query_key, check_real, check_shape, compute_dtype
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule, is_allowed
from shd_torch.supervision.supervision import tile_entries

RESTRICTIONS: tuple[str, ...] = ("renormalised", "mask_first", "unnormalised", "student_all")
REDUCTIONS: tuple[str, ...] = ("sum", "rows", "samples")

Teachers: TypeAlias = Factored | Sequence[Factored]
Outside: TypeAlias = Tensor | Sequence[Tensor | None] | None


def indexer_scores(
    queries: Tensor, keys: Tensor, weights: Tensor | None = None, *, scale: float, relu: bool = True, groups: int = 1
) -> Tensor:
    """``I_g(t, c) = scale * sum_h w_h(t) relu(q_h(t) . k(c))`` as a whole, with gradient (IDX-1, IDX-2).

    Args:
        queries: ``(B, H_i, L, d_i)``.
        keys: ``(B, H_k, C, d_i)`` with H_k a divisor of H_i.
        weights: ``(B, H_i, L)``; None for ones.
        scale: factor of the scores.
        relu: whether negative products count as 0.
        groups: G, blocks of heads with one score each.

    Returns:
        ``(B, G, L, C)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-dtype``, ``argument-value``.
    """
    scorer = Scorer(queries, keys, weights, scale, relu, groups, check=False)
    return scorer.scores(scorer.products(slice(None), slice(0, queries.shape[2]), slice(0, keys.shape[2])))


def indexer_select(scores: Tensor, top_k: int, allowed: Tensor | None = None) -> Tensor:
    """The top_k allowed entries of every row, ties by the smaller position (IDX-10).

    Args:
        scores: ``(..., L, C)``.
        top_k: how many; all allowed ones where they are fewer.
        allowed: boolean, broadcastable to the scores, True = may be selected.

    Returns:
        Boolean, shaped as the scores.

    Raises:
        ShdError: ``argument-value``.
    """
    top_k = check_integer("top_k", top_k, 1, None, "IDX-10")
    scores = scores.detach()
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand_as(scores)
    if top_k >= scores.shape[-1]:
        return allowed.clone()
    masked = scores.masked_fill(~allowed, -torch.inf)
    if scores.device.type == "cpu":  # NumPy sorts rows in less time than topk selects from them
        wide = masked if masked.dtype == torch.float64 else masked.float()
        least = torch.from_numpy(np.sort(wide.numpy(), axis=-1))[..., -top_k, None].to(masked.dtype)
    else:
        least = masked.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    selected = masked >= least
    if scores.device.type == "cpu" and int(selected.count_nonzero()) == top_k * least.numel():
        return selected  # no ties, as nearly always; another device would have to wait for the answer
    selected &= allowed
    level = selected & (masked == least)
    room = top_k - (selected & ~level).sum(-1, keepdim=True)
    return selected & ~(level & (level.cumsum(-1) > room))


@dataclass(frozen=True, eq=False)
class Scorer:
    """The queries, keys and weights of an indexer (IDX-1), checked, with gradient as they were given."""

    queries: Tensor
    keys: Tensor
    weights: Tensor | None
    scale: float
    relu: bool
    groups: int

    check: InitVar[bool]

    def __post_init__(self, check: bool) -> None:
        queries = self.queries
        object.__setattr__(self, "scale", check_number("scale", self.scale, "IDX-1"))
        object.__setattr__(self, "groups", check_integer("groups", self.groups, 1, None, "IDX-6"))
        is_truth = isinstance(self.relu, bool)
        need(is_truth, "argument-value", "relu", "be True or False", repr(self.relu), spec_id="IDX-2")
        for name, tensor in (("queries", queries), ("keys", self.keys)):
            check_real(tensor, name, check=check, ndim=4)
        check_query_key(queries, self.keys)
        heads, argument = queries.shape[1], f"groups={self.groups}"
        is_whole = heads % self.groups == 0
        need(is_whole, "argument-shape", argument, "divide the scorer's heads", heads, spec_id="IDX-1")
        if self.weights is not None:
            check_real(self.weights, "weights", check=check, ndim=3)
            check_shape(self.weights, "weights", queries.shape[:3], "IDX-1")

    @property
    def dtype(self) -> torch.dtype:
        """float64 if an argument is, else float32."""
        return compute_dtype(*(t for t in (self.queries, self.keys, self.weights) if t is not None))

    def products(self, samples: slice, rows: slice, blocks: slice, dtype: torch.dtype | None = None) -> Tensor:
        """``f(q_h . k)`` of some rows and blocks ``(B, H_i, R, C)``, in float32 or wider."""
        dtype = dtype or self.dtype
        keys = self.keys[samples, :, blocks].to(dtype)
        queries = self.queries[samples, :, rows].to(dtype)
        batch, heads, height, width = queries.shape
        grouped = queries.reshape(batch, keys.shape[1], -1, width) @ keys.mT
        return (grouped.relu_() if self.relu else grouped).reshape(batch, heads, height, -1)

    def scores(self, products: Tensor, samples: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """The scores ``(B, G, R, C)`` from the products of some rows."""
        batch, _, height, blocks = products.shape
        products = products.reshape(batch, self.groups, -1, height, blocks)
        if self.weights is None:
            return self.scale * products.sum(2)
        weights = self.weights[samples, :, rows].to(products.dtype).reshape(batch, self.groups, -1, height)
        return torch.einsum("bghrc,bghr->bgrc", products, self.scale * weights)


class Tile(NamedTuple):
    """Some rows of the loss; rows that may attend to no key have a target of zeros, and do not count."""

    samples: slice
    rows: slice
    blocks: slice
    products: Tensor  # after the activation (B, H_i, R, C)
    scores: Tensor  # (B, G, R, C)
    allowed: Tensor  # blocks that a row may attend to, broadcastable to the scores
    chosen: Tensor  # blocks that a row selects, broadcastable to the scores
    target: Tensor  # p before any restriction but ``mask_first`` (B, G, R, C)


@dataclass(frozen=True, eq=False)
class IndexerRequest:
    """A scorer and its teacher's layers, on one device; see ``indexer_kl`` for the fields."""

    scorer: Scorer
    teachers: tuple[Factored, ...]
    outside: tuple[Tensor | None, ...]
    block_size: int
    top_k: int | None
    mask_first: bool
    segments: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        scorer: Scorer,
        teacher: Teachers,
        *,
        outside: Outside = None,
        block_size: int = 1,
        top_k: int | None = None,
        restriction: str = "renormalised",
        segments: Tensor | None = None,
        check: bool = True,
    ) -> IndexerRequest:
        """The request after its checks; codes and ids are those of chapter IDX."""
        check_option("restriction", restriction, RESTRICTIONS, "IDX-11")
        block_size = check_integer("block_size", block_size, 1, None, "IDX-4")
        top_k = None if top_k is None else check_integer("top_k", top_k, 1, None, "IDX-10")
        teachers = (teacher,) if isinstance(teacher, Factored) else tuple(teacher)
        rests = tuple(outside) if isinstance(outside, list | tuple) else (outside,)
        rests = (None,) * len(teachers) if outside is None else rests
        fits, counts = 0 < len(teachers) == len(rests), f"{len(teachers)} and {len(rests)}"
        rule = "be one each, or equally long lists with one per layer"
        need(fits, "argument-shape", "teacher and outside", rule, counts, spec_id="IDX-8")
        for layer_teacher in teachers:
            rule = "be a Factored (Factored.teacher(queries, keys, is_causal=True)), or a list of them"
            is_right = isinstance(layer_teacher, Factored)
            need(is_right, "argument-value", "teacher", rule, type(layer_teacher).__name__, spec_id="IDX-6")
        batch, _, num_rows, _ = scorer.queries.shape
        num_keys = teachers[0].keys.shape[2]
        num_blocks = -(-num_keys // block_size)
        rule = f"be (B, H_k, C, d_i) with C = {num_blocks}, {num_keys} keys in blocks of {block_size}"
        shape = tuple(scorer.keys.shape)
        need(shape[2] == num_blocks, "argument-shape", "keys", rule, shape, spec_id="IDX-1")
        if segments is not None:
            is_right = segments.dtype in INTEGERS
            need(is_right, "argument-dtype", "segments", "be integers", segments.dtype, spec_id="IDX-5")
            check_shape(segments, "segments", (batch, num_rows), "IDX-5")
            if num_rows != num_keys:
                raise ShdError("argument-shape", f"segments need L = S; got {num_rows} and {num_keys}", "IDX-5")
        for layer, (layer_teacher, rest) in enumerate(zip(teachers, rests, strict=True)):
            _check_teacher(layer_teacher, rest, (batch, num_rows, num_keys), scorer.groups, layer, check=check)
            is_same, rule = _same_mask(layer_teacher.rule, teachers[0].rule, check=check), "be who may in layer 0"
            argument, got = f"who may attend in layer {layer}", "another mask, window or causality"
            need(is_same, "argument-value", argument, rule, got, spec_id="IDX-8")
        device = scorer.queries.device
        moved = tuple(None if rest is None else rest.detach().to(device) for rest in rests)
        return cls(
            scorer=scorer,
            teachers=tuple(layer_teacher.to(device) for layer_teacher in teachers),
            outside=moved,
            block_size=block_size,
            top_k=top_k,
            mask_first=restriction == "mask_first" and top_k is not None,
            segments=None if segments is None else segments.to(device),
            dtype=torch.promote_types(
                scorer.dtype, compute_dtype(*(layer_teacher.queries for layer_teacher in teachers))
            ),
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, G, L, C)``."""
        batch, _, rows, _ = self.scorer.queries.shape
        return batch, self.scorer.groups, rows, self.scorer.keys.shape[2]

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every row of every sample, a few at a time."""
        batch, _, num_rows, _ = self.shape
        num_keys = self.teachers[0].keys.shape[2]
        # Each of the scorer's heads has products of a tile; target and scores take as much as two.
        entries = tile_entries(self.scorer.queries.device) // max(2, self.scorer.queries.shape[1])
        # 32 rows make a matrix product worth its call; of long samples 8 have to do.
        together = max(1, min(batch, entries // (min(num_rows, 32) * num_keys)))
        least = max(min(num_rows, 8), entries // (together * num_keys))
        for first in range(0, batch, together):
            samples, start = slice(first, min(first + together, batch)), 0
            while start < num_rows:
                height = least  # or more, where causality or a window leaves few keys
                while start + height < num_rows:
                    keys = self._keys(slice(start, start + 2 * height))
                    if 2 * height * (keys.stop - keys.start) * together > entries:
                        break
                    height *= 2
                yield self._tile(samples, slice(start, min(start + height, num_rows)))
                start += height

    def _tile(self, samples: slice, rows: slice) -> Tile:
        keys = self._keys(rows)
        blocks = slice(keys.start // self.block_size, -(-keys.stop // self.block_size))
        allowed = self._allowed(samples, rows, keys)
        open_blocks = block_sums(allowed, self.block_size) > 0
        products = self.scorer.products(samples, rows, blocks, self.dtype)
        scores = self.scorer.scores(products, samples, rows)
        chosen = open_blocks if self.top_k is None else indexer_select(scores, self.top_k, open_blocks)
        target = self._target(samples, rows, chosen if self.mask_first else None)
        return Tile(samples, rows, blocks, products, scores, open_blocks, chosen, target)

    def restrict(self, tile: Tile, restriction: str) -> tuple[Tensor, Tensor]:
        """p of the loss and the support of the scorer's distribution (IDX-11)."""
        if self.top_k is None:
            return tile.target, tile.allowed
        p = torch.where(tile.chosen, tile.target, 0.0)
        if restriction != "unnormalised":
            mass = p.sum(-1, keepdim=True)
            faint = mass < torch.finfo(p.dtype).tiny / torch.finfo(p.dtype).eps
            if faint.any():  # the selected keys have less mass than the dtype holds: take it from their logits
                faint &= tile.target.sum(-1, keepdim=True) > 0
                p = torch.where(faint, self._target(tile.samples, tile.rows, tile.chosen, after=True), p)
                mass = p.sum(-1, keepdim=True)
            p /= torch.where(mass > 0, mass, 1.0)
        return p, tile.allowed if restriction == "student_all" else tile.chosen

    def _keys(self, rows: slice) -> slice:
        """Keys outside of which no row of the tile may attend, at the edges of blocks."""
        num_keys, size = self.teachers[0].keys.shape[2], self.block_size
        spans = [teacher.rule.key_range(rows, num_keys) for teacher in self.teachers]
        start, stop = min(span.start for span in spans), max(span.stop for span in spans)
        return slice(start // size * size, min(num_keys, -(-stop // size) * size))

    def _allowed(self, samples: slice, rows: slice, keys: slice) -> Tensor:
        """Who may attend in a tile, ``(B or 1, 1, R, K)``."""
        device = self.scorer.queries.device
        allowed = self.teachers[0].rule.narrow(samples).allowed(rows, keys, device)
        shape = (1, 1, rows.stop - rows.start, keys.stop - keys.start)
        allowed = torch.ones(shape, dtype=torch.bool, device=device) if allowed is None else allowed
        if self.segments is not None:
            of_rows, of_keys = self.segments[samples, None, rows, None], self.segments[samples, None, None, keys]
            allowed = allowed & (of_rows == of_keys)
        return allowed.expand(-1, -1, *shape[2:])

    def _target(self, samples: slice, rows: slice, chosen: Tensor | None, *, after: bool = False) -> Tensor:
        """p ``(B, G, R, C)`` of all layers, on the chosen blocks alone where they are given (IDX-8, IDX-9).

        Each head's softmax is over these, or ``after``: over all keys and cut to them, in proportion however faint.
        """
        keys = self._keys(rows)
        allowed = self._allowed(samples, rows, keys)
        size, width = self.block_size, allowed.shape[-1]
        inside = None if chosen is None else allowed & chosen.repeat_interleave(size, -1)[..., :width]
        layers = (
            self._layer_target(teacher, outside, samples, rows, keys, allowed, inside, after)
            for teacher, outside in zip(self.teachers, self.outside, strict=True)
        )
        if after:
            targets, masses = zip(*layers, strict=True)
            mean = torch.einsum("l...,l...k->...k", torch.stack(masses).softmax(0), torch.stack(targets))
            return block_sums(mean, size)
        target, _ = next(layers)
        for layer_target, _ in layers:
            target += layer_target
        return block_sums(target.div_(len(self.teachers)) if len(self.teachers) > 1 else target, size)

    def _layer_target(
        self,
        teacher: Factored,
        outside: Tensor | None,
        samples: slice,
        rows: slice,
        keys: slice,
        allowed: Tensor,
        inside: Tensor | None,
        after: bool,
    ) -> tuple[Tensor, Tensor]:
        """One layer's target ``(B, G, R, K)`` and the logarithm of its mass, some heads at a time (IDX-6, IDX-7)."""
        groups, heads, dtype = self.scorer.groups, teacher.queries.shape[1], self.dtype
        height, width = allowed.shape[2:]
        batch = len(range(*samples.indices(teacher.queries.shape[0])))
        run = _run_length(heads, teacher.keys.shape[1], groups, self.scorer.queries.shape[1])
        mixed = torch.zeros((batch, groups, height, width), dtype=dtype, device=allowed.device)
        norm = mixed.new_zeros((batch, groups, height))
        peak = torch.full_like(norm, torch.finfo(dtype).min)
        log_mass = torch.full_like(norm, -torch.inf)  # of the heads' masses on all keys, a logarithm
        rule_of_samples = teacher.rule.narrow(samples)
        is_weighed = after or outside is not None or teacher.row_mass is not None
        blocked = blocked_keys(allowed)
        unchosen = None if inside is None else blocked_keys(inside)
        # The first keys are often open to all rows, which saves a processor most of the masking.
        free = int((~has_any(blocked.flatten(0, 2), 0)).cumprod(0).sum()) if blocked.device.type == "cpu" else 0
        blocked = blocked[..., free:]
        for first in range(0, heads, run):
            group, key_head = first * groups // heads, first * teacher.keys.shape[1] // heads
            index = torch.arange(first, first + run, device=allowed.device)
            rule = rule_of_samples.narrow(heads=index)
            queries = teacher.queries.detach()[samples, first : first + run, rows].to(dtype)
            key_heads = slice(key_head, key_head + max(1, run * teacher.keys.shape[1] // heads))
            logits, _ = rule.products(queries, teacher.keys.detach()[samples, key_heads, keys].to(dtype))
            bias = rule.bias(rows, keys, dtype)
            logits = logits if bias is None else logits.add_(bias.detach())
            logits[..., free:].masked_fill_(blocked, -torch.inf)
            total = logits.logsumexp(-1) if is_weighed else None
            if unchosen is not None:
                logits.masked_fill_(unchosen[:, group, None], -torch.inf)
            if total is None:
                probs = logits.softmax(-1)
                mixed[:, group] += probs[:, 0] if run == 1 else probs.sum(1)
                continue
            lost = _lost(teacher, outside, samples, slice(first, first + run), rows, total)
            inside_total = total if unchosen is None else logits.logsumexp(-1)
            rho = -F.softplus(lost - total)
            share = inside_total - total + rho if after else -F.softplus(lost - inside_total)
            log_mass[:, group] = torch.logaddexp(log_mass[:, group], rho.logsumexp(1))
            higher = torch.maximum(peak[:, group], share.amax(1))
            shrink = (peak[:, group] - higher).exp()
            factors = (share - higher[:, None]).exp()
            added = torch.einsum("bhrk,bhr->brk", logits.softmax(-1), factors)
            mixed[:, group] = mixed[:, group] * shrink[..., None] + added
            norm[:, group] = norm[:, group] * shrink + factors.sum(1)
            peak[:, group] = higher
        norm = norm if is_weighed else torch.full_like(norm, heads / groups)
        live = has_any(allowed) & (norm > 0)
        mixed *= torch.where(live, 1.0 / norm, 0.0)[..., None]
        return mixed, torch.where(live, peak + norm.log() - log_mass, -torch.inf)


def blocked_keys(allowed: Tensor) -> Tensor:
    """What is masked before a softmax: all but the allowed keys; of none, the first is left open."""
    blocked = ~allowed
    blocked[..., 0] &= has_any(allowed)
    return blocked


def has_any(mask: Tensor, dim: int = -1) -> Tensor:
    """As ``mask.any(dim)``, in a fortieth of the time on a CPU."""
    return mask.view(torch.uint8).amax(dim).bool()


def block_sums(maps: Tensor, size: int) -> Tensor:
    """Sums over blocks of the last axis, of which the last may be shorter (IDX-4)."""
    if size == 1:
        return maps
    padded = F.pad(maps, (0, -maps.shape[-1] % size))
    return padded.reshape(*padded.shape[:-1], -1, size).sum(-1)


def _run_length(heads: int, key_heads: int, groups: int, most: int) -> int:
    """How many neighbouring heads are formed at once: of one group, and no more than the scorer has."""
    share, group = heads // key_heads, heads // groups
    runs = (run for run in range(1, min(group, most) + 1) if group % run == 0)
    return max(run for run in runs if share % run == 0 or run % share == 0)


def _lost(
    teacher: Factored, outside: Tensor | None, samples: slice, heads: slice, rows: slice, total: Tensor
) -> Tensor:
    """The log-sum-exp of logits outside the keys (IDX-7): as given, computed from the teacher's row sums, or none."""
    if outside is not None:
        return outside[samples, heads, rows].to(total.dtype)
    if teacher.row_mass is None:
        return torch.full_like(total, -torch.inf)
    mass = teacher.row_mass.detach()[samples, heads, rows].to(total.dtype)
    return total + ((1.0 - mass).clamp_min(0.0) / mass).log()


def _same_mask(a: AttentionRule, b: AttentionRule, *, check: bool) -> bool:
    """Whether two layers let the same keys be attended to; masks are compared where values are looked at."""
    if (a.is_causal, a.window, a.attn_mask is None) != (b.is_causal, b.window, b.attn_mask is None):
        return False
    if a.attn_mask is None or b.attn_mask is None or a.attn_mask is b.attn_mask or not check:
        return True
    return bool((is_allowed(a.attn_mask) == is_allowed(b.attn_mask)).all())


def _check_teacher(
    teacher: Factored, outside: Tensor | None, shape: tuple[int, int, int], groups: int, layer: int, *, check: bool
) -> None:
    (batch, heads, rows, _), mask = teacher.queries.shape, teacher.rule.attn_mask
    rule = f"have B, L and S of {shape} in layer {layer}, as the scorer and its other layers"
    fits, got = (batch, rows, teacher.keys.shape[2]) == shape, f"{(batch, rows)} and {tuple(teacher.keys.shape)}"
    need(fits, "argument-shape", "the teacher", rule, got, spec_id="IDX-8")
    rule = f"divide {heads} heads in layer {layer}"
    need(heads % groups == 0, "argument-shape", "groups", rule, groups, spec_id="IDX-6")
    if mask is not None:
        rule, got = f"be the same for all heads of layer {layer}", f"an attn_mask of {tuple(mask.shape)}"
        need(mask.shape[1] == 1, "argument-shape", "who may attend", rule, got, spec_id="IDX-5")
    for name in ("queries", "keys"):
        check_real(getattr(teacher, name), f"teacher_{name}", check=check, ndim=4, layer=layer)
    if outside is not None:
        rule, is_one = "be None where the teacher has row_mass", teacher.row_mass is None
        need(is_one, "argument-value", "outside", rule, "both", spec_id="IDX-7")
        check_real(outside, "outside", check=check, ndim=3, allow_minus_inf=True, layer=layer)
        check_shape(outside, "outside", teacher.queries.shape[:3], "IDX-7")
