"""``attention_kl``: the SHD loss from the student's queries and keys (spec chapters LOSS and GRAD).

First the backends and the rule that chooses among them, then the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias, Unpack

import torch
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_torch.checks import check_option, without_autocast
from shd_torch.kl import dense, sdpa, triton
from shd_torch.kl.gradient import attach, refuse_transforms
from shd_torch.kl.request import KlKeywords, KlRequest, make_request, read_keywords
from shd_torch.maps.loss import match_layers
from shd_torch.supervision.supervision import Dense, Supervision

FUSED_LENGTH = 512
"""Keys from which on fused attention is preferred on an accelerator."""


_MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))["devices"]
TRITON_LENGTHS: dict[tuple[int, int], int] = {
    tuple(device["capability"]): device["triton_from"] for device in _MEASURED if device["triton_from"] is not None
}
"""Keys from which on the kernels pay, for each compute capability on which ``benchmarks/gpu_pass.py`` showed that
they do, and wrote so into ``measured.json``; elsewhere they run by name alone."""

TRITON_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""Of the student's queries: float32 costs the kernels three products, and fused attention has its precision."""


class BackendChoice(NamedTuple):
    """The backend of one layer, and why."""

    name: str
    reason: str
    refused: dict[str, str]  # why not, for every backend that cannot serve the request


BACKENDS: dict[str, ModuleType] = {"dense": dense, "sdpa": sdpa, "triton": triton}
"""Of each, ``unsupported_reason(request)`` says in words why it cannot serve a request, None where it can, and
``run(request)`` gives value and gradients of one that it can."""


def choose_backend(request: KlRequest, name: str) -> BackendChoice:
    """The backend for one layer, by its name or ``"auto"``."""
    check_option("backend", name, ("auto", *BACKENDS))
    reasons: dict[str, str | None] = {kind: module.unsupported_reason(request) for kind, module in BACKENDS.items()}
    refused = {kind: reason for kind, reason in reasons.items() if reason is not None}
    if name == "auto":
        chosen, reason = _choose(request, refused)
        return BackendChoice(chosen, reason, refused)
    fits, rule = name not in refused, "be one that can serve this call"
    need(fits, "argument-value", "backend", rule, repr(name), remedy=refused.get(name, ""))
    return BackendChoice(name, "it was asked for", refused)


def _choose(request: KlRequest, refused: dict[str, str]) -> tuple[str, str]:
    """The rule of ``"auto"``: device, length, dtype, and what is refused, in this order."""
    device, num_keys = request.weights.device, request.shape[3]
    if device.type == "cpu":
        return "dense", "on a processor tiles in its cache are as fast as fused attention, and give the value as well"
    if num_keys < FUSED_LENGTH:
        return "dense", f"{num_keys} keys are fewer than {FUSED_LENGTH}: tiles are as fast"
    if "triton" not in refused and request.queries.dtype in TRITON_DTYPES:
        capability = torch.cuda.get_device_capability(device)
        if num_keys >= TRITON_LENGTHS.get(capability, math.inf):
            return "triton", "its kernels subtract before they round, and were measured to be faster on such a device"
    if "sdpa" in refused:
        return "dense", f"fused attention cannot serve this call: {refused['sdpa']}"
    return "sdpa", f"{num_keys} keys are {FUSED_LENGTH} or more on {device.type}"


Layers: TypeAlias = Tensor | Sequence[Tensor]
Supervisions: TypeAlias = Supervision | Tensor | Sequence[Supervision | Tensor]


