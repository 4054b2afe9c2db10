"""Indexers of sparse attention: their loss from queries and keys, and what their selection keeps (spec chapter IDX).

``request.py`` checks a scorer and its teachers and cuts them into tiles of rows; ``loss.py`` goes over the tiles: the
loss ``indexer_kl``, and ``probe_indexer``, the part of the teacher's attention that a selection keeps.
"""

from shd_torch.indexer.loss import KeptMass, Span, indexer_kl, probe_indexer
from shd_torch.indexer.request import indexer_scores, indexer_select

__all__ = ["KeptMass", "Span", "indexer_kl", "indexer_scores", "indexer_select", "probe_indexer"]
