"""Attention problems with awkward shapes, for the kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance import load_tolerances
from support.binding.kl_cases import KlCase, make_case
from support.binding.twins import DTYPES

Array = NDArray[Any]


@dataclass(frozen=True)
class Case(KlCase):
    """One student layer, its teacher, and who may attend."""

    name: str = ""
    dtype: str = "float32"

    def array(self, field: str) -> Array:
        """Queries or keys in the case's dtype, which holds them exactly."""
        held: Array = getattr(self, field).astype(DTYPES[self.dtype])
        return held

    @property
    def weights(self) -> Array:
        """Of each row in the loss ``(B, H_s, L)``."""
        counted = (self.maps().sum(-1) > 0) & np.asarray(self.loss_mask)[:, None]
        return np.asarray(counted / np.maximum(counted.sum((0, 2), keepdims=True), 1), np.float32)


def kernel_case(
    name: str,
    length: int,
    keys: int | None = None,
    width: int = 16,
    teacher_width: int = 16,
    *,
    groups: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    key_heads: int = 2,
    teacher_key_heads: int = 4,
    padded: bool = False,
    sinks: bool = False,
    temperature: float = 1.0,
    dtype: str = "float32",
    batch: int = 1,
    **masks: Any,
) -> Case:
    """Keys are padded on both sides: with causality the first rows may attend to nothing."""
    heads, draw = sum(map(len, groups)), np.random.default_rng(2)
    if padded:
        masks["attn_mask"] = draw.random((batch, 1, 1, keys or length)) > 0.2
        masks["attn_mask"][..., :3] = False
        masks["attn_mask"][..., 5] = True
    counted = draw.random((batch, length)) > 0.25
    counted[:, -1] = True
    case = make_case(
        length,
        keys,
        batch=batch,
        student_heads=len(groups),
        key_heads=key_heads,
        teacher_heads=heads,
        teacher_key_heads=teacher_key_heads,
        width=width,
        teacher_width=teacher_width,
        groups=groups,
        sharpness=2.25,
        dtype=dtype,
        seed=len(name),
        masks=masks,
        teacher_masks=masks,
        row_mass=draw.uniform(0.2, 0.9, (batch, heads, length)) if sinks else None,
        temperature=temperature,
        loss_mask=counted,
        beta=1.0,
    )
    return Case(**vars(case), name=name, dtype=dtype)


def assert_gradient(actual: Array, expected: Array, dtype: str, name: str) -> None:
    """Within the published tolerance entry by entry, and within the kernels' as a whole."""
    tolerances = load_tolerances()
    np.testing.assert_allclose(actual, expected, **tolerances["agreement"][dtype]["gradient"], err_msg=name)
    assert relative_error(actual, expected) <= tolerances["kernels"]["gradient"][dtype], name


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
