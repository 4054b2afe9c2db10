"""Base losses that SHD is combined with, each with SHD added by one argument.

Formulas are those of the papers *and* of the published code; where they differ the code decides, because published
settings were tuned with it. Denominators differ up to a thousandfold, so that a beta does not carry over.

Every recipe gives ``Terms``: values and weights by name, and their sum ``total``. ``shd=SHD(captured, supervision,
beta=0.02)`` adds the attention term, from a cache or from live teachers. ``logits.py`` says what all take and raise;
``check=False`` leaves out validating the values, which costs a device sync. ``scale_report`` says what each term is
worth in the loss and in the gradient. Imports ``kd``, ``live`` and ``capture``; start with ``terms.py``.
"""

from shd_torch.recipes.diffusion import DiffusionDraw, diffusion, draw_diffusion, linear_betas, noised
from shd_torch.recipes.features import ViTKD
from shd_torch.recipes.logits import babyllama, cross_entropy, deit_hard, deit_soft, gkd, image_kd, language_kd, nkd
from shd_torch.recipes.minillm import Rollout, TeacherMixture, minillm_advantages, minillm_policy, minillm_rollout
from shd_torch.recipes.terms import SHD, ScaleReport, Term, Terms, scale_report

__all__ = [
    "SHD",
    "DiffusionDraw",
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
]
