"""``attention_kl``: the SHD loss from the student's queries and keys (spec chapters LOSS and GRAD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_torch.checks import check_finite, check_option, check_temperature
from shd_torch.kl.backends import BACKENDS, BackendChoice, choose_backend
from shd_torch.kl.gradient import attach, refuse_transforms
from shd_torch.kl.request import KlRequest, make_request
from shd_torch.maps.loss import REDUCTIONS, SUPPORTS
from shd_torch.precision import without_autocast
from shd_torch.supervision.mask import AttentionMask
from shd_torch.supervision.supervision import Dense, Supervision

Layers: TypeAlias = Tensor | Sequence[Tensor]
Supervisions: TypeAlias = Supervision | Tensor | Sequence[Supervision | Tensor]


class KlKeywords(TypedDict, total=False):
    """The keywords of ``attention_kl``."""

    scale: float | None
    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    alibi_slopes: Tensor | None
    softcap: float | None
    loss_mask: Tensor | None
    temperature: float
    beta: float
    reduction: str
    support: str
    value: str
    backend: str
    product_dtype: torch.dtype | None
    check: bool


VALUES: tuple[str, ...] = ("exact", "surrogate")
PRODUCT_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@without_autocast
def attention_kl(
    student_q: Layers,
    student_k: Layers,
    supervision: Supervisions,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    loss_mask: Tensor | None = None,
    temperature: float = 1.0,
    beta: float = 1.0,
    reduction: str = "sum",
    support: str = "error",
    value: str = "exact",
    backend: str = "auto",
    product_dtype: torch.dtype | None = None,
    check: bool = True,
) -> Tensor:
    """``shd_loss`` for a student that keeps its fused attention: from its queries and keys, without its maps.

    Meaning, denominators and errors are those of ``shd_loss`` with logits ``scale q k^T``; memory is linear in the
    length. The gradients are computed with the value, so that the backward pass only scales them. Every other
    derivative (a second one, forward mode, transforms of ``torch.func``) is refused. None reaches the supervision.
    ``torch.compile(backend="eager")``, a debugging aid, is an exception: it runs backward passes without a graph, and
    what this loss should add to a second derivative is missing there, without an error.
    ``torch.autocast`` changes nothing here.

    Args:
        student_q: ``(B, H_s, L, d)`` as the student multiplies them (rotated, normalised), or a list of layers. Rows
            that ``loss_mask`` drops may hold anything, NaN included, here and in the supervision.
        student_k: ``(B, H_kv, S, d)``, likewise; query head h reads key head ``h // (H_s / H_kv)``.
        supervision: ``Factored``, ``Dense`` or maps ``(B, H_s, L, S)``; a list where the queries are one.
        scale: of the products; None for ``1 / sqrt(d)``.
        attn_mask: as PyTorch's, for all layers: boolean, True = may attend, or added to the logits (a learned bias
            gets its gradient, by ``dense``); broadcastable to ``(B, H_s, L, S)``.
        is_causal: row i may attend to keys 0..i.
        window: row i may attend to keys above ``i - window`` and, where not causal, below ``i + window``.
        alibi_slopes: ``(H_s,)`` or ``(B, H_s)``; ``slope * (j - i)`` is added to the logits. Constants: a bias that
            is learned goes through ``attn_mask``.
        softcap: logits are ``softcap * tanh(scale q k^T / softcap)`` before masks and biases.
        loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
        temperature: T_a of both maps; dense supervision is bound to the one it was made with.
        beta: weight of the term, at least 0.
        reduction: ``"sum"`` over layers and heads, or ``"mean"`` over both.
        support: as in ``shd_loss``; ``"intersect"`` by ``dense`` alone.
        value: ``"exact"``, or ``"surrogate"``: the gradient is exact but the number is ``sum q dq``, which is no
            divergence (where no gradient is wanted the value is always exact). ``dense`` gives the value almost for
            nothing; ``sdpa`` needs a pass over tiles for it, about as long as the step itself.
        backend: ``"dense"`` (tiles, everything), ``"sdpa"`` (PyTorch's fused attention), ``"triton"`` (kernels for
            CUDA devices) or ``"auto"``; see ``explain_backend``.
        product_dtype: of the fused calls; default float32, and float16 for half-precision students on accelerators.
        check: look at the values and at both supports, which makes the host wait for the device. Without it, teacher
            mass where the student may not attend makes the gradient wrong and may leave the loss finite: check once,
            at set-up, at least.

    Returns:
        The loss ``()``, in nats times beta; float64 if an argument is, else float32.

    Raises:
        ShdError: ``support-mismatch``, ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``,
            ``not-a-distribution``, ``mixing-invalid``.

    Source: Eq. 11. Decisions: D-13, D-17, D-21.
    """
    layers = _prepare(
        student_q,
        student_k,
        supervision,
        scale=scale,
        attn_mask=attn_mask,
        is_causal=is_causal,
        window=window,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        loss_mask=loss_mask,
        temperature=temperature,
        beta=beta,
        reduction=reduction,
        support=support,
        value=value,
        backend=backend,
        product_dtype=product_dtype,
        check=check,
    )
    terms = []
    for layer in layers:
        result = BACKENDS[layer.choice.name].run(layer.request)
        bias = attn_mask if layer.request.wants_bias_gradient else None
        terms.append(attach(result, layer.queries, layer.keys, bias) + layer.penalty)
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


@without_autocast
def explain_backend(
    student_q: Layers, student_k: Layers, supervision: Supervisions, **keywords: Unpack[KlKeywords]
) -> list[BackendChoice]:
    """Which backend ``attention_kl`` would take for each layer, and why; computes nothing else.

    Args:
        student_q: as for ``attention_kl``.
        student_k: likewise.
        supervision: likewise.
        **keywords: those of ``attention_kl``.

    Returns:
        One choice a layer: its ``name``, the ``reason``, and ``refused``, why others cannot serve the call.

    Raises:
        ShdError: as ``attention_kl``.
    """
    return [layer.choice for layer in _prepare(student_q, student_k, supervision, **keywords)]


class _Layer(NamedTuple):
    request: KlRequest
    choice: BackendChoice
    penalty: Tensor
    queries: Tensor
    keys: Tensor


def _prepare(
    student_q: Layers,
    student_k: Layers,
    supervision: Supervisions,
    *,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    loss_mask: Tensor | None = None,
    temperature: float = 1.0,
    beta: float = 1.0,
    reduction: str = "sum",
    support: str = "error",
    value: str = "exact",
    backend: str = "auto",
    product_dtype: torch.dtype | None = None,
    check: bool = True,
) -> list[_Layer]:
    """Check every argument and make each layer's request."""
    check_option("reduction", reduction, REDUCTIONS, "LOSS-5")
    check_option("support", support, SUPPORTS, "LOSS-14")
    check_option("value", value, VALUES, "LOSS-1")
    if product_dtype is not None and not (isinstance(product_dtype, torch.dtype) and product_dtype in PRODUCT_DTYPES):
        names = ", ".join(map(str, PRODUCT_DTYPES))
        raise ShdError("argument-dtype", f"product_dtype must be one of {names}, or None; got {product_dtype!r}")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < math.inf:
        raise ShdError("argument-value", f"beta must be a finite number of at least 0; got {beta!r}", "LOSS-2")
    temperature = check_temperature(temperature)
    scale = None if scale is None else check_finite("scale", scale, "GRAD-8")
    if softcap is not None and check_finite("softcap", softcap, "GRAD-8") <= 0:
        raise ShdError("argument-value", f"softcap must be above 0; got {softcap!r}", "GRAD-8")
    triples = _match(student_q, student_k, supervision)
    num_maps = sum(q.shape[1] for q, _, _ in triples if q.ndim > 1)
    layers = []
    for number, (q, k, taught) in enumerate(triples):
        refuse_transforms(q, k, attn_mask if isinstance(attn_mask, Tensor) else None)
        request, penalty = make_request(
            q,
            k,
            taught,
            mask=AttentionMask(attn_mask, is_causal, window, alibi_slopes),
            scale=scale,
            softcap=softcap,
            loss_mask=loss_mask,
            temperature=temperature,
            beta=float(beta) / (num_maps if reduction == "mean" else 1),
            support=support,
            wants_value=value == "exact",
            product_dtype=product_dtype,
            check=check,
            layer=number,
        )
        layers.append(_Layer(request, choose_backend(request, backend), penalty, q, k))
    return layers


