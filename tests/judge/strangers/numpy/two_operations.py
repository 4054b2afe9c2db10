"""Two operations of the specification, as somebody would begin who has NumPy and the text."""

import math

import numpy as np


class RefusedError(Exception):
    """Carries the code that chapter ERR asks for."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def softmax(attn_logits, attn_mask=None, temperature=1.0):
    """MAP-1, MAP-2."""
    z = np.asarray(attn_logits)
    if z.dtype.kind not in "fiu":
        raise RefusedError("argument-dtype")
    if z.ndim < 2:
        raise RefusedError("argument-shape")
    if np.isnan(z).any() or np.isposinf(z).any():
        raise RefusedError("not-finite")
    if isinstance(temperature, bool) or not (temperature > 0 and math.isfinite(temperature)):
        raise RefusedError("argument-value")
    z = z.astype(np.float64)
    if attn_mask is not None:
        mask = np.asarray(attn_mask)
        if mask.dtype != bool:
            raise RefusedError("argument-dtype")
        try:
            z = np.where(np.broadcast_to(mask, z.shape), z, -np.inf)
        except ValueError:
            raise RefusedError("argument-shape") from None
    top = z.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        e = np.exp((z - np.where(np.isinf(top), 0.0, top)) / temperature)
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def as_integers(*values):
    """ERR-6: integers of any kind, and no booleans."""
    if any(isinstance(value, bool) or not isinstance(value, int | np.integer) for value in values):
        raise RefusedError("layers-invalid")
    return [int(value) for value in values]


def layer_map(num_teacher_layers, num_student_layers, pairs=None):
    """LAYER-1 to LAYER-6."""
    num_teacher_layers, num_student_layers = as_integers(num_teacher_layers, num_student_layers)
    if num_teacher_layers < 1 or num_student_layers < 1:
        raise RefusedError("layers-invalid")
    if pairs is None:
        if num_student_layers > num_teacher_layers:
            raise RefusedError("layers-invalid")
        t, s = num_teacher_layers, num_student_layers
        return [(i - 1, (2 * i * t + s) // (2 * s) - 1) for i in range(1, s + 1)]
    students = [pair[0] for pair in pairs]
    if not students or len(set(students)) < len(students):
        raise RefusedError("layers-invalid")
    for pair in pairs:
        if len(pair) != 2:
            raise RefusedError("layers-invalid")
        pair = as_integers(*pair)
        if not (0 <= pair[0] < num_student_layers and 0 <= pair[1] < num_teacher_layers):
            raise RefusedError("layers-invalid")
    return sorted(tuple(as_integers(*pair)) for pair in pairs)
