"""No attention: records of logits and hidden states alone (CACHE-160)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, CodecError, CodedFactors, Extent, NewRecord
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.forms.maker import Maker
from shd_ref.teacher.run.outputs import LayerOutputs, SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


class NothingMaker(Maker[Any]):
    """Stands where a form of attention would; its form is ``NO_ATTENTION``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> Any:
        """No form."""
        return NO_ATTENTION

    def check(self, form: Any, samples: Sequence[SampleOutputs]) -> None:
        """Refuse nothing."""

    def extent(self, form: Any, sample: SampleOutputs) -> Extent:
        """Padding in front is left out."""
        return Extent(sample.extent.length, sample.extent.first)

    def make(self, form: Any, sample: SampleOutputs) -> list[NDArray[Any] | CodedFactors]:
        """Of no layer."""
        return []

    def measure(self, form: Any, samples: Sequence[SampleOutputs], records: Sequence[NewRecord]) -> CodecError:
        """No error."""
        return NO_ATTENTION  # type: ignore[no-any-return]  # which stands for an error too

    def bound(self, form: Any, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]) -> NDArray[np.float64]:
        """Of no layer: never asked for."""
        raise ShdError("argument-value", "a cache without attention has no maps to compare", "CACHE-160")
