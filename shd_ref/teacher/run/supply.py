"""Inputs of a decoder that need not be in the data, since they follow from what is: an empty past, positions.

A graph exported with past (``text-generation-with-past``) takes the keys and values of earlier positions. Supervision
is of whole samples, so there are none: the past is fed with length 0. Positions are counted from the attention mask,
as generation does it on the hub, so that padding in front moves no token (CACHE-36).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.inputs import InputSizes, InputSpec, Part, past_problem

SUPPLIED: Final[frozenset[Part]] = frozenset({"past", "positions", "branch"})
"""Parts that are supplied where the data lack them."""


class Supply:
    """What is fed beside the data.

    Past keys and values are empty, ``position_ids`` ``(B, L)`` are the number of real tokens before each, and 0 on
    padding, and the flag of a graph with two bodies is False.

    Args:
        specs: the inputs to supply, of the parts ``SUPPLIED``.

    Raises:
        ShdError: ``inputs-invalid`` for a past that cannot be empty, and for positions of another shape.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = tuple(specs)
        for spec in self._specs:
            if spec.part == "past":
                _check_past(spec)
            elif spec.part == "positions" and len(spec.shape) != 2:
                raise ShdError(
                    "inputs-invalid",
                    f"inputs must hold {spec.name}, since the graph takes it with {len(spec.shape)} axes and only "
                    "(B, L) follows from the attention mask: give it as a column",
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs that are supplied, sorted."""
        return tuple(sorted(spec.name for spec in self._specs))

    @property
    def description(self) -> str:
        """What is supplied, in a line; empty for nothing."""
        past = [spec.name for spec in self._specs if spec.part == "past"]
        parts = [f"{past[0]}{f' and {len(past) - 1} more' * (len(past) > 1)} (an empty past)"] if past else []
        parts += [f"{spec.name} (counted from the mask)" for spec in self._specs if spec.part == "positions"]
        parts += [f"{spec.name} (false)" for spec in self._specs if spec.part == "branch"]
        return ", ".join(parts)

    def arrays(self, rows: int, length: int, mask: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """The arrays of a batch.

        Args:
            rows: its samples.
            length: its positions.
            mask: ``(B, L)`` of 0 and 1; None where every position is a token.
        """
        shapes = InputSizes(rows, length).shapes(self._specs)
        supplied: dict[str, NDArray[Any]] = {}
        for spec in self._specs:
            if spec.part == "positions":
                tokens = np.ones((rows, length), np.int64) if mask is None else mask.astype(np.int64)
                supplied[spec.name] = ((tokens.cumsum(axis=1) - 1) * tokens).astype(spec.dtype)
            else:
                supplied[spec.name] = np.zeros(shapes[spec.name], spec.dtype)
        return supplied


def _check_past(spec: InputSpec) -> None:
    problem = past_problem([spec])
    if problem is not None:
        raise ShdError("inputs-invalid", f"inputs must hold {spec.name}: {problem}")
    # A stack, (2, B, H, past, d), stands before the batch: heads and width are among the last three axes.
    opened = [place - len(spec.shape) for place, axis in enumerate(spec.shape) if not isinstance(axis, int)]
    if len(opened) > 2 or sum(place >= max(-3, 1 - len(spec.shape)) for place in opened) > 1:
        raise ShdError(
            "inputs-invalid",
            f"{spec.name} must have open axes for the batch and the past alone, so that it can be fed empty; got "
            f"the shape {list(spec.shape)}: re-export with heads and width fixed, or with use_cache off",
        )
