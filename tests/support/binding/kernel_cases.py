"""Attention problems with awkward shapes, and what the reference makes of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.conformance import load_tolerances
from support.binding.twins import DTYPES

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One student layer, its teacher, and who may attend."""

    name: str
    length: int = 33
    keys: int | None = None
    width: int = 16
    teacher_width: int = 16
    groups: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))
    kv_heads: int = 2
    teacher_kv_heads: int = 4
    is_causal: bool = False
    window: int | None = None
    has_key_mask: bool = False
    temperature: float = 1.0
    has_sinks: bool = False
    dtype: str = "float32"
    batch: int = 1

    @cached_property
    def tensors(self) -> dict[str, Array]:
        rng = np.random.default_rng(len(self.name))
        num_keys = self.keys or self.length
        heads, teacher_heads = len(self.groups), sum(map(len, self.groups))

        def normal(*shape: int) -> Array:
            return (1.5 * rng.standard_normal(shape)).astype(DTYPES[self.dtype])

        return {
            "student_q": normal(self.batch, heads, self.length, self.width),
            "student_k": normal(self.batch, self.kv_heads, num_keys, self.width),
            "teacher_q": normal(self.batch, teacher_heads, self.length, self.teacher_width),
            "teacher_k": normal(self.batch, self.teacher_kv_heads, num_keys, self.teacher_width),
        }

    @cached_property
    def mixing(self) -> Array:
        """Random convex weights within each group."""
        rng = np.random.default_rng(1)
        mixing = np.zeros((self.batch, len(self.groups), sum(map(len, self.groups))))
        for head, group in enumerate(self.groups):
            weights = rng.random((self.batch, len(group))) + 0.1
            mixing[:, head, list(group)] = weights / weights.sum(1, keepdims=True)
        return mixing

    @cached_property
    def row_mass(self) -> Array:
        """What sinks leave of the teacher's rows ``(B, H_t, L)``."""
        shape = (self.batch, sum(map(len, self.groups)), self.length)
        return np.random.default_rng(4).uniform(0.2, 0.9, shape) if self.has_sinks else np.ones(shape)

    @cached_property
    def key_mask(self) -> Array | None:
        """Padding on both sides: with causality the first rows may attend to nothing."""
        if not self.has_key_mask:
            return None
        mask = np.random.default_rng(2).random((self.batch, self.keys or self.length)) > 0.2
        mask[:, :3] = False
        mask[:, 5] = True
        return mask

    @cached_property
    def attn_mask(self) -> Array:
        i, j = np.arange(self.length)[:, None], np.arange(self.keys or self.length)[None, :]
        allowed = np.ones((self.batch, 1, i.shape[0], j.shape[1]), dtype=bool)
        if self.is_causal:
            allowed &= j <= i
        if self.window is not None:
            allowed &= abs(i - j) < self.window
        if self.key_mask is not None:
            allowed &= self.key_mask[:, None, None, :]
        return allowed

    @cached_property
    def loss_mask(self) -> Array:
        mask = np.random.default_rng(3).random((self.batch, self.length)) > 0.25
        mask[:, -1] = True
        return mask

    @cached_property
    def supervision(self) -> Array:
        probs = shd_ref.softmax(
            logits(self.tensors["teacher_q"], self.tensors["teacher_k"]), self.attn_mask, temperature=self.temperature
        )
        return shd_ref.mix_heads(probs * self.row_mass[..., None], self.mixing)

    def expect(self, supervision: Array) -> tuple[float, Array, Array, Array]:
        """The reference's loss, dq and dk, and the row weights that they were made with."""
        options = self.loss_options
        queries, keys = self.tensors["student_q"].astype(np.float64), self.tensors["student_k"].astype(np.float64)
        value = shd_ref.shd_loss(supervision, logits(queries, keys), **options)
        dq, dk = shd_ref.shd_loss_gradient_qk(supervision, queries, keys, scale=scale_of(queries), **options)
        counted = (supervision.sum(-1) > 0) & self.loss_mask[:, None]
        weights = counted / np.maximum(counted.sum((0, 2), keepdims=True), 1)
        return value, np.asarray(dq), np.asarray(dk), weights.astype(np.float32)

    @property
    def loss_options(self) -> dict[str, Any]:
        return {
            "attn_mask": self.attn_mask,
            "loss_mask": self.loss_mask,
            "temperature": self.temperature,
            "row_sums": "at_most_one" if self.has_sinks else "one",
        }


def scale_of(queries: Array) -> float:
    return float(queries.shape[-1] ** -0.5)


def logits(queries: Array, keys: Array) -> Array:
    """Scaled logits in float64; query head h reads key head ``h // (H / H_kv)``."""
    keys = np.repeat(keys.astype(np.float64), queries.shape[1] // keys.shape[1], axis=1)
    return scale_of(queries) * (queries.astype(np.float64) @ keys.swapaxes(-1, -2))


def assert_gradient(actual: Array, expected: Array, dtype: str, name: str) -> None:
    """Within the published tolerance entry by entry, and within the kernels' as a whole."""
    tolerances = load_tolerances()
    np.testing.assert_allclose(actual, expected, **tolerances["agreement"][dtype]["gradient"], err_msg=name)
    assert relative_error(actual, expected) <= tolerances["kernels"]["gradient"][dtype], name


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def assert_value(actual: float, expected: float, dtype: str) -> None:
    np.testing.assert_allclose(actual, expected, **load_tolerances()["agreement"][dtype]["loss"], err_msg="loss")
