"""The teacher's side of the loss on logits: making targets of its logits, or of its last states and its head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from shd_ref.cache import CacheReader, Exact, FinalNorm
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer
from shd_ref.tolerances import load_tolerances
from shd_torch.checks import check_real, check_shapes, check_temperature, compute_dtype, without_autocast
from shd_torch.supervision.supervision import TopkTargets

_ENTRIES = {"cpu": 1 << 22}  # 16 MiB of float32: larger chunks leave a processor's cache between their passes
_ENTRIES_OF_A_DEVICE = 1 << 26  # 256 MiB of float32: products large enough for a GPU
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def row_chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices over rows of ``width`` numbers, each of what a device is given at once."""
    size = max(_ENTRIES.get(device.type, _ENTRIES_OF_A_DEVICE) // max(width, 1), 1)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def check_rows(value: Tensor, name: str, *, check: bool, ndim: int | None = None) -> None:
    """``check_real``, which would make copies of the whole; the host waits once."""
    check_real(value, name, check=False, ndim=ndim)
    if not check or value.ndim < 2:
        check_real(value, name, check=check)
        return
    rows = value.flatten(0, -2)
    chunks = row_chunks(len(rows), rows.shape[-1], value.device)
    finite = [torch.isfinite(rows[chunk]).all() for chunk in chunks]
    if finite and not bool(torch.stack(finite).all()):
        check_real(value, name, check=True)


@without_autocast
@torch.no_grad()
def mean_logits(logits: Sequence[Tensor], *, check: bool = True) -> Tensor:
    """The mean ``(..., V)`` of teachers' logits of one shape (BabyLlama), in float32 or wider, without a graph.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    need(len(logits) > 0, "argument-value", "logits", "hold at least one teacher", "none")
    for number, teacher in enumerate(logits):
        check_logits(teacher, f"logits[{number}]", check=check)
    alike = all(teacher.shape == logits[0].shape for teacher in logits)
    check_shapes(alike, "logits must have one shape, of teachers that share vocabulary and rows", *logits)
    mean = torch.zeros(logits[0].shape, dtype=compute_dtype(*logits), device=logits[0].device)
    for teacher in logits:
        mean.add_(teacher.to(mean.dtype), alpha=1 / len(logits))
    return mean


@without_autocast
@torch.no_grad()
def kd_targets_topk(
    teacher_logits: Tensor, k: int, *, temperature: float = 1.0, vocab_size: int | None = None, check: bool = True
) -> TopkTargets:
    """The k largest classes of every row with their log-probabilities, and the mass of the rest.

    ``log P_j = u_j / T - lse(u / T)``, and ``log_tail`` the log-sum-exp of the others' ``u / T`` less ``lse(u / T)``:
    never ``log(1 - sum)``, which cancels. It is ``-inf`` where k = V, or where nothing lies outside.

    Args:
        teacher_logits: u ``(..., V)``.
        k: number of classes, 1 to V.
        temperature: T > 0, to which the targets are bound from now on.
        vocab_size: number of classes to read; the others must be padding without mass.
        check: validate the values, which costs a device sync.

    Returns:
        The record; ids ascend. Log-probabilities are float64 where the logits are, else float32.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    temperature = check_temperature(temperature)
    check_logits(teacher_logits, "teacher_logits", check=check)
    logits = cut_teacher(teacher_logits, vocab_size, temperature, check=check)
    rows, size = logits.shape[:-1], logits.shape[-1]
    k = check_integer("k", k, 1, size)
    flat = logits.reshape(-1, size)
    ids = torch.empty((len(flat), k), dtype=torch.int64, device=flat.device)
    log_probs = torch.empty((len(flat), k), dtype=compute_dtype(flat), device=flat.device)
    log_tail = torch.empty(len(flat), dtype=log_probs.dtype, device=flat.device)
    for chunk in row_chunks(len(flat), size, flat.device):
        ids[chunk] = flat[chunk].topk(k, -1).indices.sort(-1).values
        log_p = (flat[chunk].to(log_probs.dtype) / temperature).log_softmax(-1)
        log_probs[chunk] = log_p.gather(-1, ids[chunk])
        log_tail[chunk] = take_tail(log_p, ids[chunk], log_probs[chunk])
    return TopkTargets(ids.reshape(*rows, k), log_probs.reshape(*rows, k), log_tail.reshape(rows), temperature, size)


def take_tail(log_p: Tensor, ids: Tensor, head: Tensor) -> Tensor:
    """``log_tail`` of rows; leaves ``-inf`` at ``ids`` of ``log_p``, whose entries there are ``head``."""
    tail = log_p.scatter_(-1, ids, -math.inf).logsumexp(-1)
    # As a share of head and tail: where the tail is nearly all, the sum over it rounds to more than its logarithm.
    return -torch.logaddexp(torch.zeros_like(tail), head.logsumexp(-1) - tail)


def check_logits(value: Tensor, name: str, *, check: bool) -> None:
    """Finite logits ``(..., V)`` with at least one leading axis and one class."""
    check_rows(value, name, check=check)
    fit = value.ndim >= 2 and value.shape[-1] > 0
    check_shapes(fit, f"{name} must be (..., V) with rows of at least one class", value)


def cut_teacher(
    logits: Tensor, vocab_size: int | None, temperature: float, *, check: bool, counted: Tensor | None = None
) -> Tensor:
    """The teacher's logits without padded classes, whose mass must be at most ``CUT_MASS`` where a row counts."""
    classes = cut(logits, vocab_size, "teacher_logits")
    if classes.shape[-1] == logits.shape[-1] or not check:
        return classes
    size, allowed = classes.shape[-1], float(load_tolerances()["constants"]["cut_mass"])
    flat, dtype = logits.reshape(-1, logits.shape[-1]), compute_dtype(logits)
    worst = 0.0
    for chunk in row_chunks(len(flat), flat.shape[-1], flat.device):
        mass = (flat[chunk].to(dtype) / temperature).softmax(-1)[:, size:].sum(-1)
        if counted is not None:
            mass = mass.masked_fill(~counted.reshape(-1)[chunk], 0.0)
        worst = max(worst, float(mass.max()))
    rule = f"cut padding alone, with a mass of at most {allowed:g} in every row"
    got = f"{worst:.6g} on the classes from {size} to {logits.shape[-1] - 1}"
    need(worst <= allowed, "argument-value", "vocab_size", rule, got)
    return classes


def cut(logits: Tensor, vocab_size: int | None, name: str) -> Tensor:
    if vocab_size is None:
        return logits
    size = check_integer("vocab_size", vocab_size, 1, None)
    count = logits.shape[-1]
    need(count >= size, "argument-shape", name, f"have at least vocab_size = {size} classes", count)
    return logits[..., :size]


def check_classes(name: str, num_given: int, num_classes: int, *, can_cut: bool = True) -> None:
    if num_given == num_classes:
        return
    least = min(num_given, num_classes)
    remedy = f"vocab_size={least} leaves them out, as in KdTerm(vocab_size={least})"
    if num_given > num_classes and not can_cut:
        remedy = f"precompute with --vocab-size {least}"
    rule = f"{name} must have the student's {num_classes} classes"
    raise ShdError("argument-shape", f"{rule}; got {num_given}: if those from {least} on are padding, {remedy}")


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A teacher's output layer, from last states to logits: ``cap(scale * W norm(h) + bias)`` (CACHE-190).

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
        """The head of its first classes."""
        return replace(self, weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``(R, V)`` of states ``(R, D)``, float64 if these are, else float32."""
        dtype = compute_dtype(states)
        hidden = self._normed(states.to(dtype))
        if self.weight.dtype == dtype:
            logits = hidden @ self.weight.mT
        else:  # some classes of a narrow matrix are widened at a time
            logits = hidden.new_empty((len(hidden), len(self.weight)))
            for classes in row_chunks(len(self.weight), self.weight.shape[1], self.weight.device):
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

    def rows(self, chunk: slice) -> Tensor:
        """The logits of some rows, of states ``(R, D_t)``."""
        return self.head.logits(self.hidden[chunk])


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
    head_device = head.weight.device
    need(head_device == device, "argument-value", "the teacher's head", f"be on {device}", head_device)
    states = hidden.detach().flatten(0, len(rows) - 1).to(device)
    # A wide student's loss is that of the same logits in its own dtype.
    states = states.to(torch.promote_types(compute_dtype(states), dtype))
    count, size = len(head.weight), options.vocab_size
    if num_classes > count or size is None:
        check_classes("the teacher's head", count, num_classes)
    if num_classes < count and options.check:
        counted = None if options.loss_mask is None else options.loss_mask.reshape(-1).to(device)
        for chunk in row_chunks(len(states), count, device):
            chunk_mask = None if counted is None else counted[chunk]
            cut_teacher(head.logits(states[chunk]), size, temperature, check=True, counted=chunk_mask)
    return ExactTargets(states, head.cut(num_classes) if num_classes < count else head)
