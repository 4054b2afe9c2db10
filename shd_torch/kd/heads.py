"""A teacher's last states with its head: targets over the whole vocabulary, a chunk of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from shd_ref.cache import CacheReader, Exact, FinalNorm
from shd_ref.errors import need
from shd_torch.checks import check_real, check_shapes, compute_dtype
from shd_torch.kd.targets import check_classes, check_rows, cut_teacher, row_chunks

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """What makes a teacher's logits of its last states: ``cap(scale * W norm(h) + bias)`` (CACHE-190).

    Attributes:
        weight: W ``(V, D)``, in the dtype that it is stored in; products are in that of the states, at least float32.
        bias: ``(V,)`` or None, added after the scale.
        scale: factor of the product.
        soft_cap: c of ``c tanh(u / c)``, or None.
        norm: the final norm, where states come before it.
        norm_weight, norm_bias: of that norm, ``(D,)``.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    norm: FinalNorm | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None

    @classmethod
    def read(cls, cache: CacheReader | str | Path) -> Self:
        """The head that a cache of ``shd precompute --hidden last`` holds, checked, in host memory.

        Raises:
            ShdError: ``argument-value`` for a cache without; ``cache-incomplete``, ``cache-corrupt``.
        """
        reader = cache if isinstance(cache, CacheReader) else CacheReader(cache)
        form = reader.manifest.need(Exact, "exact targets")
        data = torch.from_numpy(reader.read_file(form.files[0]))
        tensors = {
            name: data[start:end].view(_DTYPES[dtype]).view(shape)
            for name, (dtype, shape, start, end) in form.head_layout.items()
        }
        norm = tensors.get("norm.weight"), tensors.get("norm.bias")
        head = form.head
        return cls(tensors["weight"], tensors.get("bias"), head.scale, head.soft_cap, head.norm, *norm)

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""
        fields: dict[str, Any] = vars(self)
        on_device: dict[str, Any] = {
            name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)
        }
        return replace(self, **on_device)

    def cut(self, size: int) -> Self:
        return replace(self, weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``(R, V)`` of states ``(R, D)``, float64 if these are, else float32."""
        dtype = compute_dtype(states)
        hidden = self._normed(states.to(dtype))
        if self.weight.dtype == dtype:
            logits = hidden @ self.weight.mT
        else:  # some classes of a narrow matrix are widened at a time
            logits = hidden.new_empty((len(hidden), len(self.weight)))
            for classes in row_chunks(len(self.weight), self.weight.shape[1], self.weight.device, None):
                torch.matmul(hidden, self.weight[classes].to(dtype).mT, out=logits[:, classes])
        if self.scale != 1.0:
            logits *= self.scale
        if self.bias is not None:
            logits += self.bias.to(dtype)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def _normed(self, hidden: Tensor) -> Tensor:
        if self.norm is None or self.norm_weight is None:
            return hidden
        shape, weight = hidden.shape[-1:], self.norm_weight.to(hidden.dtype)
        if self.norm.kind == "rms":
            return F.rms_norm(hidden, shape, weight, self.norm.epsilon)
        bias = None if self.norm_bias is None else self.norm_bias.to(hidden.dtype)
        return F.layer_norm(hidden, shape, weight, bias, self.norm.epsilon)


class ExactTargets(NamedTuple):
    """The teacher's last states and the head that reads them: the targets of ``kd_loss`` without its logits."""

    hidden: Tensor  # (..., D_t)
    head: TeacherHead

    def rows(self, at: slice | Tensor) -> Tensor:
        """The logits of some rows, of states ``(R, D_t)``."""
        return self.head.logits(self.hidden[at])


def check_exact(
    targets: ExactTargets,
    rows: tuple[int, ...],
    num_classes: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: Any,
    temperature: float,
) -> ExactTargets:
    """The targets of ``num_classes`` classes with their rows flattened, on the student's device."""
    hidden, head = targets
    check_rows(hidden, "hidden of the targets", check=options.check)
    check_real(head.weight, "weight of the teacher's head", check=False, ndim=2)
    rule = f"hidden of the targets must be {rows} and the width of the teacher's head"
    fits = tuple(hidden.shape[:-1]) == rows and hidden.shape[-1] == head.weight.shape[1]
    check_shapes(fits, rule, hidden, head.weight)
    own = head.weight.device
    need(own == device, "argument-value", "the teacher's head", f"be on {device}", own)
    states = hidden.detach().flatten(0, len(rows) - 1).to(device)
    # A wide student's loss is that of the same logits in its own dtype.
    states = states.to(torch.promote_types(compute_dtype(states), dtype))
    given, size = len(head.weight), options.vocab_size
    if num_classes > given or size is None:
        check_classes("the teacher's head", given, num_classes)
    if num_classes < given and options.check:
        counted = None if options.loss_mask is None else options.loss_mask.reshape(-1).to(device)
        for chunk in row_chunks(len(states), given, device, options.chunk_rows):
            chunk_mask = None if counted is None else counted[chunk]
            cut_teacher(head.logits(states[chunk]), size, temperature, check=True, counted=chunk_mask)
    return ExactTargets(states, head.cut(num_classes) if num_classes < given else head)
