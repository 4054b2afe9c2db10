"""Distillation of logits and hidden states, without a wide copy of the logits; of embeddings.

The computation goes over rows in chunks. Liger has fused losses of this kind for a live teacher's hidden states and,
for given targets, of whole rows alone (without ``T^2``, and a smaller vocabulary padded with zeros): nothing that
takes a tail, so that none of it is used here. Imports ``maps``, ``supervision.targets`` and ``kl.gradient``;
start with ``loss.py``.
"""

from shd_torch.kd.embeddings import EmbeddingAgreement, compare_embeddings, embedding_loss, pool_states
from shd_torch.kd.heads import ExactTargets, TeacherHead
from shd_torch.kd.loss import hidden_loss, kd_loss, linear_kd_loss
from shd_torch.kd.targets import kd_targets_topk, mean_logits
from shd_torch.supervision.targets import TopkTargets

__all__ = [
    "EmbeddingAgreement",
    "ExactTargets",
    "TeacherHead",
    "TopkTargets",
    "compare_embeddings",
    "embedding_loss",
    "hidden_loss",
    "kd_loss",
    "kd_targets_topk",
    "linear_kd_loss",
    "mean_logits",
    "pool_states",
]
