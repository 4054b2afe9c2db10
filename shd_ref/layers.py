"""Layer maps (spec chapter LAYER): which teacher layer teaches which student layer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from shd_ref.errors import ShdError
from shd_ref.integers import as_index


def layer_map(
    num_teacher_layers: int, num_student_layers: int, pairs: Iterable[tuple[int, int]] | None = None
) -> tuple[tuple[int, int], ...]:
    """Pairs ``(student_layer, teacher_layer)``, both zero-based (LAYER-1..6).

    Without ``pairs``, student layer s (one-based) meets teacher layer ``floor(s * L_t / L_s + 1/2)``, so
    that the last layers always meet; 48 and 24 layers pair 4 with 8.

    Args:
        num_teacher_layers: L_t, at least 1.
        num_student_layers: L_s, from 1 to L_t unless ``pairs`` is given.
        pairs: explicit zero-based pairs; student layers may be missing (a pruned layer has no attention)
            but not repeated.

    Raises:
        ShdError: ``layers-invalid`` (LAYER-2, LAYER-4).

    Source: section 3 ("t = s * L_t / L_s"). Deviation: rounding where L_s does not divide L_t (D-6).
    """
    counts = []
    for name, value in (("num_teacher_layers", num_teacher_layers), ("num_student_layers", num_student_layers)):
        try:
            counts.append(as_index(value))
        except TypeError:
            counts.append(0)
        if counts[-1] < 1:
            raise ShdError("layers-invalid", f"{name} must be an integer of at least 1; got {value!r}", "LAYER-2")
    num_teacher_layers, num_student_layers = counts
    if pairs is not None:
        layer_pairs = _read_pairs(pairs)
        for student, teacher in layer_pairs:
            if not (0 <= student < num_student_layers and 0 <= teacher < num_teacher_layers):
                rule = f"pairs must lie in 0..{num_student_layers - 1} and 0..{num_teacher_layers - 1}"
                raise ShdError("layers-invalid", f"{rule}; got ({student}, {teacher})", "LAYER-4")
        return layer_pairs
    if num_student_layers > num_teacher_layers:
        rule = f"num_student_layers must be at most num_teacher_layers={num_teacher_layers}"
        raise ShdError("layers-invalid", f"{rule}; got {num_student_layers}: give explicit pairs", "LAYER-2")
    return tuple(
        # floor(s * L_t / L_s + 1/2) in integers, then zero-based
        (s - 1, (2 * s * num_teacher_layers + num_student_layers) // (2 * num_student_layers) - 1)
        for s in range(1, num_student_layers + 1)
    )


def _read_pairs(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of integers by their student layers, which are distinct."""
    try:
        layer_pairs = sorted((as_index(student), as_index(teacher)) for student, teacher in pairs)
    except (TypeError, ValueError):
        message = f"pairs must hold (student_layer, teacher_layer), integers; got {pairs!r}"
        raise ShdError("layers-invalid", message, "LAYER-4") from None
    if not layer_pairs:
        raise ShdError("layers-invalid", "pairs must name at least one layer; got none", "LAYER-4")
    for (student, _), (following, _) in pairwise(layer_pairs):
        if student == following:
            raise ShdError("layers-invalid", f"pairs must name student layer {student} once; got it twice", "LAYER-4")
    return tuple(layer_pairs)
