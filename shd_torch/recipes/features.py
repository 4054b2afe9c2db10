"""A recipe on features: ViTKD mimics the first layers and generates removed tokens of the last."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_torch.checks import check_real, check_shape, compute_dtype
from shd_torch.recipes.terms import SHD, Term, Terms, check_weight, join


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
    # Stable: of equal noise the first tokens stay, on every device.
    staying = noise.argsort(dim=1, stable=True)[:, : int(shape[1] * (1 - part))]
    return torch.ones(shape, dtype=torch.bool, device=noise.device).scatter(1, staying, False)


def _as_picture(tokens: Tensor, grid: tuple[int, int] | None) -> Tensor:
    count = tokens.shape[1]
    height, width = grid or (math.isqrt(count),) * 2
    if height * width != count:
        rule = f"grid must hold the {count} patch tokens, in rows and columns"
        raise ShdError("argument-shape", f"{rule}; got {grid or 'none, and no square'}")
    return tokens.mT.reshape(len(tokens), -1, height, width)
