"""Denoising diffusion, and a teacher that sees the same noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer, check_number
from shd_torch.checks import check_real, check_shapes, compute_dtype, without_autocast
from shd_torch.recipes.terms import SHD, Term, Terms, check_integers, check_weight, join

LEAST_MASS = 1e-12
"""The least mass of a bin before its logarithm."""


class DiffusionDraw(NamedTuple):
    """The random draws that both models must share in one step; pass it to the student and to the teacher."""

    t: Tensor  # (B,), int64
    noise: Tensor  # (B, C, ...), float32


def draw_diffusion(seeds: Sequence[int], shape: Sequence[int], *, steps: int = 1000) -> DiffusionDraw:
    """Steps and noise, drawn per sample from its seed, independent of the batch.

    With the same seeds, a student sees the same inputs as the teacher of a cache.

    Args:
        seeds: one integer per sample, such as a combination of sample number and epoch.
        shape: of one sample ``(C, ...)``.
        steps: t is drawn from 0 to steps - 1.

    Returns:
        The draw, on the CPU.
    """
    steps = check_integer("steps", steps, 1, None)
    ts, noises = [], []
    for seed in seeds:
        source = torch.Generator().manual_seed(check_integer("seeds", seed, 0, 2**63 - 1))
        ts.append(torch.randint(steps, (), generator=source))
        noises.append(torch.randn(tuple(shape), generator=source))
    return DiffusionDraw(torch.stack(ts), torch.stack(noises))


def linear_betas(steps: int = 1000) -> Tensor:
    """Variances that rise linearly from ``.1 / steps`` to ``20 / steps``, both included, float64.

    ``steps`` are at least 21, so that every variance is below 1.
    """
    steps = check_integer("steps", steps, 21, None)
    return torch.linspace(0.1 / steps, 20.0 / steps, steps, dtype=torch.float64)


@without_autocast
def noised(x0: Tensor, noise: Tensor, t: Tensor, *, betas: Tensor | None = None, check: bool = True) -> Tensor:
    """``sqrt(abar_t) x0 + sqrt(1 - abar_t) noise``, the input of both models.

    x0 and noise are ``(B, C, ...)``; t are steps ``(B,)``, integers from 0; ``betas`` as in ``diffusion``.
    """
    _check_same_shape(x0, noise, check)
    start = x0.to(compute_dtype(x0))
    tables = _schedule(betas, t, start, check)
    noisy = tables.of_x0 * start + tables.of_noise * noise.to(start)
    return noisy.to(x0.dtype) if x0.is_floating_point() else noisy


@without_autocast
def diffusion(
    student_output: Tensor,
    x0: Tensor,
    noise: Tensor,
    t: Tensor,
    *,
    teacher_output: Tensor | None = None,
    betas: Tensor | None = None,
    snr_clip: float | None = 5.0,
    kd_weight: float = 1.0,
    bound_weight: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``mean_b w_b |eps_S - noise|^2 + bound + g mean_b w_b |eps_S - eps_T|^2``.

    ``w = min(SNR, k) / SNR`` with ``SNR = abar / (1 - abar)``; squares are means over the numbers of a sample, terms
    are means over the batch. The bound trains only the range: epsilon is detached there. Defaults are MDTv2's base
    loss (k = 5, 1,000 steps with linear betas, learned range); MDT defines no distillation, so g = 1 is this
    project's choice. A model with a full and a masked pass per step computes this loss once for each, and adds
    ``terms.scaled(1.0, prefix="masked_")``.

    Nothing is drawn here: t, noise and the tokens of a masked pass are arguments, and must be the same for both
    models (``draw_diffusion``). Attention maps of different noise, or of different tokens, do not correspond.

    Args:
        student_output: epsilon ``(B, C, ...)``, or epsilon and range ``(B, 2 C, ...)``, of ``noised(x0, noise, t)``.
        x0: ``(B, C, ...)``, in [-1, 1], as is the noise.
        t: steps ``(B,)``, integers from 0.
        teacher_output: of the same input, with or without a range, which is not read.
        betas: ``(steps,)``, each in (0, 1); default ``linear_betas()``.
        snr_clip: k of min-SNR-k; None weights every step with 1.
        kd_weight: g.
        bound_weight: of the bound; set it if your training divides the bound by steps / 1000.
        shd: the attention term; its teachers must see the same draw.

    Returns:
        The terms ``mse`` (1), ``bound`` if the student has a range, and ``kd`` if there is a teacher.
    """
    weights = check_weight("kd_weight", kd_weight), check_weight("bound_weight", bound_weight)
    if snr_clip is not None:
        check_number("snr_clip", snr_clip, above=0)
    _check_same_shape(x0, noise, check)
    dtype, device = compute_dtype(student_output), student_output.device
    start, target = (tensor.detach().to(device, dtype) for tensor in (x0, noise))
    tables = _schedule(betas, t, start, check)
    # min(SNR, k) / SNR of each sample.
    importance = (tables.inverse_snr * (math.inf if snr_clip is None else snr_clip)).clamp(max=1.0)
    epsilon, span = _split(student_output, "student_output", start, check)
    terms = {"mse": Term(_weighed(importance, epsilon - target), 1.0)}
    if span is not None:
        terms["bound"] = Term(_bound(tables, start, target, epsilon.detach(), span), weights[1])
    if teacher_output is not None:
        teacher, _ = _split(teacher_output.detach().to(device), "teacher_output", start, check)
        terms["kd"] = Term(_weighed(importance, epsilon - teacher), weights[0])
    return join(shd, **terms)


