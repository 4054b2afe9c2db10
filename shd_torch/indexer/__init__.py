"""Indexers of sparse attention: their loss from queries and keys, and what their selection keeps (spec chapter IDX).

``request.py`` cuts scorer and teacher into tiles; ``loss.py`` holds ``indexer_kl`` and what a selection keeps of the
teacher's attention, and ``capture.py`` reads scorers of live models.
"""

from shd_torch.indexer.capture import ScorerCall, capture_indexers
from shd_torch.indexer.loss import KeptMass, Span, indexer_kl, probe_indexer
from shd_torch.indexer.request import indexer_scores, indexer_select

__all__ = [
    "KeptMass",
    "ScorerCall",
    "Span",
    "capture_indexers",
    "indexer_kl",
    "indexer_scores",
    "indexer_select",
    "probe_indexer",
]
