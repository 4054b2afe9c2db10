"""Base losses that SHD is combined with (``specs/recipes.md``): the reference, in float64 NumPy.

A recipe gives terms by name, each with a value and a weight; ``total`` is its loss. Imports ``kd``; start with
``terms.py``.
"""

from shd_ref.recipes.babyllama import babyllama
from shd_ref.recipes.cross_entropy import cross_entropy
from shd_ref.recipes.deit import deit_hard, deit_soft
from shd_ref.recipes.diffusion import diffusion, linear_betas, noised
from shd_ref.recipes.gkd import gkd
from shd_ref.recipes.kd import image_kd, language_kd
from shd_ref.recipes.minillm import Rollout, minillm_advantages, minillm_policy, minillm_rollout
from shd_ref.recipes.nkd import nkd
from shd_ref.recipes.terms import Term, Terms, total
from shd_ref.recipes.vitkd import vitkd
from shd_ref.recipes.vkd import vkd, vkd_detection

__all__ = [
    "Rollout",
    "Term",
    "Terms",
    "babyllama",
    "cross_entropy",
    "deit_hard",
    "deit_soft",
    "diffusion",
    "gkd",
    "image_kd",
    "language_kd",
    "linear_betas",
    "minillm_advantages",
    "minillm_policy",
    "minillm_rollout",
    "nkd",
    "noised",
    "total",
    "vitkd",
    "vkd",
    "vkd_detection",
]
