"""Supervision without maps: the teacher's queries and keys, and the mixing matrix.

Its products with vectors come from PyTorch's fused attention, at the end of this file, so that no map is ever formed:
``A v`` is fused attention with ``v`` as values, and ``A^T y`` the gradient that it gives to its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # by name: a model's may be replaced, this one is not

from shd_ref.errors import ShdError
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import check_query_key, check_real, compute_dtype, without_autocast
from shd_torch.maps.attention import temper
from shd_torch.maps.mixing import check_convex
from shd_torch.supervision.mask import CHUNK, AttentionRule, RuleKeywords, expand_heads
from shd_torch.supervision.supervision import ALL, Supervision


@dataclass(frozen=True, eq=False, init=False)
class Factored(Supervision):
    """Merged maps as the teacher's queries and keys with the mixing matrix: ``A~_h = sum_t C[h,t] rho_t A_t``.

    ``A_t = softmax(logits_t / T)`` over the keys that the rule allows.

    Args:
        queries: ``(B, H_t, L, d)``, rotated and normalised as the teacher multiplies them.
        keys: ``(B, H_kv, S, d)``, rotated and normalised too; query head t reads key head ``t // (H_t / H_kv)``.
        mixing: C ``(B, H_s, H_t)``.
        rule: how the teacher makes its logits, and who may attend in it; fits ``(B, H_t, L, S)``. Maps of a soft cap
            are formed tile by tile.
        groups: the teacher heads merged into each student head (``plan_groups``), outside of which C is zero;
            without it every pair of heads costs a product.
        row_mass: rho ``(B, H_t, L)``, what each teacher row sums to at T = 1 where attention sinks take the rest.
        **described: fields of the rule, such as ``is_causal=True``.

    Raises:
        ShdError: ``argument-shape`` (GRAD-5, MIX-3, MAP-10), ``argument-dtype`` (MAP-5, MAP-7), ``argument-value``
            (scale, soft cap, window, groups); values are looked at by ``check``.

    Source: MIX-3, GRAD-5.
    """

    PER_SAMPLE: ClassVar[tuple[str, ...]] = ("queries", "keys", "mixing", "rule", "row_mass")

    queries: Tensor
    keys: Tensor
    mixing: Tensor
    rule: AttentionRule
    groups: tuple[tuple[int, ...], ...] | None
    row_mass: Tensor | None
    # ``C[h,t] rho_t`` of each of the ``pairs``, (B, pairs, 1 or L); 0 on the teacher's fully masked rows.
    pair_weights: Tensor = field(init=False, repr=False)
    # Their student and teacher heads, on the device: a copy in every call would make the host wait.
    pair_heads: tuple[Tensor, Tensor] = field(init=False, repr=False)

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        mixing: Tensor,
        rule: AttentionRule | None = None,
        *,
        groups: tuple[tuple[int, ...], ...] | None = None,
        row_mass: Tensor | None = None,
        **described: Unpack[RuleKeywords],
    ) -> None:
        for name, tensor in (("queries", queries), ("keys", keys)):
            check_real(tensor, name, check=False, ndim=4)
        check_query_key(queries, keys)
        _check_merging(queries, mixing, groups, row_mass)
        rule = replace(AttentionRule() if rule is None else rule, **described)
        # Found once, here: every tile reads them, and a mask that does not fit is refused before the first step.
        fields = (queries, keys, mixing, rule.fit(queries, keys), groups, row_mass)
        for name, value in zip(("queries", "keys", "mixing", "rule", "groups", "row_mass"), fields, strict=True):
            object.__setattr__(self, name, value)
        students, teachers = torch.tensor(self.pairs, device=self.device).unbind(1)
        object.__setattr__(self, "pair_heads", (students, teachers))
        object.__setattr__(self, "pair_weights", self._weigh_pairs())

    @classmethod
    def teacher(cls, queries: Tensor, keys: Tensor, **fields: Any) -> Self:
        """A teacher's own maps, unmixed; ``fields`` are ``rule`` or its fields, and ``row_mass``."""
        check_real(queries, "queries", check=False, ndim=4)
        batch, heads = queries.shape[:2]
        identity = torch.eye(heads, dtype=compute_dtype(queries), device=queries.device).expand(batch, -1, -1)
        return cls(queries, keys, identity, groups=tuple((head,) for head in range(heads)), **fields)

    def unmixed(self) -> Self:
        return self.teacher(self.queries, self.keys, rule=self.rule, row_mass=self.row_mass)

    @property
    def row_sums(self) -> str:  # type: ignore[override]  # a fact about the fields
        return "one" if self.row_mass is None else "at_most_one"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.queries.shape[0], self.mixing.shape[1], self.queries.shape[2], self.keys.shape[2]

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.queries, self.keys)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """``(student head, teacher head)`` wherever C may be above zero, in the student's order."""
        groups = self.groups or (tuple(range(self.queries.shape[1])),) * self.num_heads
        return tuple((head, member) for head, group in enumerate(groups) for member in group)

    @without_autocast
    def teacher_probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        """A tile of the teacher's own maps ``(B, H_t, R, K)``, without sinks; finite in a fully masked row."""
        rows, keys = (slice(*span.indices(size)[:2]) for span, size in zip((rows, keys), self.shape[2:], strict=True))
        queries = self.queries.detach()[:, :, rows].to(self.dtype)
        logits, _ = self.rule.tile_logits(queries, self.keys.detach()[:, :, keys].to(self.dtype), rows, keys)
        logits = logits if temperature == 1.0 else temper(logits, logits, temperature)
        return torch.softmax(logits, -1, out=logits)

    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        members = self.teacher_probs(rows, keys, temperature=temperature)
        weights = self.pair_weights if self.pair_weights.shape[2] == 1 else self.pair_weights[..., rows]
        merged = members.new_zeros((members.shape[0], self.num_heads, *members.shape[2:]))
        for number, (head, member) in enumerate(self.pairs):
            merged[:, head].addcmul_(members[:, member], weights[:, number, :, None])
        return merged

    def mass(self) -> Tensor:
        return self._sum_pairs(self.pair_weights).expand(self.shape[:3])

    def drop_rows(self, loss_mask: Tensor) -> Self:
        dropped = ~loss_mask[:, None, :]
        return replace(
            self,
            queries=self.queries.masked_fill(dropped[..., None], 0.0),
            row_mass=None if self.row_mass is None else self.row_mass.masked_fill(dropped, 0.0),
        )

    def check(self, loss_mask: Tensor | None, layer: int) -> None:
        counted = self if loss_mask is None else self.drop_rows(loss_mask)
        for name in ("queries", "keys", "mixing"):
            check_real(getattr(counted, name), f"supervision's {name}", check=True, layer=layer)
        mixing = counted.mixing
        check_convex(mixing, row_sum_tolerance(str(mixing.dtype).removeprefix("torch.")))
        outside = torch.ones(mixing.shape[1:], dtype=torch.bool, device=self.device)
        outside[self.pair_heads] = False
        if (mixing[:, outside] != 0).any():
            message = "mixing must be 0 outside of groups; got weights above 0 there"
            raise ShdError("mixing-invalid", message, "PLAN-6")
        mass = counted.row_mass
        if mass is not None and not ((mass >= 0) & (mass <= 1 + row_sum_tolerance("float32"))).all():
            message = f"row_mass must lie in [0, 1]; got {mass.min().item():.6g} to {mass.max().item():.6g}"
            raise ShdError("not-a-distribution", message, "MAP-9")

    def key_range(self, rows: slice) -> slice:
        return self.rule.key_range(rows, self.shape[3])

    @without_autocast
    def apply_to(self, vectors: Tensor, *, temperature: float = 1.0) -> Tensor:
        if self.rule.softcap is not None:
            return super().apply_to(vectors, temperature=temperature)
        values = expand_heads(vectors.detach().to(compute_dtype(vectors)), self.num_heads)[:, self.pair_heads[0]]
        product = attend(self._members(values.dtype, temperature), values)
        return self._sum_pairs(self.pair_weights.to(values.dtype)[..., None] * product)

    @without_autocast
    def products(self, vectors: Tensor, weighted: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        if self.rule.softcap is not None:
            return super().products(vectors, weighted, temperature=temperature)
        students = self.pair_heads[0]
        wide = compute_dtype(vectors)
        weights = self.pair_weights.to(wide)[..., None]
        product, transposed = attend_both_ways(
            self._members(vectors.dtype, temperature),
            vectors.detach()[:, students],
            weights * weighted.detach()[:, students],
        )
        return self._sum_pairs(weights * product), self._sum_pairs(transposed.to(wide))

    def _members(self, dtype: torch.dtype, temperature: float) -> MapFactors:
        teachers = self.pair_heads[1]
        keys = expand_heads(center_keys(self.keys.detach(), dtype), self.queries.shape[1])[:, teachers]
        queries = self.queries.detach().to(dtype)[:, teachers]
        return MapFactors(queries, keys, self.rule.narrow(heads=teachers), temperature)

    def _weigh_pairs(self) -> Tensor:
        weights = self.mixing.detach().to(self.dtype)
        students, teachers = self.pair_heads
        picked = weights[:, students, teachers, None]
        if self.row_mass is not None:
            picked = picked * self.row_mass.detach().to(self.dtype)[:, teachers]
        live = self.rule.live_rows(self.shape[2], self.shape[3], self.device)
        if live is not None:
            picked = picked * (live[:, teachers] if live.shape[1] > 1 else live)
        return picked

    def _sum_pairs(self, values: Tensor) -> Tensor:
        """Values ``(B, pairs, ...)`` summed to the student's heads ``(B, H_s, ...)``."""
        sums = values.new_zeros((values.shape[0], self.num_heads, *values.shape[2:]))
        return sums.index_add_(1, self.pair_heads[0], values)


def _check_merging(
    queries: Tensor, mixing: Tensor, groups: tuple[tuple[int, ...], ...] | None, row_mass: Tensor | None
) -> None:
    check_real(mixing, "mixing", check=False)
    batch, heads, rows, _ = queries.shape
    shape = tuple(mixing.shape)
    if len(shape) != 3 or shape[::2] != (batch, heads):
        message = f"mixing must be (B, H_s, H_t) with B={batch}, H_t={heads}; got {shape}"
        raise ShdError("argument-shape", message, "MIX-3")
    if row_mass is not None and tuple(row_mass.shape) != (batch, heads, rows):
        message = f"row_mass must be {(batch, heads, rows)}; got {tuple(row_mass.shape)}"
        raise ShdError("argument-shape", message, "MAP-9")
    if groups is not None and (
        len(groups) != shape[1] or any(len({*group} & {*range(heads)}) != len(group) for group in groups)
    ):
        rule = f"groups must name heads of 0..{heads - 1}, each once, for each of {shape[1]} student heads"
        raise ShdError("argument-value", f"{rule}; got {groups}", "PLAN-6")


_FLOAT16_COLUMN = 2.0**15
"""Half of float16's range: what rounding adds to a sum has room."""


class MapFactors(NamedTuple):
    """Attention maps ``softmax((scale q k^T + bias) / T)`` that are never formed; without a soft cap."""

    queries: Tensor  # (B, H, L, d)
    keys: Tensor  # (B, H, S, d), of the same dtype
    rule: AttentionRule  # fits (B, H, L, S)
    temperature: float = 1.0

    @property
    def scale(self) -> float:
        return self.rule.scale_for(self.queries.shape[3])


def attend(maps: MapFactors, values: Tensor) -> Tensor:
    """``A v`` ``(B, H, L, d_v)`` in the maps' dtype; rows that may attend to no key hold anything finite."""
    maps = _with_positive_scale(maps)
    width, (queries, keys, values) = values.shape[3], _pad(maps.queries, maps.keys, values)
    parts = []
    for rows, columns, mask in _calls(maps):
        inside = queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
        parts.append(_attend_once(*inside, mask, maps.scale / maps.temperature))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[..., :width]


def attend_both_ways(maps: MapFactors, values: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """``A v`` in the maps' dtype and ``A^T y`` in float32 or wider, without gradient; see ``attend``.

    ``weighted``, y ``(B, H, L, d_v)``, may be of a wider dtype; it is 0 in rows that may attend to no key.
    """
    maps = _with_positive_scale(maps)
    weighted, unit = _fit_range(weighted, values.dtype)
    width, (queries, keys, values, weighted) = values.shape[3], _pad(maps.queries, maps.keys, values, weighted)
    parts, transposed = [], torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    for rows, columns, mask in _calls(maps):
        inside = queries[:, :, rows], keys[:, :, columns]
        function = partial(_attend_once, *inside, mask=mask, scale=maps.scale / maps.temperature)
        product, pulled = _result_and_gradient(function, values[:, :, columns], weighted[:, :, rows])
        transposed[:, :, columns] += pulled
        parts.append(product)
    return torch.cat(parts, dim=2)[..., :width], transposed[..., :width] * unit


def center_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys ``(B, H, S, d)`` in the dtype of the products, shifted by their mean where they would be rounded.

    A shift of all keys changes no map, and smaller numbers are rounded by less. Keys of as few bits stay as they are:
    a shift is rounded alike for all small keys, which moves their logits together against a large one's.
    """
    if keys.dtype.itemsize <= dtype.itemsize:
        return keys.to(dtype)
    return (keys - keys.mean(2, keepdim=True)).to(dtype)


def _calls(maps: MapFactors) -> Iterator[tuple[slice, slice, Tensor | bool | None]]:
    """Rows, keys and mask, or whether they are causal: all rows where that is all there is to say, else a few."""
    num_rows, num_keys, rule = maps.queries.shape[2], maps.keys.shape[2], maps.rule
    if rule.attn_mask is None and rule.window is None:
        yield slice(0, num_rows), slice(0, num_keys), rule.is_causal
        return
    for start in range(0, num_rows, CHUNK):
        rows = slice(start, min(start + CHUNK, num_rows))
        keys = rule.key_range(rows, num_keys)
        tile = rule.tile(rows, keys, maps.queries.dtype, maps.queries.device)
        if tile is not None:
            tile = (tile / maps.temperature).expand(*tile.shape[:2], rows.stop - start, keys.stop - keys.start)
        yield rows, keys, tile


def _with_positive_scale(maps: MapFactors) -> MapFactors:
    """The same maps by a scale above 0: fused kernels scale after they mask, where -inf times less does not mask."""
    if maps.scale > 0:
        return maps
    if maps.scale == 0:
        return maps._replace(queries=torch.zeros_like(maps.queries), rule=replace(maps.rule, scale=1.0))
    return maps._replace(queries=-maps.queries, rule=replace(maps.rule, scale=-maps.scale))


def _attend_once(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | bool | None, scale: float) -> Tensor:
    tile, is_causal = (None, mask) if isinstance(mask, bool) else (mask, False)
    with torch.autocast(queries.device.type, enabled=False):
        return scaled_dot_product_attention(queries, keys, values, tile, is_causal=is_causal, scale=scale)


def _result_and_gradient(function: partial[Tensor], values: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """A function of the values, and the gradient ``weighted`` of its result pulled back to them."""
    if torch.compiler.is_compiling():
        product, pull, *_ = torch.func.vjp(function, values)  # can be compiled in the middle of a forward pass
        return product, pull(weighted)[0]
    # The same by automatic differentiation: torch.func would import the compiler, a second and 150 MB.
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        product = function(leaf)
    (transposed,) = torch.autograd.grad(product, leaf, weighted)
    return product.detach(), transposed


def _fit_range(weighted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """y in the dtype of the products, in units in which no column of ``A^T y`` can leave its range.

    Where every row looks at one key, such as a language model's first, ``A^T y`` sums a whole column of y: thousands
    of rows pass float16's 65504. A power of two for each column costs no precision.
    """
    if dtype != torch.float16:
        return weighted.to(dtype), 1.0
    most = weighted.abs().sum(2, keepdim=True, dtype=torch.float32)
    unit = torch.exp2(torch.ceil(torch.log2(most / _FLOAT16_COLUMN)).clamp_(min=0.0))
    return (weighted / unit).to(dtype), unit


def _pad(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one head size, which the fused kernels want; zeros change neither products nor other columns."""
    size = max(tensor.shape[3] for tensor in tensors)
    return [tensor if tensor.shape[3] == size else F.pad(tensor, (0, size - tensor.shape[3])) for tensor in tensors]
