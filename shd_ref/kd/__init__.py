"""Sparse targets of logits and their bytes. Imports the reference; lies below the cache."""

from shd_ref.kd.codes import TopkTargets

__all__ = ["TopkTargets"]
