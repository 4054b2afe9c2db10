"""Squeezing-Heads Distillation in PyTorch: the mathematics on any device, capture and export.

The functions have the names, arguments and errors of ``shd_ref`` and are written independently of it: that
they agree is what the tests judge.
"""

try:
    import torch as _torch  # noqa: F401  (a missing PyTorch is said once, here, with the remedy)
except ImportError as error:
    raise ImportError("shd_torch needs PyTorch: pip install 'squeezing-heads[torch]'") from error

from shd_ref.errors import ERROR_CODES, ShdError
from shd_ref.layers import layer_map
from shd_ref.plans import MergePlan, merge_plan, plan_groups
from shd_torch.capture.call import AttentionCall
from shd_torch.capture.capture import (
    AttentionCapture,
    Captured,
    capture_attention,
    record_attention,
    record_query_key,
)
from shd_torch.data.dataset import CodedSupervision, SupervisedDataset, check_cache
from shd_torch.data.stream import SupervisedStream
from shd_torch.export import ExportReport, export_teacher, load_hf_model
from shd_torch.kd import (
    SampledTargets,
    TopkTargets,
    hidden_loss,
    kd_loss,
    kd_targets_sampled,
    kd_targets_topk,
    linear_kd_loss,
    mean_logits,
)
from shd_torch.kl.loss import attention_kl, explain_backend
from shd_torch.maps.alpha import solve_alpha
from shd_torch.maps.attention import soften, softmax, value_outputs
from shd_torch.maps.gradients import shd_loss_gradient, shd_loss_gradient_qk
from shd_torch.maps.gram import gram_tensor, merge_gram, solve_alpha_from_gram
from shd_torch.maps.loss import shd_loss
from shd_torch.maps.mixing import SqueezeResult, compose_mixing, mix_heads, squeeze_heads
from shd_torch.maps.support import IntersectedMaps, intersect_support
from shd_torch.maps.tokens import AlignedMaps, align_tokens
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.factored_codes import FactoredCodes
from shd_torch.supervision.supervision import Dense, Supervision
from shd_torch.teacher.gram import gram_tensor_from_qk
from shd_torch.teacher.online import OnlineSupervision, OnlineTeacher, layer_kls
from shd_torch.teacher.squeeze import FactoredSqueeze, squeeze_factored
from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.shares import batch_share

__all__ = [
    "ERROR_CODES",
    "AlignedMaps",
    "AttentionCall",
    "AttentionCapture",
    "BetaSchedule",
    "Captured",
    "Coded",
    "CodedSupervision",
    "Dense",
    "ExportReport",
    "Factored",
    "FactoredCodes",
    "FactoredSqueeze",
    "IntersectedMaps",
    "LossBalancer",
    "MergePlan",
    "OnlineSupervision",
    "OnlineTeacher",
    "SampledTargets",
    "ShdError",
    "SqueezeResult",
    "SupervisedDataset",
    "SupervisedStream",
    "Supervision",
    "TopkTargets",
    "align_tokens",
    "attention_kl",
    "batch_share",
    "capture_attention",
    "check_cache",
    "compose_mixing",
    "explain_backend",
    "export_teacher",
    "gram_tensor",
    "gram_tensor_from_qk",
    "hidden_loss",
    "intersect_support",
    "kd_loss",
    "kd_targets_sampled",
    "kd_targets_topk",
    "layer_kls",
    "layer_map",
    "linear_kd_loss",
    "load_hf_model",
    "mean_logits",
    "merge_gram",
    "merge_plan",
    "mix_heads",
    "plan_groups",
    "record_attention",
    "record_query_key",
    "shd_loss",
    "shd_loss_gradient",
    "shd_loss_gradient_qk",
    "soften",
    "softmax",
    "solve_alpha",
    "solve_alpha_from_gram",
    "squeeze_factored",
    "squeeze_heads",
    "value_outputs",
]