@without_autocast
def attention_kl(
    student_q: Layers, student_k: Layers, supervision: Supervisions, **keywords: Unpack[KlKeywords]
) -> Tensor:
    """``shd_loss`` for a student that keeps its fused attention: from its queries and keys, without its maps.

    Meaning, denominators and errors are those of ``shd_loss`` with logits ``scale q k^T``; memory is linear in the
    length. Gradients are computed together with the value, and the backward pass only scales them. Other derivatives
    (second order, forward mode, transforms of ``torch.func``) are rejected. No gradient flows into the supervision.
    ``torch.compile(backend="eager")``, a debugging aid, is an exception: it runs backward passes without a graph, and
    second derivatives silently lack the contribution of this loss. ``torch.autocast`` changes nothing here.

    Args:
        student_q: ``(B, H_s, L, d)`` after rotation and normalisation, or a list of layers. Rows dropped by
            ``loss_mask`` may contain anything, including NaN, here and in the supervision.
        student_k: ``(B, H_kv, S, d)``, rotated and normalised too; query head h reads key head ``h // (H_s / H_kv)``.
        supervision: ``Factored``, ``Dense`` or maps ``(B, H_s, L, S)``; a list if the queries are a list.
        **keywords:
            scale: of the products; None for ``1 / sqrt(d)``.
            attn_mask: as PyTorch's, for all layers: boolean, True = may attend, or added to the logits (a learned
                bias gets its gradient, by ``dense``); broadcastable to ``(B, H_s, L, S)``.
            is_causal: row i may attend to keys 0..i.
            window: row i may attend to keys above ``i - window`` and, where not causal, below ``i + window``.
            softcap: logits are ``softcap * tanh(scale q k^T / softcap)`` before masks and biases.
            loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
            temperature: T_a of both maps; for dense supervision, the one it was made with.
            beta: weight of the term, at least 0.
            reduction: ``"sum"`` over layers and heads, or ``"mean"`` over both.
            support: as in ``shd_loss``; ``"intersect"`` only with ``dense``.
            value: ``"exact"``, or ``"surrogate"``: the gradient is exact but the number is ``sum q dq``, which is no
                divergence (without gradients the value is always exact). With ``dense`` the exact value is almost
                free; ``sdpa`` needs an extra pass over tiles, about as long as the step itself.
            backend: ``"dense"`` (tiles, everything), ``"sdpa"`` (PyTorch's fused attention), ``"triton"`` (kernels
                for CUDA devices) or ``"auto"``; see ``explain_backend``.
            product_dtype: of the fused calls; default float32, and float16 for half-precision students on
                accelerators.
            check: validate the values and both supports, which costs a device sync. Without it, teacher mass where
                the student may not attend makes the gradient wrong, possibly with a finite loss: check at least once,
                at set-up.

    Returns:
        The loss ``()``, in nats times beta; float64 if an argument is, else float32.

    Rounding: with N the largest ``scale / T sum_c |q_c k_c|`` of student and teacher, a probability of ``sdpa`` and
    ``triton`` is off by at most a share ``u = (S + N (d + 8)) 2^-24``: d roundings of a product, 8 of the row's
    log-sum-exp, S of its sum. So dk is off by at most ``2 u scale / T sum_i w_i |q_i|`` (w: weights of rows), dq of a
    row by ``2 u scale / T w_i max |k|``, in addition to the rounding of half-precision products. At N = 10^4 and
    d = 64, u is 4%, the errors found a thousandth of the bounds. ``dense`` lacks the 8: rows that look at one key are
    exact.

    Raises:
        ShdError: ``support-mismatch``, ``argument-shape``, ``argument-value``, ``argument-dtype``, ``not-finite``,
            ``not-a-distribution``, ``mixing-invalid``.

    Source: Eq. 11. Decisions: D-13, D-17, D-21.
    """
    terms = []
    for request, penalty, choice, q, k in _prepare(student_q, student_k, supervision, keywords):
        bias = keywords.get("attn_mask") if request.wants_bias_gradient else None
        terms.append(attach(BACKENDS[choice.name].run(request), q, k, bias) + penalty)
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


@without_autocast
def explain_backend(
    student_q: Layers, student_k: Layers, supervision: Supervisions, **keywords: Unpack[KlKeywords]
) -> list[BackendChoice]:
    """The backend that ``attention_kl`` would use for each layer, of the same arguments, and why; computes no more.

    Returns:
        One choice per layer: its ``name``, the ``reason``, and ``refused``, the reasons against the others.

    Raises:
        ShdError: as ``attention_kl``.
    """
    return [choice for _, _, choice, _, _ in _prepare(student_q, student_k, supervision, keywords)]


def _prepare(
    student_q: Layers, student_k: Layers, supervision: Supervisions, keywords: KlKeywords
) -> list[tuple[KlRequest, Tensor, BackendChoice, Tensor, Tensor]]:
    """Each layer's request, checked, its penalty, its backend, and its queries and keys with their graph."""
    rule, options = read_keywords(keywords)
    rule.check()
    triples = _match(student_q, student_k, supervision)
    num_maps = sum(q.shape[1] for q, _, _ in triples if q.ndim > 1)
    beta = float(options.beta) / (num_maps if options.reduction == "mean" else 1)
    prepared = []
    for number, (q, k, supervision) in enumerate(triples):
        refuse_transforms(q, k, rule.attn_mask)
        request, penalty = make_request(q, k, supervision, rule, options, beta=beta, layer=number)
        prepared.append((request, penalty, choose_backend(request, options.backend), q, k))
    return prepared


def _match(
    student_q: Layers, student_k: Layers, supervision: Supervisions
) -> list[tuple[Tensor, Tensor, Supervision]]:
    lists = match_layers(student_q=student_q, student_k=student_k, supervision=supervision)
    for name, layers in zip(("student_q", "student_k", "supervision"), lists, strict=True):
        for layer in layers:
            if not isinstance(layer, Tensor) and not (name == "supervision" and isinstance(layer, Supervision)):
                rule = f"{name} must be a tensor{' or a Supervision' * (name == 'supervision')} for each layer"
                raise ShdError("argument-dtype", f"{rule}; got {type(layer).__name__}", "LOSS-3")
    return [
        (q, k, Dense(supervision) if isinstance(supervision, Tensor) else supervision)
        for q, k, supervision in zip(*lists, strict=True)
    ]
