"""The student layers that are taught, and how many layers the student was meant to have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from shd_ref.errors import ShdError


class TaughtLayers(tuple[int, ...]):
    """Numbers of student layers, a tuple, with the number of layers that their teaching was made for.

    A layer map spreads the teacher over so many layers: for another student the same numbers would mean other depths.
    So whoever captures a student for these layers refuses one that makes more or fewer attention calls.

    Args:
        numbers: zero-based, in any order.
        num_student_layers: L_s; None where explicit pairs say which layers are taught, whatever others there are.

    Source: section 3 (t = s * L_t / L_s). Specification: CACHE-114.
    """

    num_student_layers: int | None

    def __new__(cls, numbers: Iterable[int], num_student_layers: int | None = None) -> Self:
        """A tuple takes its content when it is made."""
        self = super().__new__(cls, numbers)
        self.num_student_layers = num_student_layers
        return self

    def __getnewargs__(self) -> tuple[tuple[int, ...], int | None]:
        """What a copy in another process is made of."""
        return tuple(self), self.num_student_layers

    def check_calls(self, num_calls: int, name: str) -> None:
        """Refuse a student of another depth than was meant.

        Args:
            num_calls: attention calls of a forward pass.
            name: of the student.

        Raises:
            ShdError: ``cache-mismatch``.
        """
        meant = self.num_student_layers
        if meant is not None and num_calls != meant:
            raise ShdError(
                "cache-mismatch",
                f"a forward pass of {name} must make {meant} attention calls, as its teaching was made for {meant} "
                f"student layers; got {num_calls}: precompute with --student-layers {num_calls} (a live "
                f"teacher: layer_map={num_calls}), or with explicit pairs (--layers) where some are not to be taught",
                "CACHE-114",
            )


def unite_layers(taught: Sequence[tuple[int, ...]]) -> TaughtLayers:
    """The layers that several teachers teach, ascending.

    Raises:
        ShdError: ``cache-mismatch`` where they are meant for students of different depths.
    """
    meant = {layers.num_student_layers for layers in taught if isinstance(layers, TaughtLayers)} - {None}
    if len(meant) > 1:
        counts = " and ".join(str(count) for count in sorted(count for count in meant if count is not None))
        raise ShdError(
            "cache-mismatch",
            f"all teachers must be mapped to one number of student layers; got {counts}: precompute, or make the "
            "live teacher, for this student",
            "CACHE-114",
        )
    return TaughtLayers(sorted({layer for layers in taught for layer in layers}), meant.pop() if meant else None)
