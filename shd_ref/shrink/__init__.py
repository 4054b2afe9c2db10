"""A smaller student in closed form: pure float64 functions of arrays. Start with ``heads.py``.

Inputs are rows, so a projection is ``x @ W``; ``torch.nn.Linear`` stores the transpose, as ``ffn.py`` does.
"""

from shd_ref.shrink.align import align_output
from shd_ref.shrink.ffn import Linear, merge_linear, most_important, score_neurons
from shd_ref.shrink.heads import attend, concatenate_heads, low_rank_heads, mix_queries
from shd_ref.shrink.merges import HeadMerge, HeadWeights, Rotary, grouped_plan, merge_heads, pooled_mixing
from shd_ref.shrink.predictor import Predictor, best_split, choose_degree, cross_validate, fit_predictor
from shd_ref.shrink.student import read_student
from shd_ref.shrink.width import fold_norm, kept_layers, kept_scale, predictive_channels, principal_axes

__all__ = [
    "HeadMerge",
    "HeadWeights",
    "Linear",
    "Predictor",
    "Rotary",
    "align_output",
    "attend",
    "best_split",
    "choose_degree",
    "concatenate_heads",
    "cross_validate",
    "fit_predictor",
    "fold_norm",
    "grouped_plan",
    "kept_layers",
    "kept_scale",
    "low_rank_heads",
    "merge_heads",
    "merge_linear",
    "mix_queries",
    "most_important",
    "pooled_mixing",
    "predictive_channels",
    "principal_axes",
    "read_student",
    "score_neurons",
]
