"""The interface: how a form's parts are made from a run of the teacher, measured, and compared with another run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from shd_ref.cache import Extent, Form, RowError, SampleRecord
from shd_ref.errors import ShdError
from shd_ref.teacher.run.outputs import BatchOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.tolerances import load_tolerances

FormT = TypeVar("FormT", bound=Form)


class Maker(ABC, Generic[FormT]):
    """Makes parts of records. ``recheck`` may run ``BY_LAYER``."""

    BY_LAYER: ClassVar[bool] = False

    @abstractmethod
    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> FormT | None:
        """The form as the manifest will have it, by longest samples; None where the options do not request it."""

    def files(self, work: TeacherRun, form: FormT) -> Mapping[str, Sequence[Any]]:
        """Pieces of ``form.files``, by name."""
        return {}

    @abstractmethod
    def options(self, form: FormT) -> dict[str, Any]:
        """The ``PrecomputeOptions`` that make such a cache."""

    def compare(self, work: TeacherRun, sample: BatchOutputs) -> None:
        """Refuse maps that this form cannot make (``graph-unsupported``), of some layers with check outputs."""

    @abstractmethod
    def make(self, form: FormT, samples: Sequence[BatchOutputs], extents: Sequence[Extent]) -> list[dict[str, Any]]:
        """The parts of each sample's record, see ``SampleRecord``; arrays that share no memory with the batch."""

    @abstractmethod
    def measure(self, form: FormT, samples: Sequence[BatchOutputs], records: Sequence[SampleRecord]) -> RowError:
        """The error of coding these samples, on the rows that count; of attention they have check outputs."""

    @abstractmethod
    def recheck(
        self, form: FormT, dtype: str, sample: BatchOutputs, record: SampleRecord, entries: int | None = None
    ) -> tuple[int, float]:
        """Refuse a record that differs from the teacher's results now (CACHE-91); rows compared, largest difference.

        Of all rows, or of maps on rows of so many entries, see ``LayerOutputs.tiles``.
        """


def tolerance_of(name: str, dtype: str) -> float:
    """A limit of total variation by the teacher's dtype."""
    table = load_tolerances()[name]["total_variation"]
    return float(table.get(dtype, table["float32"]))


def not_now(record: SampleRecord, what: str, limit: float, got: float) -> ShdError:
    """The error for a record that differs from the teacher by more than coding and a rerun account for."""
    return ShdError(
        "cache-mismatch",
        f"record {record.index} (key {record.key}) {what} must equal what the teacher gives now within {limit:.4f}, "
        f"the bound for coding and rerunning the teacher; got {got:.4f}: the cache was made another way",
        "CACHE-91",
    )
