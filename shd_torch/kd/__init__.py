"""Losses on logits, without a wide copy of them, on hidden states and on embeddings.

``targets.py`` makes targets of a teacher. ``chunks.py`` checks all arguments and goes over the rows in chunks, each
of which has its divergence and slope. ``embeddings.py`` pools and compares texts. Liger has fused losses of this kind
for a live teacher's hidden states and, for given targets, of whole rows alone (without ``T^2``, and a smaller
vocabulary padded with zeros): nothing that takes a tail, so none is used.
"""

from shd_torch.kd.chunks import hidden_loss, kd_loss, linear_kd_loss
from shd_torch.kd.embeddings import EmbeddingAgreement, compare_embeddings, embedding_loss, pool_states
from shd_torch.kd.targets import ExactTargets, TeacherHead, kd_targets_topk, mean_logits
from shd_torch.supervision.supervision import TopkTargets

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
