"""Which layers a shallower student keeps (spec chapter DEPTH)."""

from __future__ import annotations

from collections.abc import Iterable

from shd_ref.errors import ShdError
from shd_ref.integers import as_index


def kept_layers(num_teacher_layers: int, layers: int | Iterable[int]) -> tuple[int, ...]:
    """The teacher layers that a student's are copies of, in order (DEPTH-1, DEPTH-2).

    Args:
        num_teacher_layers: L_t, at least 1.
        layers: how many are kept, spread evenly with the first and the last; or the rising list itself.

    Raises:
        ShdError: ``layers-invalid``.
    """
    teacher = 0
    try:
        teacher = as_index(num_teacher_layers)
        if isinstance(layers, Iterable):
            found = tuple(as_index(layer) for layer in layers)
        else:
            found = _spread(teacher, as_index(layers))
    except TypeError:
        found = ()
    if not found or list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= teacher:
        raise ShdError(
            "layers-invalid",
            f"layers must be a number of 1..{num_teacher_layers}, or a rising list of teacher layers "
            f"0..{teacher - 1}; got {layers!r}",
            "DEPTH-1",
        )
    return found


def _spread(teacher: int, student: int) -> tuple[int, ...]:
    if not 1 <= student <= teacher:
        return ()
    if student == 1:
        return (teacher - 1,)
    steps = student - 1
    return tuple((2 * i * (teacher - 1) + steps) // (2 * steps) for i in range(student))
