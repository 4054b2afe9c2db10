"""Recipes on features: ViTKD mimics and generates, VkD projects orthogonally."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_torch.checks import check_real, check_shape, check_shapes, compute_dtype, without_autocast
from shd_torch.kd import kd_loss
from shd_torch.kd.chunks import Targets
from shd_torch.recipes.logits import prepare
from shd_torch.recipes.terms import SHD, Term, Terms, check_weight, join, label_loss


class ViTKD(nn.Module):
    """``a / B sum_l ||F_l(S_l) - T_l||^2 + b / (r B) ||M (G(mask(F(S))) - T)||^2``.

    F are linear maps to the teacher's width, G is a convolution, ReLU and a convolution (3 x 3) over the grid of
    patches, mask() replaces removed tokens by a learned one, and M keeps only the removed ones: of every sample the
    ``floor(N (1 - r))`` tokens with the smallest noise stay. Both terms are *sums*
    over tokens and features divided by B, hence the small weights. Its parameters are trained with the student's and
    discarded afterwards. The published recipe adds it to the cross entropy, or to ``nkd``: ``nkd(...) +
    projector(...)``. Defaults are cls_KD's for DeiT (two layers, a = 3e-5, b = 3e-6, r = .5).

    ``student_dim`` is D_s, ``teacher_dim`` D_t, ``num_layers`` counts the first layers to mimic; a is
    ``mimic_weight``, b ``generate_weight``, and r, in (0, 1), ``removed``.
    """

    def __init__(
        self,
        student_dim: int,
        teacher_dim: int,
        *,
        num_layers: int = 2,
        mimic_weight: float = 3e-5,
        generate_weight: float = 3e-6,
        removed: float = 0.5,
    ) -> None:
        super().__init__()
        self.mimic_weight = check_weight("mimic_weight", mimic_weight)
        self.generate_weight = check_weight("generate_weight", generate_weight)
        self.removed = check_number("removed", removed, above=0, most=1)
        need(self.removed < 1, "argument-value", "removed", "lie between 0 and 1", repr(removed))
        self.mimic = nn.ModuleList(nn.Linear(student_dim, teacher_dim) for _ in range(num_layers))
        self.project = nn.Linear(student_dim, teacher_dim)
        self.mask_token = nn.Parameter(torch.zeros(teacher_dim))
        self.generate = nn.Sequential(
            nn.Conv2d(teacher_dim, teacher_dim, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(teacher_dim, teacher_dim, 3, padding=1),
        )

    def forward(
        self,
        student_layers: Sequence[Tensor],
        student_last: Tensor,
        teacher_layers: Sequence[Tensor],
        teacher_last: Tensor,
        noise: Tensor | None = None,
        *,
        grid: tuple[int, int] | None = None,
        shd: SHD | None = None,
        check: bool = True,
    ) -> Terms:
        """The terms of a batch; the caller omits class and distillation tokens.

        Args:
            student_layers: patch tokens of the first layers, each ``(B, N, D_s)``.
            student_last: patch tokens after the final norm ``(B, N, D_s)``.
            teacher_layers: as many, each ``(B, N, D_t)``.
            teacher_last: after the teacher's final norm ``(B, N, D_t)``.
            noise: ``(B, N)``, one number per token: those with the largest are removed; drawn if None.
            grid: rows and columns of patches; default a square.

        Returns:
            The terms ``mimic`` (weight a) and ``generate`` (weight b / r).
        """
        batch, tokens = rows = tuple(student_last.shape[:2])
        depth, counts = len(self.mimic), [len(student_layers), len(teacher_layers)]
        name = "student_layers and teacher_layers"
        need(counts == [depth] * 2, "argument-shape", name, f"be {depth} each", f"{counts[0]} and {counts[1]}")
        students = ("student", self.project.in_features, (*student_layers, student_last))
        teachers = ("teacher", self.project.out_features, (*teacher_layers, teacher_last))
        for side, width, layers in (students, teachers):
            for number, value in enumerate(layers):
                layer, name = (None, f"{side}_last") if number == depth else (number, f"{side}_layers")
                check_real(value, name, check=check, ndim=3, layer=layer)
                check_shape(value, name, (*rows, width), remedy=": take patch tokens alone")
        mimic = torch.zeros((), device=self.mask_token.device)
        for project, student, teacher in zip(self.mimic, student_layers, teacher_layers, strict=True):
            mimic = mimic + _squares(project(student), teacher).sum() / batch
        if noise is None:
            noise = torch.rand((batch, tokens), device=student_last.device)
        gone = _removed_tokens(noise, (batch, tokens), self.removed)[..., None]
        picture = self.generate(_as_picture(torch.where(gone, self.mask_token, self.project(student_last)), grid))
        generated = _squares(picture.flatten(2).mT, teacher_last).masked_fill(~gone, 0.0).sum() / batch
        return join(
            shd, mimic=Term(mimic, self.mimic_weight), generate=Term(generated, self.generate_weight / self.removed)
        )


def _squares(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared differences, which are summed in no half precision."""
    dtype = compute_dtype(student)
    return (student.to(dtype) - teacher.detach().to(student.device, dtype)).square()


