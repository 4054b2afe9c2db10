"""Distillation of logits and hidden states (``specs/kd.md``): the reference, in float64 NumPy.

Targets are a teacher's logits, their top k with the mass of the rest, or classes that were drawn from them; ``codes``
turns the latter two into bytes and back. Imports the reference; start with ``loss.py``.
"""

from shd_ref.kd.gradients import kd_loss_gradient, linear_kd_loss_gradient
from shd_ref.kd.hidden import hidden_loss, hidden_loss_gradient
from shd_ref.kd.loss import kd_loss, linear_kd_loss
from shd_ref.kd.records import SampledTargets, TopkTargets
from shd_ref.kd.targets import (
    kd_targets_sampled,
    kd_targets_topk,
    mean_logits,
    systematic_uniforms,
)

__all__ = [
    "SampledTargets",
    "TopkTargets",
    "hidden_loss",
    "hidden_loss_gradient",
    "kd_loss",
    "kd_loss_gradient",
    "kd_targets_sampled",
    "kd_targets_topk",
    "linear_kd_loss",
    "linear_kd_loss_gradient",
    "mean_logits",
    "systematic_uniforms",
]
