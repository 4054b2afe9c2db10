"""ViTKD: mimic the first layers, generate the last one from half of its tokens (REC-16 to REC-18)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_torch.checks import check_real, compute_dtype
from shd_torch.recipes.terms import SHD, Term, Terms, check_weight, join


class ViTKD(nn.Module):
    """``a / B sum_l ||F_l(S_l) - T_l||^2 + b / (r B) ||M (G(mask(F(S))) - T)||^2`` (REC-16 to REC-18).

    F are linear maps to the teacher's width, G is a convolution, ReLU and a convolution (3 x 3) over the grid of
    patches, mask() puts a learned token in the place of removed ones, and M keeps the removed ones alone. Both terms
    are *sums* over tokens and features divided by B, which is what the small weights are for. Its parameters are
    trained beside the student's and thrown away after. The published recipe adds it to the cross entropy, or to
    ``nkd``: ``nkd(...) + projector(...)``. Defaults are cls_KD's for DeiT (two layers, a = 3e-5, b = 3e-6, r = .5).

    Args:
        student_dim: D_s.
        teacher_dim: D_t.
        num_layers: first layers that are mimicked.
        mimic_weight: a.
        generate_weight: b.
        removed: r, the part of the tokens that is removed, in (0, 1).

    Raises:
        ShdError: ``argument-value``.
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
        self.removed = check_number("removed", removed, "REC-17", above=0, most=1)
        if self.removed == 1.0:
            raise ShdError("argument-value", f"removed must lie between 0 and 1; got {removed!r}", "REC-17")
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
        """The terms of a batch; class and distillation tokens are left out by the caller.

        Args:
            student_layers: patch tokens of the first layers, each ``(B, N, D_s)``.
            student_last: patch tokens after the final norm ``(B, N, D_s)``.
            teacher_layers: as many, each ``(B, N, D_t)``.
            teacher_last: after the teacher's final norm ``(B, N, D_t)``.
            noise: ``(B, N)``, one number a token: those with the largest are removed; drawn here where it is None.
            grid: rows and columns of patches; default a square.
            shd: the attention term beside it.
            check: look at the values, which makes the host wait for the device.

        Returns:
            The terms ``mimic`` (weight a) and ``generate`` (weight b / r).

        Raises:
            ShdError: ``argument-shape``, ``argument-dtype``, ``not-finite``.
        """
        self._check(student_layers, student_last, teacher_layers, teacher_last, check)
        batch, tokens, _ = student_last.shape
        mimic = torch.zeros((), device=self.mask_token.device)
        for project, student, teacher in zip(self.mimic, student_layers, teacher_layers, strict=True):
            mimic = mimic + _squares(project(student), teacher).sum() / batch
        if noise is None:
            noise = torch.rand((batch, tokens), device=student_last.device)
        gone = _removed_tokens(noise, (batch, tokens), self.removed)[..., None]
        made = self.generate(_as_picture(torch.where(gone, self.mask_token, self.project(student_last)), grid))
        generated = _squares(made.flatten(2).mT, teacher_last).masked_fill(~gone, 0.0).sum() / batch
        return join(
            shd,
            mimic=Term(mimic, self.mimic_weight),
            generate=Term(generated, self.generate_weight / self.removed),
        )

    def _check(
        self,
        student_layers: Sequence[Tensor],
        student_last: Tensor,
        teacher_layers: Sequence[Tensor],
        teacher_last: Tensor,
        check: bool,
    ) -> None:
        width, depth = self.project.out_features, len(self.mimic)
        if len(student_layers) != depth or len(teacher_layers) != depth:
            raise ShdError(
                "argument-shape",
                f"student_layers and teacher_layers must be {depth} each; "
                f"got {len(student_layers)} and {len(teacher_layers)}",
                "REC-16",
            )
        students, teachers = [*student_layers, student_last], [*teacher_layers, teacher_last]
        for number, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
            layer = None if number == depth else number
            check_real(
                student, "student_last" if layer is None else "student_layers", check=check, ndim=3, layer=layer
            )
            check_real(
                teacher, "teacher_last" if layer is None else "teacher_layers", check=check, ndim=3, layer=layer
            )
            wanted = (*student_last.shape[:2], self.project.in_features)
            if tuple(student.shape) != wanted or tuple(teacher.shape) != (*wanted[:2], width):
                raise ShdError(
                    "argument-shape",
                    f"{'the last layers' if layer is None else f'layers {layer}'} must be {wanted} of the student "
                    f"and {(*wanted[:2], width)} of the teacher, patch tokens alone; "
                    f"got {tuple(student.shape)} and {tuple(teacher.shape)}",
                    "REC-16",
                )


def _squares(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared differences, which are summed in no half precision."""
    dtype = compute_dtype(student)
    return (student.to(dtype) - teacher.detach().to(student.device, dtype)).square()


def _removed_tokens(noise: Tensor, shape: tuple[int, int], part: float) -> Tensor:
    """``(B, N)``, True = removed: all but the ``floor(N (1 - part))`` with the smallest noise."""
    check_real(noise, "noise", check=False)
    if tuple(noise.shape) != shape:
        raise ShdError(
            "argument-shape", f"noise must be one number a token {shape}; got {tuple(noise.shape)}", "REC-17"
        )
    kept = noise.argsort(dim=1, stable=True)[:, : int(shape[1] * (1 - part))]
    return torch.ones(shape, dtype=torch.bool, device=noise.device).scatter(1, kept, False)


def _as_picture(tokens: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """``(B, N, D)`` as ``(B, D, h, w)``."""
    count = tokens.shape[1]
    height, width = (math.isqrt(count), math.isqrt(count)) if grid is None else grid
    if height * width != count:
        raise ShdError(
            "argument-shape",
            f"grid must hold the {count} patch tokens, in rows and columns; got {grid or 'none, and no square'}",
            "REC-18",
        )
    return tokens.mT.reshape(len(tokens), -1, height, width)
