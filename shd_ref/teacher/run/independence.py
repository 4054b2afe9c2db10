"""Whether maps, logits and hidden states are those of single samples, by a few samples of the user's data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.independence import NOT_TOLD, Allowed, Arrays, Trial
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.run.inputs import Batch, ModelInputs

_HELD_BYTES: Final = 2**28
"""Maps that are compared at once, in float32 (but at least those of one site)."""


_MOST_BATCHES: Final = 8


_MOST_GROUPS: Final = 1000


def check_samples(
    model: onnx.ModelProto,
    sites: Mapping[str, AttentionSite],
    inputs: ModelInputs,
    run: Callable[[Sequence[str], Batch], Arrays],
    targets: Mapping[str, str] | None = None,
) -> None:
    """Refuse what is not of single samples, by a few samples of the user's data.

    Args:
        model: the teacher.
        sites: by the name of an output with their maps ``(B, H, L, S)``, or what is made of these.
        inputs: the samples.
        run: gives some of these outputs on a batch.
        targets: what other outputs are, by name: logits and hidden states, with a first axis B.

    Raises:
        ShdError: ``graph-unsupported``.
    """
    allowed = Allowed.of(model)
    pending = [*sites, *(targets or {})]
    for indices in _pairs(inputs):
        batch = inputs.batch(indices)
        heads = max((site.num_heads or 1 for site in sites.values()), default=1)
        entries = heads * max(inputs.longest_axis(indices), 1) ** 2
        rows = len(batch.arrays[inputs.names[0]])
        sampled = [name for name in inputs.names if len(batch.arrays[name]) == rows]
        at_once = max(1, _HELD_BYTES // (4 * (2 * rows + 1) * entries))
        told = set()
        for start in range(0, len(pending), at_once):
            names = pending[start : start + at_once]
            runner = functools.partial(_run_changed, run, names, batch, inputs)
            trial = Trial(runner, batch.arrays, sampled, allowed, grows=inputs.fixed_batch is None)
            for name in names:
                finding = trial.judge(name, "batch-heads", 1)
                if finding.reason is not None:
                    raise ShdError("graph-unsupported", _describe(name, sites, targets or {}, finding.reason))
                if finding.note != NOT_TOLD:
                    told.add(name)
        pending = [name for name in pending if name not in told]
        if not pending:
            return


def _describe(name: str, sites: Mapping[str, AttentionSite], targets: Mapping[str, str], reason: str) -> str:
    if name in targets:
        return f"{targets[name]} cannot be stored: {reason.replace('its maps', 'its rows')}"
    return f"attention site {sites[name].layer} ({sites[name].name}) cannot be squeezed: {reason}"


def _run_changed(
    run: Callable[[Sequence[str], Batch], Arrays],
    names: Sequence[str],
    batch: Batch,
    inputs: ModelInputs,
    arrays: Arrays,
) -> Arrays:
    # What is supplied beside the data may be a single flag, or have its samples on another axis: it is made again.
    return run(names, replace(batch, arrays=inputs.with_supplied(arrays)))


def _pairs(inputs: ModelInputs) -> Iterator[Sequence[int]]:
    """Batches of two samples, of the shorter ones, the longest of these first; of one, where no two run together."""
    shorter = np.argsort(inputs.lengths, kind="stable")[: max(2, len(inputs) // 4)]
    groups = list(itertools.islice(inputs.groups(shorter.tolist(), 2), _MOST_GROUPS))
    pairs = [group for group in groups if len(group) > 1]
    yield from pairs[:_MOST_BATCHES] or groups[:1]