def _removed_tokens(noise: Tensor, shape: tuple[int, int], part: float) -> Tensor:
    """``(B, N)``, True = removed: all but the ``floor(N (1 - part))`` with the smallest noise."""
    check_real(noise, "noise", check=False)
    check_shape(noise, "noise, one number per token,", shape)
    staying = noise.argsort(dim=1, stable=True)[:, : int(shape[1] * (1 - part))]
    return torch.ones(shape, dtype=torch.bool, device=noise.device).scatter(1, staying, False)


def _as_picture(tokens: Tensor, grid: tuple[int, int] | None) -> Tensor:
    count = tokens.shape[1]
    height, width = grid or (math.isqrt(count),) * 2
    if height * width != count:
        rule = f"grid must hold the {count} patch tokens, in rows and columns"
        raise ShdError("argument-shape", f"{rule}; got {grid or 'none, and no square'}")
    return tokens.mT.reshape(len(tokens), -1, height, width)


LAYER_NORM_EPSILON = 1e-5


class OrthogonalProjection(nn.Module):
    """A trained matrix ``(D_t, D_s)`` whose rows or columns stay orthonormal.

    It is the exponential of a skew-symmetric matrix, cut to size (PyTorch's parametrisation), so that it preserves
    lengths and angles and cannot learn in place of the student's features.
    """

    def __init__(self, student_dim: int, teacher_dim: int) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(student_dim, teacher_dim, bias=False), orthogonal_map="matrix_exp")

    @property
    def matrix(self) -> Tensor:
        """W ``(D_t, D_s)``, attached to its parameters."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, features: Tensor) -> Tensor:
        """``(..., D_s)`` to ``(..., D_t)``."""
        return F.linear(features, self.matrix)


@without_autocast
def vkd(
    student_logits: Tensor,
    labels: Tensor,
    distillation_logits: Tensor,
    targets: Targets,
    student_features: Tensor,
    teacher_features: Tensor,
    projection: Tensor,
    *,
    kd_weight: float = 1.0,
    feature_weight: float = 1.0,
    temperature: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``CE + g T^2 mean KL(P || Q_dist) + a SmoothL1(W pool(S), LN(pool(T)))``.

    ``SmoothL1(x)`` is ``x^2 / 2`` where ``|x| < 1``, else ``|x| - 1/2``; pool is the mean over positions, and LN has
    no parameters and an epsilon of 1e-5.
    Every row counts; the first two terms are means over B, the third is one over B and D_t. Weights need not sum to
    one. Defaults are those of VkD's ImageNet training (a = g = T = 1; its ``engine.py``). Logits and labels are those
    of ``deit_soft``; ``shd`` needs a transformer teacher (the published one is convolutional).

    Args:
        student_features: patch tokens after the final norm ``(B, N, D_s)``, class and distillation token left out.
        teacher_features: a convolutional teacher's last features ``(B, D_t, h, w)``, or tokens ``(B, M, D_t)``.
        projection: W ``(D_t, D_s)`` with orthonormal rows or columns, as of ``OrthogonalProjection(...).matrix``.
        kd_weight: g.
        feature_weight: a.

    Returns:
        The terms ``cross_entropy`` (1), ``kd`` (g) and ``features`` (a).
    """
    weights = check_weight("kd_weight", kd_weight), check_weight("feature_weight", feature_weight)
    logits, checked = prepare(student_logits, labels, distillation_logits, all_count="vkd", check=check)
    soft = kd_loss(targets, distillation_logits, temperature=temperature, check=check)
    check_real(student_features, "student_features", check=check, ndim=3)
    check_real(teacher_features, "teacher_features", check=check)
    check_real(projection, "projection", check=check, ndim=2)
    dtype = compute_dtype(student_features, projection)
    student = student_features.to(dtype).mean(1)
    teacher = _pool(teacher_features.detach().to(student.device, dtype))
    fit = tuple(projection.shape) == (teacher.shape[-1], student.shape[-1]) and len(student) == len(teacher)
    rule = "projection must be (D_t, D_s), and both features of one batch"
    check_shapes(fit, rule, projection, teacher_features, student_features)
    target = F.layer_norm(teacher, teacher.shape[-1:], eps=LAYER_NORM_EPSILON)
    features = F.smooth_l1_loss(F.linear(student, projection.to(dtype)), target)
    return join(
        shd,
        cross_entropy=Term(label_loss(logits, checked), 1.0),
        kd=Term(soft, weights[0]),
        features=Term(features, weights[1]),
    )


def _pool(features: Tensor) -> Tensor:
    """One vector a sample ``(B, D_t)``: the mean over positions."""
    rule = "teacher_features must be (B, D_t, h, w), or tokens (B, M, D_t)"
    check_shapes(features.ndim in (3, 4), rule, features)
    return features.mean(1) if features.ndim == 3 else features.mean((2, 3))
