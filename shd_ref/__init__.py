"""Squeezing-Heads Distillation: the reference, in float64 NumPy.

Each module is one chapter of ``specs/shd.md``. The reference defines what every other implementation must
compute; ``shd_ref.teacher`` and ``shd_ref.cache`` are tools built on it.
"""

from shd_ref.alpha import solve_alpha
from shd_ref.attention import soften, softmax, value_outputs
from shd_ref.errors import ERROR_CODES, ShdError
from shd_ref.layers import layer_map
from shd_ref.loss import shd_loss
from shd_ref.mixing import SqueezeResult, compose_mixing, mix_heads, squeeze_heads
from shd_ref.plans import MergePlan, merge_plan, plan_groups

__version__ = "0.1.0"
SPEC_VERSION = "0.1"

__all__ = [
    "ERROR_CODES",
    "SPEC_VERSION",
    "MergePlan",
    "ShdError",
    "SqueezeResult",
    "__version__",
    "compose_mixing",
    "layer_map",
    "merge_plan",
    "mix_heads",
    "plan_groups",
    "shd_loss",
    "soften",
    "softmax",
    "solve_alpha",
    "squeeze_heads",
    "value_outputs",
]
