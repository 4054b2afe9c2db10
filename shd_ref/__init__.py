"""Squeezing-Heads Distillation: the reference, in float64 NumPy.

Each module, here and in ``merging``, is one chapter of ``specs/shd.md``. The reference defines what every other
implementation must compute; ``shd_ref.teacher`` and ``shd_ref.cache`` are tools built on it. Calling ``diagnose``
(scipy) or ``matched_plan`` (networkx) needs the extra ``oracles``; all else, and the import, needs numpy alone.
"""

from shd_ref.attention import soften, softmax, value_outputs
from shd_ref.errors import ERROR_CODES, ShdError
from shd_ref.indexer import indexer_loss, indexer_loss_gradient, indexer_target
from shd_ref.layers import layer_map
from shd_ref.loss import shd_loss, shd_loss_gradient, shd_loss_gradient_qk
from shd_ref.merging.alpha import solve_alpha
from shd_ref.merging.gram import gram_tensor, merge_gram, solve_alpha_from_gram
from shd_ref.merging.matching import matched_plan
from shd_ref.merging.mixing import SqueezeResult, compose_mixing, mix_heads, squeeze_heads
from shd_ref.merging.oracles import Diagnosis, StrategyReport, diagnose
from shd_ref.merging.plans import MergePlan, merge_plan, plan_groups
from shd_ref.support import IntersectedMaps, intersect_support
from shd_ref.tokens import AlignedMaps, align_tokens, id_groups, patch_groups, pool_tokens, span_groups

__version__ = "0.1.0"
SPEC_VERSION = "1.0"

__all__ = [
    "ERROR_CODES",
    "SPEC_VERSION",
    "AlignedMaps",
    "Diagnosis",
    "IntersectedMaps",
    "MergePlan",
    "ShdError",
    "SqueezeResult",
    "StrategyReport",
    "__version__",
    "align_tokens",
    "compose_mixing",
    "diagnose",
    "gram_tensor",
    "id_groups",
    "indexer_loss",
    "indexer_loss_gradient",
    "indexer_target",
    "intersect_support",
    "layer_map",
    "matched_plan",
    "merge_gram",
    "merge_plan",
    "mix_heads",
    "patch_groups",
    "plan_groups",
    "pool_tokens",
    "shd_loss",
    "shd_loss_gradient",
    "shd_loss_gradient_qk",
    "soften",
    "softmax",
    "solve_alpha",
    "solve_alpha_from_gram",
    "span_groups",
    "squeeze_heads",
    "value_outputs",
]
