"""The closed forms of ``shrink`` as the judge calls them; whole runs are the business of tests.

``python -m shd_ref.conformance --impl shd_torch.adapters.shrink:ShrinkAdapter --part shrink --only 'law/*'`` judges
their laws. Records come from a model there, so that what the judge gives wrong is not refused here: of the cases
only the valid ones say something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.maps.judged import Adapter
from shd_torch.shrink.align import RIDGE, OutputFit
from shd_torch.shrink.heads import AttentionStatistics, squeeze_attention
from shd_torch.shrink.layer import keep_neurons, merge_linear, most_important, neuron_importance
from shd_torch.shrink.merges import HeadMerge, merge_heads
from shd_torch.shrink.sizes import choose_layers
from shd_torch.shrink.weights import AttentionWeights
from shd_torch.shrink.width import Turn, principal_axes


class ShrinkAdapter(Adapter):
    """Runs operations of ``specs/shrink.md`` on one device, in float64 from weights of any dtype."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """The method of that name; what the binding has no function for is missing."""
        method = getattr(self, operation, None) if operation in _OPERATIONS else None
        if method is None:
            raise NotImplementedError(f"shd_torch.shrink has no {operation} by itself")
        return method(**arguments)

    def mix_queries(
        self, weights: Mapping[str, Any], merge: Mapping[str, Any], query_size: Tensor | None = None
    ) -> dict[str, Any]:
        """HEAD-7, HEAD-18."""
        layer = _weights(weights)
        return _squeezed(layer, merge, layer.num_kv_heads, layer.head_dim, ("queries", "copied"), query_size)

    def concatenate_heads(
        self, weights: Mapping[str, Any], merge: Mapping[str, Any], head_dim: int
    ) -> dict[str, Any]:
        """HEAD-9."""
        return _squeezed(_weights(weights), merge, len(merge["groups"]), head_dim, ("side-by-side",))

    def low_rank_heads(
        self,
        weights: Mapping[str, Any],
        merge: Mapping[str, Any],
        num_kv_heads: int,
        head_dim: int,
        moment: Tensor,
        *,
        key_moment: Tensor | None = None,
        rotary: Mapping[str, Any] | None = None,
        ridge: float | None = None,
    ) -> dict[str, Any]:
        """HEAD-11 to HEAD-16; lengths that suit all heads side by side are exact, as the text allows."""
        layer, frequencies = _weights(weights), None
        if ridge is not None or key_moment is None:
            raise NotImplementedError("the binding has a fixed ridge and needs key_moment")
        if rotary is not None:
            if rotary.get("layout", "half") != "half" or 2 * len(rotary["frequencies"]) != layer.head_dim:
                raise NotImplementedError("pairs lie in halves of the whole head")
            slow = rotary.get("slow")
            turning = torch.ones_like(rotary["frequencies"]) if slow is None else ~slow
            frequencies = 2.0 * turning.double()  # over one position: above the angle of a slow pair, or 0
        cases = ("low-rank", "side-by-side") if rotary is None else ("rotary",)
        return _squeezed(
            layer, merge, num_kv_heads, head_dim, cases, moments=(moment, key_moment), frequencies=frequencies
        )

    def pooled_mixing(self, gram: Tensor, plan: Any) -> dict[str, Any]:
        """HEAD-3."""
        students = len(gram) - sum(len(pairs) for pairs in plan)
        made = merge_heads(gram.double(), students, plan, 1)
        return {"mixing": made.mixing, "groups": made.groups}

    def grouped_plan(self, gram: Tensor, num_student_heads: int, num_kv_heads: int) -> Any:
        """HEAD-4, HEAD-5."""
        return merge_heads(gram.double(), num_student_heads, "matched", num_kv_heads).plan

    def merge_linear(
        self,
        first: Tensor,
        second: Tensor,
        first_bias: Tensor | None = None,
        second_bias: Tensor | None = None,
        *,
        gate: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """FFN-1, FFN-2; there matrices are read as ``x W``."""
        parts = (
            (w.double().mT, None if b is None else b.double())
            for w, b in zip((first, second), (first_bias, second_bias), strict=True)
        )
        matrix, bias = merge_linear(*parts)
        return matrix.mT, bias

    def neuron_importance(self, activations: Tensor, second: Tensor) -> Tensor:
        """FFN-4."""
        return neuron_importance(activations.double().square().mean(0), second.double().mT)

    def keep_neurons(
        self, first: Mapping[str, Any], second: Mapping[str, Any], importance: Tensor, count: int
    ) -> dict[str, Any]:
        """FFN-5; there matrices are read as ``x W``."""
        kept = most_important(importance.double(), count)
        weight, bias = keep_neurons((first["weight"].mT, first.get("bias")), kept)
        return {
            "first": {"weight": weight.mT, "bias": bias},
            "second": {"weight": second["weight"][:, kept], "bias": second.get("bias")},
            "kept": kept.tolist(),
        }

    def fold_norm(
        self, matrix: Tensor, scale: Tensor, shift: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """WIDTH-1."""
        turn = Turn(torch.eye(len(matrix), dtype=torch.float64, device=matrix.device), "rms", 0.0)
        return turn.read(_norm(scale, shift), matrix.double(), None if bias is None else bias.double())

    def principal_axes(self, moment: Tensor, width: int, norm: str = "rms") -> Tensor:
        """WIDTH-3, WIDTH-4."""
        return principal_axes(moment.double(), width, norm)

    def kept_scale(self, moment: Tensor, basis: Tensor) -> float:
        """WIDTH-5; rows with this moment are its root's."""
        values, vectors = torch.linalg.eigh(moment.double())
        norm: Any = _norm(torch.zeros_like(moment[0]), None)
        Turn(basis.double(), "rms", 0.0).write_norm(norm, values.clamp_min(0).sqrt()[:, None] * vectors.mT)
        return float(norm.weight[0])

    def align_output(
        self, inputs: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None, *, ridge: float = RIDGE
    ) -> tuple[Tensor, Tensor | None]:
        """ALIGN-2."""
        fit = OutputFit(weight.double(), None if bias is None else bias.double(), ridge)
        fit.add(inputs, targets)
        return fit.solve()

    def kept_layers(self, num_teacher_layers: int, layers: Any) -> tuple[int, ...]:
        """DEPTH-1, DEPTH-2."""
        return choose_layers(num_teacher_layers, layers)


