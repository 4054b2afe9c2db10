"""Supervision without maps: the teacher's queries and keys, and the mixing matrix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import check_query_key, check_real, compute_dtype, without_autocast
from shd_torch.maps.attention import temper
from shd_torch.maps.mixing import check_convex
from shd_torch.supervision.fused import MapFactors, attend, attend_both_ways, center_keys, expand_heads
from shd_torch.supervision.mask import AttentionRule, RuleKeywords
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
        own = torch.eye(heads, dtype=compute_dtype(queries), device=queries.device).expand(batch, -1, -1)
        return cls(queries, keys, own, groups=tuple((head,) for head in range(heads)), **fields)

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
        return (logits if temperature == 1.0 else temper(logits, logits, temperature)).softmax(-1)

    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        members = self.teacher_probs(rows, keys, temperature=temperature)
        weights = self.pair_weights if self.pair_weights.shape[2] == 1 else self.pair_weights[..., rows]
        merged = members.new_zeros((members.shape[0], self.num_heads, *members.shape[2:]))
        for number, (head, member) in enumerate(self.pairs):
            merged[:, head].addcmul_(members[:, member], weights[:, number, :, None])
        return merged

    def has_mass(self, rows: slice, keys: slice) -> Tensor:
        students, teachers = self.pair_heads
        weights = self.pair_weights if self.pair_weights.shape[2] == 1 else self.pair_weights[..., rows]
        taught = weights[..., None] != 0  # (B, pairs, 1 or R, 1)
        allowed = self.rule.narrow(heads=teachers).allowed(rows, keys, self.device)
        if allowed is not None:
            taught = taught & allowed
        counts = taught.new_zeros((self.shape[0], self.num_heads, *taught.shape[2:]), dtype=torch.int32)
        return counts.index_add_(1, students, taught.int()) > 0

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
        kept = self if loss_mask is None else self.drop_rows(loss_mask)
        for name in ("queries", "keys", "mixing"):
            check_real(getattr(kept, name), f"supervision's {name}", check=True, layer=layer)
        mixing = kept.mixing
        check_convex(mixing, row_sum_tolerance(str(mixing.dtype).removeprefix("torch.")))
        outside = torch.ones(mixing.shape[1:], dtype=torch.bool, device=self.device)
        outside[self.pair_heads] = False
        if (mixing[:, outside] != 0).any():
            message = "mixing must be 0 outside of groups; got weights above 0 there"
            raise ShdError("mixing-invalid", message, "PLAN-6")
        mass = kept.row_mass
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
        held = expand_heads(center_keys(self.keys.detach(), dtype), self.queries.shape[1])[:, teachers]
        queries = self.queries.detach().to(dtype)[:, teachers]
        return MapFactors(queries, held, self.rule.narrow(heads=teachers), temperature)

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