def _match(
    student_q: Layers, student_k: Layers, supervision: Supervisions
) -> list[tuple[Tensor, Tensor, Supervision]]:
    """The layers of the three: one of each, or lists of one length, at least 1 (LOSS-3)."""
    arguments = (student_q, student_k, supervision)
    for name, argument in zip(("student_q", "student_k", "supervision"), arguments, strict=True):
        kinds = (Tensor, Supervision) if name == "supervision" else Tensor
        for each in argument if isinstance(argument, list | tuple) else (argument,):
            if not isinstance(each, kinds):
                wanted = "a Supervision or a tensor" if name == "supervision" else "a tensor"
                raise ShdError(
                    "argument-dtype",
                    f"{name} must be {wanted}, or a list with one for each layer; got {type(each).__name__}",
                    "LOSS-3",
                )
    forms = {isinstance(argument, Tensor | Supervision) for argument in arguments}
    given: list[list[Any]] = [[each] if isinstance(each, Tensor | Supervision) else list(each) for each in arguments]
    lengths = [len(layers) for layers in given]
    if len(forms) > 1 or len(set(lengths)) > 1 or 0 in lengths:
        raise ShdError(
            "argument-shape",
            "student_q, student_k and supervision must be one each, or lists of one length, at least 1; got "
            f"{lengths[0]}, {lengths[1]} and {lengths[2]}" + (", not all of them lists" if len(forms) > 1 else ""),
            "LOSS-3",
        )
    return [
        (q, k, Dense(taught) if isinstance(taught, Tensor) else taught) for q, k, taught in zip(*given, strict=True)
    ]