class _Tables(NamedTuple):
    """The schedule at each sample's step, ``(B, 1, ...)``."""

    is_first: Tensor  # boolean: the step is 0
    of_x0: Tensor  # in the noised sample
    of_noise: Tensor
    inverse_snr: Tensor
    log_beta: Tensor
    log_variance: Tensor  # of the true posterior; at the first step that of the second
    posterior_of_x0: Tensor  # in the mean of the posterior
    posterior_of_noised: Tensor


def _schedule(betas: Tensor | None, t: Tensor, like: Tensor, check: bool) -> _Tables:
    """Tables in float64, read at the steps of the batch and then brought to the dtype of ``like``."""
    betas = linear_betas() if betas is None else betas
    check_real(betas, "betas", check=check, ndim=1)
    table = betas.detach().double().cpu()
    if len(table) < 2 or bool(((table <= 0) | (table >= 1)).any()):
        raise ShdError("argument-value", "betas must be two numbers at least, each between 0 and 1")
    check_integers(t, "t", (len(like),))
    steps = t.to(like.device, torch.int64)
    if check and bool(((steps < 0) | (steps >= len(table))).any()):
        raise ShdError("argument-value", f"t must be 0 to {len(table) - 1}; got {steps.tolist()}")
    abar = (1 - table).cumprod(0)
    abar_before = torch.cat((abar.new_ones(1), abar[:-1]))
    variance = table * (1 - abar_before) / (1 - abar)
    variance[0] = variance[1]  # at the first step it is 0, which has no logarithm
    tables = (
        abar.sqrt(),
        (1 - abar).sqrt(),
        (1 - abar) / abar,
        table.log(),
        variance.log(),
        table * abar_before.sqrt() / (1 - abar),
        (1 - abar_before) * (1 - table).sqrt() / (1 - abar),
    )
    shape = (-1, *[1] * (like.ndim - 1))
    columns = torch.stack(tables).to(like.device)[:, steps].to(like.dtype)
    return _Tables((steps == 0).reshape(shape), *(column.reshape(shape) for column in columns))


def _check_same_shape(x0: Tensor, noise: Tensor, check: bool) -> None:
    for name, value in (("x0", x0), ("noise", noise)):
        check_real(value, name, check=check)
    fit = x0.shape == noise.shape and x0.ndim >= 2
    check_shapes(fit, "x0 and noise must share one shape (B, C, ...)", x0, noise)


def _split(output: Tensor, name: str, x0: Tensor, check: bool) -> tuple[Tensor, Tensor | None]:
    """Epsilon and, where there are twice the channels, the range; in the dtype of ``x0``."""
    check_real(output, name, check=check)
    channels = x0.shape[1]
    fit = output.ndim == x0.ndim and (output.shape[0], *output.shape[2:]) == (x0.shape[0], *x0.shape[2:])
    fit = fit and output.shape[1] in (channels, 2 * channels)
    check_shapes(fit, f"{name} must be as x0, or have twice the channels where it holds a range", output, x0)
    wide = output.to(x0.dtype)
    return wide[:, :channels], wide[:, channels:] if output.shape[1] > channels else None


def _weighed(importance: Tensor, difference: Tensor) -> Tensor:
    # Every sample has as many numbers, so that the mean of all is the mean over samples of their means.
    return (importance * difference.square()).mean()


def _bound(tables: _Tables, x0: Tensor, noise: Tensor, epsilon: Tensor, span: Tensor) -> Tensor:
    """The term of the variational bound, ``KL(N(m, s^2) || N(m_S, s_S^2)) / log 2``: mean over samples and numbers.

    The true posterior has ``m = (beta_t sqrt(abar_{t-1}) x0 + (1 - abar_{t-1}) sqrt(1 - beta_t) x_t) / (1 - abar_t)``
    and ``s^2 = beta_t (1 - abar_{t-1}) / (1 - abar_t)``, at t = 0 that of t = 1. The student's has x0 replaced by
    ``(x_t - sqrt(1 - abar_t) eps_S) / sqrt(abar_t)``, and
    ``log s_S^2 = (v + 1) / 2 log beta_t + (1 - v) / 2 log s^2``.
    At t = 0 the summand is ``- log max(p, 1e-12) / log 2``, p the mass of ``_log_mass``.
    """
    log_true = tables.log_variance
    log_made = log_true + (span + 1) / 2 * (tables.log_beta - log_true)
    # The mean of the posterior is linear in x0, so that two of them differ by that factor of the starts; the
    # distance of the starts is that of the noises over the root of the SNR.
    offset = tables.posterior_of_x0 * tables.inverse_snr.sqrt() * (noise - epsilon)
    divergence = 0.5 * (log_made - log_true - 1 + (log_true - log_made).exp() + offset.square() * (-log_made).exp())
    noisy = tables.of_x0 * x0 + tables.of_noise * noise
    mean = tables.posterior_of_x0 * x0 + tables.posterior_of_noised * noisy + offset
    nats = torch.where(tables.is_first, -_log_mass(x0, mean, log_made), divergence)
    return nats.mean() / math.log(2)


def _log_mass(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """The logarithm of the mass of the bin of width 2/255 around x; the outermost bins are open."""
    precision = (-0.5 * log_variance).exp()
    edges = ((x - mean + edge) * precision for edge in (1 / 255, -1 / 255))
    # Twice a: its sigmoid is the published normal distribution function, (1 + tanh a) / 2.
    above, below = (2 * math.sqrt(2 / math.pi) * (edge + 0.044715 * edge.pow(3)) for edge in edges)
    # A difference of sigmoids as a product, which keeps the digits that two numbers near one another would lose.
    between = above.sigmoid() * (-below).sigmoid() * -torch.expm1(below - above)
    mass = torch.where(x < -0.999, above.sigmoid(), torch.where(x > 0.999, (-below).sigmoid(), between))
    return mass.clamp(min=LEAST_MASS).log()
