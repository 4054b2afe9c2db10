"""The interface: what a precompute run asks of the maker of a form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import CodecError, CodedFactors, Extent, NewRecord
from shd_ref.teacher.run.outputs import LayerOutputs, SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.tolerances import load_tolerances

FormT = TypeVar("FormT")


class Maker(ABC, Generic[FormT]):
    """Makes records of one form from the outputs of a run."""

    @abstractmethod
    def describe(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> FormT:
        """The form as the manifest will have it.

        Args:
            work: the run.
            outputs: of its longest samples, after check outputs were looked at.
            squeeze: the members that all forms of attention share.
        """

    @abstractmethod
    def check(self, form: FormT, samples: Sequence[SampleOutputs]) -> None:
        """Refuse a teacher that this form cannot hold (``graph-unsupported``), before anything is written."""

    def compare(self, work: TeacherRun, sample: SampleOutputs) -> None:
        """Refuse maps that this form cannot make (``graph-unsupported``), of some layers with check outputs."""

    @abstractmethod
    def extent(self, form: FormT, sample: SampleOutputs) -> Extent:
        """The extent that the record of a sample states."""

    @abstractmethod
    def make(self, form: FormT, sample: SampleOutputs) -> list[NDArray[Any] | CodedFactors]:
        """What the record of a sample holds of each layer; arrays that share no memory with the batch."""

    @abstractmethod
    def measure(self, form: FormT, samples: Sequence[SampleOutputs], records: Sequence[NewRecord]) -> CodecError:
        """What coding cost the merged maps of samples with check outputs, on the rows that count."""

    @abstractmethod
    def bound(self, form: FormT, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]) -> NDArray[np.float64]:
        """The total variation that coding may cost each row, ``(H_s, n)`` (CACHE-91).

        Args:
            form: of the manifest.
            layer: of one sample, as the teacher gives it now.
            extent: of its record.
            merged: its merged maps, cut to the record.
        """


def tolerance_of(name: str, dtype: str) -> float:
    """A limit of total variation by the teacher's dtype."""
    table = load_tolerances()[name]["total_variation"]
    return float(table.get(dtype, table["float32"]))
