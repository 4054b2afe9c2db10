"""Students and teachers as queries and keys, with what the float64 reference says of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import shd_ref
from shd_torch.supervision import Factored

Array = NDArray[np.float64]


@dataclass(frozen=True)
class KlCase:
    """Arrays of one layer; what a mask is called is what ``attention_kl`` calls it."""

    queries: Array
    keys: Array
    teacher_queries: Array
    teacher_keys: Array
    mixing: Array
    masks: dict[str, Any] = field(default_factory=dict)
    teacher_masks: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] | None = None
    row_mass: Array | None = None
    temperature: float = 1.0
    loss_mask: NDArray[np.bool_] | None = None
    beta: float = 1.5
    reduction: str = "sum"

    @property
    def scale(self) -> float:
        return float(self.queries.shape[3] ** -0.5)

    def supervision(self, dtype: torch.dtype) -> Factored:
        return Factored(
            _tensor(self.teacher_queries, dtype),
            _tensor(self.teacher_keys, dtype),
            _tensor(self.mixing, torch.promote_types(dtype, torch.float32)),
            groups=self.groups,
            row_mass=None if self.row_mass is None else _tensor(self.row_mass, torch.float64),
            **{name: _tensor(value, torch.float64) for name, value in self.teacher_masks.items()},
        )

    def student(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return _tensor(self.queries, dtype).requires_grad_(), _tensor(self.keys, dtype).requires_grad_()

    def options(self) -> dict[str, Any]:
        masks = {name: _tensor(value, torch.float64) for name, value in self.masks.items()}
        mask = None if self.loss_mask is None else torch.from_numpy(self.loss_mask)
        return {
            "temperature": self.temperature,
            "beta": self.beta,
            "reduction": self.reduction,
            "loss_mask": mask,
            **masks,
        }

    def maps(self) -> Array:
        """The reference's merged maps."""
        logits, allowed = _logits(self.teacher_queries, self.teacher_keys, self.teacher_masks)
        probs = shd_ref.softmax(logits, allowed, temperature=self.temperature)
        if self.row_mass is not None:
            probs = probs * self.row_mass[..., None]
        return np.asarray(shd_ref.mix_heads(probs, self.mixing))

    def expected(self, maps: Array | None = None) -> tuple[float, Array, Array]:
        """The reference's loss and its gradients for queries and keys, from its own merged maps or others."""
        logits, allowed = _logits(self.queries, self.keys, self.masks)
        keywords: dict[str, Any] = {
            "beta": self.beta,
            "temperature": self.temperature,
            "reduction": self.reduction,
            "loss_mask": self.loss_mask,
            "attn_mask": allowed,
            "row_sums": "one" if self.row_mass is None else "at_most_one",
        }
        maps = self.maps() if maps is None else maps
        value = float(shd_ref.shd_loss(maps, logits, **keywords))
        mask = self.masks.get("attn_mask")
        added = "softcap" in self.masks if mask is None else mask.dtype != np.bool_
        if not added:
            dq, dk = shd_ref.shd_loss_gradient_qk(maps, self.queries, self.keys, scale=self.scale, **keywords)
            return value, np.asarray(dq), np.asarray(dk)
        dz = np.asarray(shd_ref.shd_loss_gradient(maps, logits, **keywords))
        if "softcap" in self.masks:
            capped = _logits(self.queries, self.keys, {"softcap": self.masks["softcap"]})[0]
            dz = dz * (1 - (capped / self.masks["softcap"]) ** 2)
        read = np.repeat(self.keys, self.queries.shape[1] // self.keys.shape[1], axis=1)
        dk = self.scale * (dz.swapaxes(-1, -2) @ self.queries)
        batch, heads, size, width = self.keys.shape
        return value, self.scale * (dz @ read), dk.reshape(batch, heads, -1, size, width).sum(2)


def make_case(
    rows: int = 63,
    keys: int | None = None,
    *,
    batch: int = 2,
    student_heads: int = 2,
    key_heads: int = 1,
    teacher_heads: int = 5,
    teacher_key_heads: int | None = None,
    width: int = 40,
    teacher_width: int = 24,
    grouped: bool = False,
    groups: tuple[tuple[int, ...], ...] | None = None,
    sharpness: float = 1.0,
    dtype: str = "float64",
    seed: int = 0,
    **changes: Any,
) -> KlCase:
    """A case whose numbers the dtype holds exactly."""
    rng = np.random.default_rng(seed)
    keys = rows if keys is None else keys

    def draw(*shape: int) -> Array:
        drawn = torch.from_numpy(sharpness**0.5 * rng.standard_normal(shape)).to(getattr(torch, dtype))
        return drawn.double().numpy()

    mixing = rng.random((batch, student_heads, teacher_heads))
    if grouped:
        groups = shd_ref.plan_groups(shd_ref.merge_plan(teacher_heads, student_heads, "balanced"), teacher_heads)
    if groups is not None:
        outside = np.ones((student_heads, teacher_heads), dtype=np.bool_)
        for head, group in enumerate(groups):
            outside[head, list(group)] = False
        mixing[:, outside] = 0.0
    return KlCase(
        draw(batch, student_heads, rows, width),
        draw(batch, key_heads, keys, width),
        draw(batch, teacher_heads, rows, teacher_width),
        draw(batch, teacher_key_heads or teacher_heads, keys, teacher_width),
        mixing / mixing.sum(2, keepdims=True),
        groups=groups,
        **changes,
    )


def _logits(queries: Array, keys: Array, masks: dict[str, Any]) -> tuple[Array, NDArray[np.bool_]]:
    """Scaled logits with what is added to them, and who may attend, in plain NumPy."""
    read = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = queries.shape[3] ** -0.5 * (queries @ read.swapaxes(-1, -2))
    if "softcap" in masks:
        logits = masks["softcap"] * np.tanh(logits / masks["softcap"])
    i, j = np.arange(logits.shape[2])[:, None], np.arange(logits.shape[3])[None, :]
    allowed = np.ones(logits.shape, dtype=np.bool_)
    if masks.get("is_causal"):
        allowed &= j <= i
    if "window" in masks:
        allowed &= (i - j < masks["window"]) & (j - i < masks["window"])
    mask = masks.get("attn_mask")
    if mask is not None and mask.dtype == np.bool_:
        allowed &= mask
    elif mask is not None:
        allowed &= mask > -np.inf
        logits = logits + np.where(np.isneginf(mask), 0.0, mask)
    return logits, allowed


def _tensor(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value.copy())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