_OPERATIONS = {name for name in vars(ShrinkAdapter) if not name.startswith("_") and name != "call"}


def _weights(record: Mapping[str, Any]) -> AttentionWeights:
    if record.get("scale") is not None:
        raise NotImplementedError("the scale is that of the length")
    return AttentionWeights(**{name: part.double() for name, part in record.items() if part is not None})


def _merge(record: Mapping[str, Any]) -> HeadMerge:
    return HeadMerge((), tuple(map(tuple, record["groups"])), record["mixing"].double())


def _norm(scale: Tensor, shift: Tensor | None) -> nn.Module:
    norm = nn.Module()
    norm.weight = nn.Parameter(scale.double())
    if shift is not None:
        norm.bias = nn.Parameter(shift.double())
    return norm


def _squeezed(
    layer: AttentionWeights,
    merge: Mapping[str, Any],
    num_kv_heads: int,
    head_dim: int,
    cases: tuple[str, ...],
    query_size: Tensor | None = None,
    *,
    moments: tuple[Tensor, Tensor] | None = None,
    frequencies: Tensor | None = None,
) -> dict[str, Any]:
    """The student's layer, where the binding chooses one of these cases for it."""
    unused = layer.query.new_zeros(0)
    augmented, centred = moments or (unused, unused)
    statistics = AttentionStatistics(
        gram=unused,
        augmented=augmented.double(),
        centred=centred.double(),
        query_size=(unused if query_size is None else query_size).double(),
        length=1,
    )
    found = squeeze_attention(
        layer,
        _merge(merge),
        statistics,
        num_kv_heads,
        head_dim,
        frequencies=frequencies,
        query_norm=query_size is not None,
    )
    if found.case not in cases:
        raise ShdError("shrink-unsupported", f"merge must allow the case {cases[0]}; got {found.case}", "HEAD-7")
    return dict(vars(found.weights))
