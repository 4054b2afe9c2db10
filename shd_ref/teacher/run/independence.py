"""Whether maps, logits and hidden states are those of single samples, by a few samples of the user's data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, graph_unsupported
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.independence import NOT_TOLD, Allowed, Arrays, Trial, distance
from shd_ref.teacher.opening.model import all_nodes, onnx
from shd_ref.teacher.run.inputs import Batch, ModelInputs

CUT: Final = 128
"""Positions of a cut."""
_FRONT: Final = 16
"""Of these, padding in front at most."""


def cut_batch(inputs: ModelInputs, batch: Batch) -> Batch | None:
    """The samples, cut where the first two of them differ, padding in proportion; None where they are short."""
    cut: dict[str, NDArray[Any]] = {}
    for names, mask in inputs.sequences:
        longest = max((batch.arrays[name].shape[1] for name in names), default=0)
        if longest > CUT:
            arrays = {name: batch.arrays[name] for name in names if batch.arrays[name].shape[1] == longest}
            cut |= _cut(arrays, mask)
    return replace(batch, arrays=inputs.with_supplied(batch.arrays | cut)) if cut else None


def _cut(arrays: Mapping[str, NDArray[Any]], mask: str | None) -> dict[str, NDArray[Any]]:
    """A stretch of one sequence: arrays ``(B, L, ...)``, and which of them is the mask."""
    rows, longest = next(iter(arrays.values())).shape[:2]
    real = arrays[mask] != 0 if mask is not None and mask in arrays else np.ones((rows, longest), dtype=np.bool_)
    lengths = longest - real[:, ::-1].argmax(axis=1)
    differ = [(array[0] != array[min(1, rows - 1)]).reshape(longest, -1).any(axis=1) for array in arrays.values()]
    start = max(int(np.any(differ, axis=0).argmax()), int(real.argmax(axis=1).max()) - _FRONT)
    start = max(0, min(start, int(lengths.min()) - CUT // 2))  # of a sample that another one continues, its end
    size = min(CUT, longest - start)
    kept = np.maximum(1, size * (lengths - start) // (longest - start))
    counted = np.arange(size) < kept[:, None]
    cut = {}
    for name, array in arrays.items():
        cut[name] = array[:, start : start + size].copy()
        cut[name][~counted] = 0
    return cut


_HELD_BYTES: Final = 2**28
"""Maps that are compared at once, in float32 (but at least those of one site)."""

_BRANCHES: Final = frozenset({"If", "Loop", "Scan"})

_MOST_BATCHES: Final = 8

_MOST_GROUPS: Final = 1000


def check_samples(
    model: onnx.ModelProto,
    sites: Mapping[str, AttentionSite],
    inputs: ModelInputs,
    run: Callable[[Sequence[str], Batch], Arrays],
    targets: Mapping[str, str] | None = None,
) -> None:
    """Refuse what is not of single samples, by a few of them, cut short and, where that does not show it, whole.

    ``sites`` are by the output with their maps ``(B, H, L, S)``, or what is made of these; ``targets`` say what
    others are.
    """
    allowed, pending = Allowed.of(model), [*sites, *(targets or {})]
    heads = max((site.num_heads or 1 for site in sites.values()), default=1)
    # A graph that branches may treat long samples in another way.
    pairs = () if any(node.op_type in _BRANCHES for node in all_nodes(model.graph)) else _pairs(inputs)
    cuts = itertools.takewhile(lambda cut: cut is not None, (cut_batch(inputs, inputs.batch(pair)) for pair in pairs))
    whole = ((inputs.batch(pair), False) for pair in _pairs(inputs))
    for batch, is_cut in itertools.chain(((cut, True) for cut in cuts if cut is not None), whole):
        rows = len(batch.arrays[inputs.names[0]])
        longest = max((array.shape[1] for array in batch.arrays.values() if array.ndim > 1), default=0)
        sampled = [name for name in inputs.names if len(batch.arrays[name]) == rows]
        at_once = max(1, _HELD_BYTES // (4 * (2 * rows + 1) * heads * max(longest, 1) ** 2))
        told = set()
        for start in range(0, len(pending), at_once):
            names = pending[start : start + at_once]

            def run_changed(arrays: Arrays, names: Sequence[str] = names, batch: Batch = batch) -> Arrays:
                # What is supplied may be a flag, or have its samples on another axis: it is made again.
                return run(names, replace(batch, arrays=inputs.with_supplied(arrays)))

            try:
                trial = Trial(run_changed, batch.arrays, sampled, allowed, grows=inputs.fixed_batch is None)
                findings = {name: trial.judge(name, "batch-heads", 1) for name in names}
            except ShdError:
                if not is_cut:
                    raise
                continue  # not every graph runs on every length
            for name, finding in findings.items():
                if finding.reason is None and finding.note != NOT_TOLD:
                    told.add(name)
                elif finding.reason is not None and not is_cut:  # only whole samples show what is wrong
                    raise graph_unsupported(_describe(name, sites, targets or {}, finding.reason))
        pending = [name for name in pending if name not in told]
        if not pending:
            return


def check_padded(
    model: onnx.ModelProto,
    inputs: ModelInputs,
    run: Callable[[Sequence[str], Batch], Arrays],
    targets: Mapping[str, str],
) -> None:
    """Refuse targets that padding changes: a head may look for a padding id, which graphs of others do not state."""
    pair = next((pair for pair in _pairs(inputs) if len({int(inputs.lengths[index]) for index in pair}) > 1), None)
    allowed = Allowed.of(model)
    if pair is None or allowed.same_samples or not targets or inputs.fixed_batch is not None:
        return
    place = int(np.argmin(inputs.lengths[list(pair)]))
    together, alone = run([*targets], inputs.batch(pair)), run([*targets], inputs.batch([pair[place]]))
    for name, title in targets.items():
        first, second = alone[name][0], together[name]
        counted = tuple(map(slice, first.shape))
        apart = distance(second[0][counted], second[1][counted])
        limit = max(allowed.share * apart, allowed.rounding * float(np.abs(first).max(initial=1.0)))
        if not distance(first, second[place][counted]) <= limit:
            rule = f"{title} cannot be stored: padding changes them, as where a model looks for a padding id that the"
            raise graph_unsupported(f"{rule} graph does not state: run samples alone (--batch-size 1)")


def moves_in_front(
    inputs: ModelInputs, run: Callable[[Sequence[str], Batch], Arrays], targets: Sequence[str], rounding: float
) -> bool:
    """Whether padding in front of a sample, which its mask hides, moves what the graph makes of it."""
    if inputs.mask is None or inputs.fixed_batch is not None:
        return False
    batch = inputs.shortest()
    try:
        first, second = run(targets, batch), run(targets, inputs.padded_in_front(batch, _FRONT // 4))
    except ShdError:  # of a graph that has no place for it
        return False
    for name in targets:
        kept = tuple(slice(-size, None) for size in first[name].shape)
        if not distance(first[name], second[name][kept]) <= 10 * rounding * np.abs(first[name]).max(initial=1.0):
            return True
    return False


def _describe(name: str, sites: Mapping[str, AttentionSite], targets: Mapping[str, str], reason: str) -> str:
    if name in targets:
        return f"{targets[name]} cannot be stored: {reason.replace('its maps', 'its rows')}"
    return f"{sites[name].label} cannot be squeezed: {reason}"


def _pairs(inputs: ModelInputs) -> Iterator[Sequence[int]]:
    """Batches of two samples, of the shorter ones, the longest of these first; of one, where no two run together."""
    shorter = np.argsort(inputs.lengths, kind="stable")[: max(2, len(inputs) // 4)]
    groups = list(itertools.islice(inputs.groups(shorter.tolist(), 2), _MOST_GROUPS))
    pairs = [group for group in groups if len(group) > 1]
    yield from pairs[:_MOST_BATCHES] or groups[:1]
