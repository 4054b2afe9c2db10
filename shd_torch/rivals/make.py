"""One name, one rival: both models are read on a batch, and the rest follows from what they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shd_ref.errors import ShdError
from shd_ref.layers import layer_map
from shd_ref.shrink.merges import merge_heads
from shd_torch.capture import Captured
from shd_torch.capture.layers import number_layers
from shd_torch.capture.projections import ProjectionWatch
from shd_torch.capture.taps import record
from shd_torch.rivals.heads import LearnedAlignment, RelationKl, SoftAlignment
from shd_torch.rivals.losses import (
    AttentionCopy,
    AttentionOutput,
    Divergence,
    GeometricMean,
    MergedMaps,
    OrthogonalProjector,
    Projector,
    ScoreMse,
    SelfCorrelation,
)
from shd_torch.rivals.rival import ForwardPass, Rival, capture_model
from shd_torch.supervision.factored import Factored
from shd_torch.teacher import OnlineTeacher
from shd_torch.teacher.arguments import read_projections
from shd_torch.teacher.online import eval_mode
from shd_torch.teacher.squeeze import gram_tensor_from_qk

Pairs = tuple[tuple[int, int], ...]

_MERGES: dict[str, dict[str, Any]] = {
    "shd": {},
    "hard": {"strategy": "hard"},
    "constant": {"strategy": "constant"},
    "mean": {"strategy": "mean"},
    "as_printed": {"alpha_rule": "as_printed"},
}
_OTHERS: dict[str, tuple[type[Rival], dict[str, Any]]] = {
    "geometric_mean": (GeometricMean, {}),
    "mean_ce": (GeometricMean, {"all_heads": True}),
    "mse": (Divergence, {"divergence": "mse"}),
    "js": (Divergence, {"divergence": "js"}),
    "reverse_kl": (Divergence, {"divergence": "reverse_kl"}),
    "score_mse": (ScoreMse, {}),
    "sum_mse": (ScoreMse, {"sum_heads": True}),
    "relation_kl": (RelationKl, {}),
    "soft_alignment": (SoftAlignment, {}),
    "learned_alignment": (LearnedAlignment, {}),
    "linear_projector": (Projector, {}),
    "mlp_projector": (Projector, {"hidden_layer": True}),
    "orthogonal_projector": (OrthogonalProjector, {}),
    "self_correlation": (SelfCorrelation, {}),
    "attention_output": (AttentionOutput, {}),
    "attention_copy": (AttentionCopy, {}),
}
RIVALS: tuple[str, ...] = (*_MERGES, *_OTHERS)


def make_rival(
    name: str,
    teacher: nn.Module,
    student: nn.Module,
    batch: Mapping[str, Any],
    *,
    layer_pairs: Iterable[tuple[int, int]] | None = None,
    plan: Any = None,
    alpha_per: str = "map",
    temperature: float = 1.0,
    **options: Any,
) -> Rival:
    """A rival for this teacher and this student, ready to train.

    Args:
        name: one of ``RIVALS``.
        teacher: as for ``OnlineTeacher``.
        student: as for ``capture_attention``; its heads and layers are counted.
        batch: arguments of both models by name. Matched pairs are chosen on it, so it should have a few dozen
            samples.
        layer_pairs: ``(student layer, teacher layer)``, zero-based; default spread as ``layer_map`` does.
        plan: as in ``OnlineTeacher``, or ``"matched"``: pairs of least residual on the batch, for each layer (PLAN-9;
            needs networkx).
        alpha_per: ``"map"`` or ``"row"``.
        temperature: T_a of both maps, if the rival uses maps.
        **options: of the rival's class; ``targets`` and ``output_projections`` of ``OnlineTeacher``.

    Returns:
        The rival, a module on the student's device; pass its parameters, if any, to the optimizer.

    Raises:
        ShdError: ``argument-value``, ``heads-exceed``, ``layers-invalid``, ``capture-failed``,
            ``dependency-missing``, and what ``OnlineTeacher`` raises.
    """
    if name not in RIVALS:
        raise ShdError("argument-value", f"name must be one of {', '.join(RIVALS)}; got {name!r}")
    cls, own = (MergedMaps, {}) if name in _MERGES else _OTHERS[name]
    teacher_pass, own_pass = _look(teacher, batch, cls.reads_hidden), _look(student, batch, cls.reads_hidden)
    counts = teacher_pass.captured.num_calls, own_pass.captured.num_calls
    pairs = layer_map(*counts, None if layer_pairs is None else tuple(layer_pairs))
    heads = own_pass.captured.layer(pairs[0][0]).num_heads
    if plan == "matched":
        plan = _match(teacher, batch, pairs, heads, read_projections(options.get("output_projections")))
    squeezing = {key: options.pop(key) for key in ("targets", "output_projections") if key in options}
    online = OnlineTeacher(
        teacher, heads, pairs, plan=plan, alpha_per=alpha_per, **_MERGES.get(name, {}), **squeezing
    )
    if issubclass(cls, Projector | OrthogonalProjector):
        own = {**own, "widths": [_widths(cls, own_pass, teacher_pass, pair) for pair in pairs]}
    if cls is LearnedAlignment:
        own = {"heads": (heads, teacher_pass.captured.layer(pairs[0][1]).num_heads)}
    rival = cls(online, pairs, temperature=temperature, **own, **options)
    return rival.to(next(student.parameters()).device)


@torch.no_grad()
def _look(model: nn.Module, batch: Mapping[str, Any], hidden: bool) -> ForwardPass:
    """A forward pass in evaluation mode; modes are left as they were."""
    with eval_mode(model), capture_model(model, hidden=hidden) as forward_pass:
        model(**batch)
    return forward_pass


def _widths(cls: type[Rival], student: ForwardPass, teacher: ForwardPass, pair: tuple[int, int]) -> tuple[int, int]:
    """D_s and D_t of the features of a pair of layers."""
    pairs = []
    for forward_pass, layer in zip((student, teacher), pair, strict=True):
        if cls.reads_hidden:
            pairs.append(forward_pass.hidden[layer + 1].shape[-1])
        else:
            call = forward_pass.captured.layer(layer)
            assert call.value is not None
            pairs.append(call.num_heads * call.value.shape[-1])
    return pairs[0], pairs[1]


@torch.no_grad()
def _match(
    teacher: nn.Module, batch: Mapping[str, Any], pairs: Pairs, heads: int, projections: Mapping[int, torch.Tensor]
) -> dict[int, Any]:
    """Matched rounds of each teacher layer that is paired, by its number."""
    with eval_mode(teacher), record(teacher, values=True) as calls, ProjectionWatch(teacher) as watch:
        teacher(**batch)
    numbers = tuple(sorted({layer for _, layer in pairs}))
    captured = Captured(numbers)
    layers = number_layers(calls, teacher)
    captured.take(layers, grad_enabled=False)
    mask = batch.get("attention_mask")
    counted = mask.bool() if mask is not None and mask.ndim == 2 else None
    plans = {}
    for layer in numbers:
        call = captured.layer(layer)
        assert call.value is not None
        projection = watch.find(layer, layers[layer][0], projections).matrix(teacher).to(call.value.device)
        one = Factored.teacher(call.query, call.key, rule=call.rule)
        values = call.value[:, :, : call.key.shape[2]]
        gram = gram_tensor_from_qk(one, values, projection, query_mask=counted).sum(0)
        plans[layer] = merge_heads(gram.cpu().numpy(), heads, "matched", num_kv_heads=1).plan
    return plans
