"""Samples on which a teacher gives NaN or infinity: found, named by layer and head, never stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.run.outputs import SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


@dataclass(frozen=True)
class Fault:
    """Where a teacher first went wrong on a sample.

    Attributes:
        index: of the sample in the data set.
        key: its sample key.
        student_layer: whose supervision it is; None where it is of all.
        site: the teacher's attention; empty where that is finite.
        head: the teacher's, or None where its maps and values are finite and what is made of them is not.
        target: what is not finite where the attention is: the logits, or a hidden state.
    """

    index: int
    key: str
    student_layer: int | None = None
    site: str = ""
    head: int | None = None
    target: str | None = None

    @property
    def reason(self) -> str:
        """What a receipt says about it."""
        if self.target is not None:
            return f"the teacher gives NaN or infinity in {self.target}"
        what = "in what is made of its maps" if self.head is None else f"head {self.head}"
        return f"the teacher gives NaN or infinity at layer {self.student_layer} ({self.site}), {what}"

    def error(self) -> ShdError:
        """The error that stops a run."""
        return ShdError(
            "not-finite",
            f"sample {self.index} (key {self.key}): {self.reason}: look at its inputs, or skip such samples "
            "(--on-error skip)",
            "MAP-5",
        )


def find_faults(work: TeacherRun, outputs: StudentOutputs) -> list[Fault]:
    """The samples of a batch whose supervision is not finite on rows that count.

    Args:
        work: the run.
        outputs: what it gave one student, with or without check outputs.
    """
    indices = outputs.batch.indices
    suspect = np.zeros(len(indices), dtype=np.bool_)
    for layer in outputs.layers:
        rows = np.array(True) if layer.row_mask is None else layer.row_mask[:, None, :]
        suspect |= ~np.isfinite(layer.alphas).reshape(len(indices), -1).all(axis=1)
        if layer.factors is not None:
            for factor in (layer.factors.queries, layer.factors.keys):
                suspect |= (~np.isfinite(factor).all(axis=-1) & rows).any(axis=(1, 2))
        elif layer.codes is not None:
            suspect |= (_is_doubtful(layer.codes) & rows).any(axis=(1, 2))
    numbers = np.flatnonzero(suspect).tolist()
    if outputs.layers and outputs.layers[0].check is not None:
        found = [_first_fault(work.sample(outputs, number)) for number in numbers]
    else:
        found = []
        for part in work.checked_batches(indices[number] for number in numbers):
            checked = work.squeeze(part, checked=True)[outputs.student.number]
            found += [_first_fault(work.sample(checked, number)) for number in range(len(part.indices))]
    faults = [fault for fault in found if fault is not None]
    if outputs.targets.logits is None and not outputs.targets.hidden:
        return faults
    known = {fault.index for fault in faults}
    return faults + [
        fault
        for number, index in enumerate(indices)
        if index not in known and (fault := _fault_of_targets(work, work.sample(outputs, number))) is not None
    ]


def _fault_of_targets(work: TeacherRun, sample: SampleOutputs) -> Fault | None:
    """What is not finite on a row that counts; classes that only pad the vocabulary may be."""
    mask = sample.targets.row_mask
    targets = {f"hidden state {layer}": states for layer, states in sample.targets.hidden.items()}
    if sample.targets.logits is not None:
        targets["its logits"] = sample.targets.logits[..., : work.options.vocab_size]
    for title, rows in targets.items():
        by_position = mask is not None and rows.shape[:-1] == mask.shape  # others are refused for that
        counted = rows[mask] if by_position else rows
        if not np.isfinite(counted).all():
            return Fault(sample.index, sample.key, target=title)
    return None


def _is_doubtful(codes: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows without mass, and of float codes those with NaN or infinity, in one pass over the codes.

    A graph's quantiser turns NaN into a row of zeros, as it does a fully masked row: the maps tell which.
    """
    if codes.dtype.kind == "u":
        empty: NDArray[np.bool_] = codes.max(axis=-1, initial=0) == 0
        return empty
    with np.errstate(invalid="ignore"):  # infinities of both signs
        sums: NDArray[Any] = codes.sum(axis=-1)
    unsure: NDArray[np.bool_] = ~np.isfinite(sums) | (sums == 0)
    return unsure


def _first_fault(sample: SampleOutputs) -> Fault | None:
    for each in sample.layers:
        check, layer = each.checked, each.layer
        counted = np.ones((1, 1), dtype=np.bool_) if each.row_mask is None else each.row_mask[None]  # (1, L)
        finite = np.isfinite(check.probs).all(axis=-1)
        sound = np.isfinite(check.values).all(axis=-1)
        # Values are those of the keys, which are the rows where the map is square.
        finite &= sound if sound.shape == finite.shape else sound.all(axis=-1, keepdims=True)
        heads = np.flatnonzero((~finite & counted).any(axis=-1))
        merged_is_finite = (np.isfinite(check.merged).all(axis=-1) | ~counted).all()
        if len(heads) or not merged_is_finite or not np.isfinite(each.alphas).all():
            head = int(heads[0]) if len(heads) else None
            return Fault(sample.index, sample.key, layer.student_layer, layer.site.name, head)
    return None
