"""Base losses that SHD is combined with (``specs/recipes.md``), each with SHD beside it by one argument.

Every recipe gives ``Terms``: values and weights by name, and their sum ``total``. ``shd=SHD(captured, taught,
beta=0.02)`` adds the attention term, from a cache or from live teachers; ``scale_report`` says what each term is
worth in the loss and in the gradient. Imports ``kd``, ``teacher`` and ``capture``; start with ``terms.py``.
"""

from shd_torch.recipes.babyllama import babyllama
from shd_torch.recipes.cross_entropy import cross_entropy
from shd_torch.recipes.deit import deit_hard, deit_soft
from shd_torch.recipes.diffusion import DiffusionDraw, diffusion, draw_diffusion, linear_betas, noised
from shd_torch.recipes.gkd import gkd
from shd_torch.recipes.kd import image_kd, language_kd
from shd_torch.recipes.minillm import Rollout, minillm_advantages, minillm_policy, minillm_rollout
from shd_torch.recipes.mixed_sampling import TeacherMixture
from shd_torch.recipes.nkd import nkd
from shd_torch.recipes.scale import ScaleReport, scale_report
from shd_torch.recipes.terms import SHD, Term, Terms
from shd_torch.recipes.vitkd import ViTKD
from shd_torch.recipes.vkd import OrthogonalProjection, vkd, vkd_detection

__all__ = [
    "SHD",
    "DiffusionDraw",
    "OrthogonalProjection",
    "Rollout",
    "ScaleReport",
    "TeacherMixture",
    "Term",
    "Terms",
    "ViTKD",
    "babyllama",
    "cross_entropy",
    "deit_hard",
    "deit_soft",
    "diffusion",
    "draw_diffusion",
    "gkd",
    "image_kd",
    "language_kd",
    "linear_betas",
    "minillm_advantages",
    "minillm_policy",
    "minillm_rollout",
    "nkd",
    "noised",
    "scale_report",
    "vkd",
    "vkd_detection",
]
