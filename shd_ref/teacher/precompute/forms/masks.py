"""Which keys a teacher's own mask leaves its rows: described by the manifest, and held against every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import row_bounds
from shd_ref.errors import ShdError
from shd_ref.teacher.run.outputs import SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


def describe_mask(spans: Sequence[NDArray[Any]]) -> tuple[str, tuple[int | None, ...]]:
    """What a manifest says of the mask: the support of all layers, and each layer's window (CACHE-144).

    Whether all rows of all samples keep to it is for ``check_mask`` to find.

    Args:
        spans: of each layer ``(H_t, n, 3)``, as ``add_spans`` makes them, of one of the longest samples, all of whose
            positions count.

    Returns:
        ``"causal"`` or ``"full"``; windows, None where every row of the support is seen.
    """
    windows: list[int | None] = []
    for layer in spans:
        first, n = int(layer[0, -1, 0]), layer.shape[1]
        windows.append(None if first == 0 else n - first)
    ahead = any((layer[..., 1] > np.arange(layer.shape[1])).any() for layer in spans)
    return "full" if ahead or spans[0].shape[1] == 1 else "causal", tuple(windows)


def read_spans(work: TeacherRun, outputs: StudentOutputs) -> list[NDArray[Any]]:
    """What ``describe_mask`` takes, of the first sample of a batch.

    A sample with padding in front is run again without any: a window that is shorter than the longest sample shows
    in a row that looks back as far as any sample's.

    Args:
        work: the run.
        outputs: of longest samples.
    """
    index = outputs.batch.indices[0]
    if work.inputs.firsts[index]:
        alone = work.inputs.unmasked(work.inputs.batch([index]))
        outputs = work.squeeze(alone)[outputs.student.number]
    length = work.sample(outputs, 0).extent.length
    return [layer.spans[0, :, :length] for layer in outputs.layers]


def check_mask(sample: SampleOutputs, support: str, windows: Sequence[int | None]) -> None:
    """Refuse a teacher that masked this sample in another way than ``describe_mask`` says (CACHE-143).

    Raises:
        ShdError: ``graph-unsupported``.
    """
    first, length = sample.extent.first, sample.extent.length
    for outputs, window in zip(sample.layers, windows, strict=True):
        layer = outputs.layer
        low, high = row_bounds(length - first, support, window)
        expected = np.stack([first + low, first + high, high - low + 1], axis=-1)
        found = outputs.spans[:, first:length]
        wrong = np.argwhere((found != expected).any(axis=-1))
        if len(wrong):
            head, row = (int(place) for place in wrong[0])
            seen, wanted = found[head, row].tolist(), expected[row].tolist()
            raise ShdError(
                "graph-unsupported",
                f"attention site {layer.site.layer} ({layer.site.name}) must let a row see the keys that causality "
                f"and a window say, {wanted[2]} from {wanted[0]} to {wanted[1]} for row {first + row} "
                f"({support}, window {window}); got {seen[2]} from {seen[0]} to {seen[1]} in head "
                f"{head}: it has a mask of its own; use --form maps",
                "CACHE-143",
            )
