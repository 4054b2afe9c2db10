"""Supervision without maps: the teacher's queries and keys, and the mixing matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import check_finite, check_real, compute_dtype
from shd_torch.maps.attention import temper
from shd_torch.maps.mixing import check_convex
from shd_torch.precision import without_autocast
from shd_torch.supervision.fused import MapFactors, attend, attend_both_ways, center_keys, expand_heads
from shd_torch.supervision.mask import AttentionMask
from shd_torch.supervision.supervision import ALL, Supervision


@dataclass(frozen=True, eq=False)
class Factored(Supervision):
    """Merged maps as the teacher's queries and keys with the mixing matrix: ``A~_h = sum_t C[h,t] rho_t A_t``.

    ``A_t = softmax((scale q_t k_t^T + bias) / T)`` over the keys that the mask allows.

    Attributes:
        queries: ``(B, H_t, L, d)``, rotated and normalised as the teacher multiplies them.
        keys: ``(B, H_kv, S, d)``, likewise; query head t reads key head ``t // (H_t / H_kv)``.
        mixing: C ``(B, H_s, H_t)``, or ``(B, H_s, H_t, L)`` with one weight per row.
        scale: of the products; None for ``1 / sqrt(d)``.
        attn_mask: as PyTorch's: boolean, True = may attend, or added to the logits; broadcastable to
            ``(B, H_t, L, S)``.
        is_causal: row i attends to keys 0..i.
        window: see ``AttentionMask``.
        alibi_slopes: see ``AttentionMask``.
        softcap: logits are ``softcap * tanh(scale q k^T / softcap)``; such maps are formed tile by tile.
        groups: the teacher heads merged into each student head (``plan_groups``), outside of which C is zero;
            without it every pair of heads costs a product.
        row_mass: rho ``(B, H_t, L)``, what each teacher row sums to at T = 1 where attention sinks take the rest.
        lse: ``(B, H_t, L)``, log-sum-exp of the teacher's logits at T = 1, where it is at hand.
        entropy: ``(B, H_s, L)``, what ``entropies`` gives at T = 1, where it is at hand.
        mask: the description of who may attend in the teacher; fits ``(B, H_t, L, S)``.
        pair_weights: ``C[h,t] rho_t`` of each of the ``pairs``, ``(B, pairs, 1 or L)``; 0 on the teacher's fully
            masked rows.

    Raises:
        ShdError: ``argument-shape`` (GRAD-5, MIX-3, MAP-10), ``argument-dtype`` (MAP-5, MAP-7), ``argument-value``
            (scale, soft cap, window, groups); values are looked at by ``check``.

    Source: MIX-3, GRAD-5.
    """

    queries: Tensor
    keys: Tensor
    mixing: Tensor
    scale: float | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    row_mass: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    mask: AttentionMask = field(init=False, repr=False)
    pair_weights: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            check_real(getattr(self, name), name, check=False, ndim=4)
        check_real(self.mixing, "mixing", check=False)
        batch, heads, rows, width = self.queries.shape
        given, shape = tuple(self.keys.shape), tuple(self.mixing.shape)
        if given[0] != batch or given[3] != width or given[1] == 0 or heads % given[1]:
            raise ShdError(
                "argument-shape",
                f"keys must be (B, H_kv, S, d) with B={batch}, d={width} and H_kv a divisor of {heads}; got {given}",
                "GRAD-5",
            )
        if len(shape) not in (3, 4) or shape[0] != batch or shape[2] != heads or shape[3:] not in ((), (rows,)):
            raise ShdError(
                "argument-shape",
                f"mixing must be (B, H_s, H_t[, L]) with B={batch}, H_t={heads}, L={rows}; got {shape}",
                "MIX-3",
            )
        for name, wanted in (("row_mass", heads), ("lse", heads), ("entropy", shape[1])):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != (batch, wanted, rows):
                raise ShdError("argument-shape", f"{name} must be {(batch, wanted, rows)}; got {tuple(tensor.shape)}")
        if self.scale is not None:
            check_finite("scale", self.scale, "GRAD-8")
        if self.softcap is not None and check_finite("softcap", self.softcap, "GRAD-8") <= 0:
            raise ShdError("argument-value", f"softcap must be above 0; got {self.softcap}")
        if self.groups is not None and (
            len(self.groups) != shape[1] or not all(0 <= t < heads for group in self.groups for t in group)
        ):
            raise ShdError(
                "argument-value",
                f"groups must name heads of 0..{heads - 1} for each of {shape[1]} student heads; got {self.groups}",
                "PLAN-6",
            )
        described = AttentionMask(self.attn_mask, self.is_causal, self.window, self.alibi_slopes)
        # Found once, here: every tile reads them, and a mask that does not fit is refused before the first step.
        object.__setattr__(self, "mask", described.fit((batch, heads, rows, given[2]), self.device))
        object.__setattr__(self, "pair_weights", self._weigh_pairs())

    @classmethod
    def teacher(cls, queries: Tensor, keys: Tensor, **fields: Any) -> Self:
        """A teacher's own maps, unmixed: what ``squeeze_factored`` starts from.

        Args:
            queries: ``(B, H_t, L, d)``.
            keys: ``(B, H_kv, S, d)``.
            **fields: any field but ``mixing``, ``groups`` and ``entropy``.
        """
        check_real(queries, "queries", check=False, ndim=4)
        batch, heads = queries.shape[:2]
        own = torch.eye(heads, dtype=compute_dtype(queries), device=queries.device).expand(batch, -1, -1)
        return cls(queries, keys, own, groups=tuple((head,) for head in range(heads)), **fields)

    def unmixed(self) -> Self:
        """The teacher of this supervision."""
        kept = ("scale", "attn_mask", "is_causal", "window", "alibi_slopes", "softcap", "row_mass", "lse")
        return self.teacher(self.queries, self.keys, **{name: getattr(self, name) for name in kept})

    @property
    def row_sums(self) -> str:  # type: ignore[override]  # a fact about the fields
        """``"at_most_one"`` where rows have a mass of their own."""
        return "one" if self.row_mass is None else "at_most_one"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H_s, L, S)``."""
        return self.queries.shape[0], self.mixing.shape[1], self.queries.shape[2], self.keys.shape[2]

    @property
    def device(self) -> torch.device:
        """That of the queries."""
        return self.queries.device

    @property
    def dtype(self) -> torch.dtype:
        """float64 if queries or keys are, else float32."""
        return compute_dtype(self.queries, self.keys)

    @property
    def logit_scale(self) -> float:
        """The factor of the products."""
        return 1.0 / math.sqrt(self.queries.shape[3]) if self.scale is None else float(self.scale)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """``(student head, teacher head)`` wherever C may be above zero, in the student's order."""
        groups = self.groups or (tuple(range(self.queries.shape[1])),) * self.num_heads
        return tuple((head, member) for head, group in enumerate(groups) for member in group)

    @without_autocast
    def teacher_probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        """A tile of the teacher's own maps ``(B, H_t, R, K)``, without sinks.

        Args:
            rows: query rows.
            keys: keys; the tile's rows may attend to no other (see ``key_range``).
            temperature: T_a > 0.

        Returns:
            Distributions over keys; anything finite in a fully masked row.
        """
        rows, keys = (slice(*each.indices(size)[:2]) for each, size in zip((rows, keys), self.shape[2:], strict=True))
        batch, heads, _, width = self.queries.shape
        held = self.keys.detach()[:, :, keys].to(self.dtype)
        queries = self.queries.detach()[:, :, rows].to(self.dtype) * self.logit_scale
        logits = queries.reshape(batch, held.shape[1], -1, width) @ held.mT
        logits = logits.reshape(batch, heads, rows.stop - rows.start, -1)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        tile = self.mask.tile(rows, keys, self.dtype, self.device)
        if tile is not None:
            logits = logits + tile
        return (logits if temperature == 1.0 else temper(logits, logits, temperature)).softmax(-1)

    def probs(self, rows: slice = ALL, keys: slice = ALL, *, temperature: float = 1.0) -> Tensor:
        """A tile of A~; see ``Supervision``."""
        members = self.teacher_probs(rows, keys, temperature=temperature)
        weights = self.pair_weights if self.pair_weights.shape[2] == 1 else self.pair_weights[..., rows]
        merged = members.new_zeros((members.shape[0], self.num_heads, *members.shape[2:]))
        for number, (head, member) in enumerate(self.pairs):
            merged[:, head].addcmul_(members[:, member], weights[:, number, :, None])
        return merged

    def has_mass(self, rows: slice, keys: slice) -> Tensor:
        """Where a member of a merged map may attend and has a weight; see ``Supervision``."""
        students, teachers = self._pair_heads
        weights = self.pair_weights if self.pair_weights.shape[2] == 1 else self.pair_weights[..., rows]
        taught = weights[..., None] != 0  # (B, pairs, 1 or R, 1)
        allowed = self.mask.narrow(heads=teachers).allowed(rows, keys, self.device)
        if allowed is not None:
            taught = taught & allowed
        counts = taught.new_zeros((self.shape[0], self.num_heads, *taught.shape[2:]), dtype=torch.int32)
        return counts.index_add_(1, students, taught.int()) > 0

    def check_temperature(self, temperature: float) -> None:
        """Every temperature is right."""

    def mass(self) -> Tensor:
        """What each row sums to, ``(B, H_s, L)``; see ``Supervision``."""
        return self._sum_pairs(self.pair_weights).expand(self.shape[:3])

    def drop_rows(self, loss_mask: Tensor) -> Self:
        """The same with zeros in rows that do not count; see ``Supervision``."""
        dropped = ~loss_mask[:, None, :]
        rows = {"queries": dropped[..., None], "row_mass": dropped, "lse": dropped, "entropy": dropped}
        if self.mixing.ndim == 4:
            rows["mixing"] = dropped[:, None]
        held = self._tensors()
        cleared = {name: held[name].masked_fill(where, 0.0) for name, where in rows.items() if name in held}
        return replace(self, **cleared)  # type: ignore[arg-type]  # tensors for tensors

    def samples(self, start: int, stop: int) -> Self:
        """The supervision of samples ``start .. stop - 1``."""
        shared = {"attn_mask": 4, "alibi_slopes": 2}  # with fewer axes, or one entry, the same for all samples
        cut = {
            name: tensor[start:stop]
            for name, tensor in self._tensors().items()
            if name not in shared or (tensor.ndim == shared[name] and tensor.shape[0] > 1)
        }
        return replace(self, **cut)  # type: ignore[arg-type]  # tensors for tensors

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same on another device."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]  # tensors for tensors

    def check(self, loss_mask: Tensor | None, layer: int) -> None:
        """Look at the values; see ``Supervision``."""
        kept = self if loss_mask is None else self.drop_rows(loss_mask)
        for name in ("queries", "keys", "mixing"):
            check_real(getattr(kept, name), f"supervision's {name}", check=True, layer=layer)
        mixing = kept.mixing
        if loss_mask is not None and mixing.ndim == 4:
            mixing = mixing.movedim(3, 1)[loss_mask]  # (rows that count, H_s, H_t)
        check_convex(mixing, row_sum_tolerance(str(mixing.dtype).removeprefix("torch.")))
        outside = torch.ones(mixing.shape[1:3], dtype=torch.bool, device=self.device)
        outside[self._pair_heads] = False
        if (mixing.movedim(0, -1)[outside] != 0).any():
            raise ShdError(
                "mixing-invalid", "mixing must be 0 outside of groups; got weights above 0 there", "PLAN-6"
            )
        mass = kept.row_mass
        if mass is not None and not ((mass >= 0) & (mass <= 1 + row_sum_tolerance("float32"))).all():
            raise ShdError(
                "not-a-distribution",
                f"row_mass must lie in [0, 1]; got {mass.min().item():.6g} to {mass.max().item():.6g}",
                "MAP-9",
            )

    def key_range(self, rows: slice) -> slice:
        """Keys outside of which these rows have no mass, from causality and window."""
        return self.mask.key_range(rows, self.shape[3])

    @without_autocast
    def apply_to(self, vectors: Tensor, *, temperature: float = 1.0) -> Tensor:
        """``A~ v`` by fused attention; see ``Supervision``."""
        if self.softcap is not None:
            return super().apply_to(vectors, temperature=temperature)
        values = expand_heads(vectors.detach().to(compute_dtype(vectors)), self.num_heads)[:, self._pair_heads[0]]
        product = attend(self._members(values.dtype, temperature), values)
        return self._sum_pairs(self.pair_weights.to(values.dtype)[..., None] * product)

    @without_autocast
    def products(self, vectors: Tensor, weighted: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``A~ v`` and ``A~^T y`` by fused attention in the dtype of the vectors; see ``Supervision``."""
        if self.softcap is not None:
            return super().products(vectors, weighted, temperature=temperature)
        students = self._pair_heads[0]
        wide = compute_dtype(vectors)
        weights = self.pair_weights.to(wide)[..., None]
        product, transposed = attend_both_ways(
            self._members(vectors.dtype, temperature),
            vectors.detach()[:, students],
            weights * weighted.detach()[:, students],
        )
        return self._sum_pairs(weights * product), self._sum_pairs(transposed.to(wide))

    def _members(self, dtype: torch.dtype, temperature: float) -> MapFactors:
        """The teacher's map of every pair."""
        teachers = self._pair_heads[1]
        held = expand_heads(center_keys(self.keys.detach(), dtype), self.queries.shape[1])[:, teachers]
        queries = self.queries.detach().to(dtype)[:, teachers]
        return MapFactors(queries, held, self.mask.narrow(heads=teachers), self.logit_scale, temperature)

    def entropies(self, *, temperature: float = 1.0) -> Tensor:
        """``- sum_j A~_j log A~_j`` of each row; the stored ones at T = 1."""
        if self.entropy is not None and temperature == 1.0:
            return self.entropy.detach().to(self.dtype)
        return super().entropies(temperature=temperature)

    def _weigh_pairs(self) -> Tensor:
        weights = self.mixing.detach().to(self.dtype)
        students, teachers = self._pair_heads
        picked = (weights[..., None] if weights.ndim == 3 else weights)[:, students, teachers]
        if self.row_mass is not None:
            picked = picked * self.row_mass.detach().to(self.dtype)[:, teachers]
        live = self.mask.live_rows(self.shape[2], self.shape[3], self.device)
        if live is not None:
            picked = picked * (live[:, teachers] if live.shape[1] > 1 else live)
        return picked

    @property
    def _pair_heads(self) -> tuple[Tensor, Tensor]:
        pairs = torch.tensor(self.pairs, device=self.device)
        return pairs[:, 0], pairs[:, 1]

    def _sum_pairs(self, values: Tensor) -> Tensor:
        """Values ``(B, pairs, ...)`` summed to the student's heads ``(B, H_s, ...)``."""
        sums = values.new_zeros((values.shape[0], self.num_heads, *values.shape[2:]))
        return sums.index_add_(1, self._pair_heads[0], values)

    def _tensors(self) -> dict[str, Tensor]:
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {name: value for name, value in given.items() if isinstance(value, Tensor)}
