"""The mathematics on attention maps, under the names of ``shd_ref``: one file a chapter of the specification.

Written independently of ``shd_ref``, from which only shape arithmetic and errors come. Start with ``mixing.py``.
``import shd_torch.maps as shd`` replaces ``import shd_ref as shd``, on tensors: arguments and errors are those of the
functions there. ``check=False`` leaves out validating the values, which costs a device sync.

The judge takes this module as it is: ``python -m shd_ref.conformance --impl shd_torch.maps`` judges it on the CPU, or
on the device that the environment variable ``SHD_TORCH_DEVICE`` names.
"""

from collections.abc import Mapping
from typing import Any

from shd_ref.errors import ERROR_CODES, ShdError
from shd_ref.layers import layer_map
from shd_ref.merging.plans import MergePlan, merge_plan, plan_groups
from shd_torch.maps.alpha import gram_tensor, merge_gram, solve_alpha, solve_alpha_from_gram
from shd_torch.maps.attention import soften, softmax, value_outputs
from shd_torch.maps.loss import shd_loss, shd_loss_gradient, shd_loss_gradient_qk
from shd_torch.maps.mixing import SqueezeResult, compose_mixing, mix_heads, squeeze_heads
from shd_torch.maps.support import (
    AlignedMaps,
    IntersectedMaps,
    align_tokens,
    id_groups,
    intersect_support,
    pool_tokens,
)

__all__ = [
    "ERROR_CODES",
    "AlignedMaps",
    "IntersectedMaps",
    "MergePlan",
    "ShdError",
    "SqueezeResult",
    "align_tokens",
    "compose_mixing",
    "gram_tensor",
    "id_groups",
    "intersect_support",
    "layer_map",
    "merge_gram",
    "merge_plan",
    "mix_heads",
    "plan_groups",
    "pool_tokens",
    "shd_loss",
    "shd_loss_gradient",
    "shd_loss_gradient_qk",
    "soften",
    "softmax",
    "solve_alpha",
    "solve_alpha_from_gram",
    "squeeze_heads",
    "value_outputs",
]


def run_operation(operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
    """One operation as the judge calls it, on arrays; see ``maps/judged.py``."""
    from shd_torch.maps.judged import Adapter

    return Adapter().run_operation(operation, inputs, dtype)
