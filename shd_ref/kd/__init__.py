"""Sparse targets of a teacher's logits (``specs/kd.md``): ``records`` are they, and ``codes`` turns rows into bytes.

The losses on them are ``shd_torch.kd``. Imports the reference; lies below the cache.
"""

from shd_ref.kd.codes import SampledTargets, TopkTargets

__all__ = ["SampledTargets", "TopkTargets"]
