"""How each form of a record is made from a run of the teacher, measured, and compared when the teacher runs again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from shd_ref.cache import ROWS, Errors, Extent, Form, Forms, Manifest, RowError, SampleRecord
from shd_ref.cache.forms.table import Held, load, row_of
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.tolerances import load_tolerances

FormT = TypeVar("FormT", bound=Form)


class Maker(ABC, Generic[FormT]):
    """Makes parts of records; a row of the table of forms names it. ``recheck`` may run ``BY_LAYER``."""

    BY_LAYER: ClassVar[bool] = False

    @abstractmethod
    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> FormT | None:
        """The form as the manifest will have it, by longest samples; None where the options do not ask for it."""

    def files(self, work: TeacherRun, form: FormT) -> Mapping[str, Sequence[Any]]:
        """Pieces of ``form.files``, by name."""
        return {}

    @abstractmethod
    def options(self, form: FormT) -> dict[str, Any]:
        """The ``PrecomputeOptions`` that ask for what a cache holds."""

    @abstractmethod
    def decided(
        self, form: Form | None, options: PrecomputeOptions, run: RunOptions
    ) -> Iterator[tuple[str, object, object]]:
        """Members of the form that options decide before a sample is read: name, as stored (if any), as asked for."""

    def check(self, form: FormT, samples: Sequence[StudentOutputs], extents: Sequence[Extent]) -> None:
        """Refuse a teacher that this form cannot hold, before anything is written: by default by making parts."""
        self.make(form, samples, extents)

    def compare(self, work: TeacherRun, sample: StudentOutputs) -> None:
        """Refuse maps that this form cannot make (``graph-unsupported``), of some layers with check outputs."""

    @abstractmethod
    def make(self, form: FormT, samples: Sequence[StudentOutputs], extents: Sequence[Extent]) -> list[dict[str, Any]]:
        """The parts of each sample's record, see ``SampleRecord``; arrays that share no memory with the batch."""

    @abstractmethod
    def measure(self, form: FormT, samples: Sequence[StudentOutputs], records: Sequence[SampleRecord]) -> RowError:
        """What coding cost these samples, on the rows that count; of attention they have check outputs."""

    @abstractmethod
    def recheck(
        self, form: FormT, manifest: Manifest, sample: StudentOutputs, record: SampleRecord
    ) -> tuple[int, float]:
        """Refuse a record that is not what the teacher gives now (CACHE-91); rows compared, largest difference."""


def maker_of(form: Form) -> Maker[Any]:
    """The maker of a form."""
    maker: Maker[Any] = load(row_of(form).maker)()
    return maker


def makers() -> dict[str, list[Maker[Any]]]:
    """All makers, by subject."""
    by_subject: dict[str, list[Maker[Any]]] = {}
    for row in ROWS:
        by_subject.setdefault(row.form.SUBJECT, []).append(load(row.maker)())
    return by_subject


def describe_forms(work: TeacherRun, outputs: StudentOutputs) -> Forms:
    """All that the options ask for, see ``Maker.describe``."""
    forms = [maker.describe(work, outputs) for of_subject in makers().values() for maker in of_subject]
    return Forms(*(form for form in forms if form is not None))


def make_records(
    work: TeacherRun, outputs: StudentOutputs, wanted: Container[int], forms: Held
) -> list[SampleRecord]:
    """Records of those samples of a batch whose index is wanted, in these forms, such as the manifest's."""
    numbers = [number for number, index in enumerate(outputs.indices) if index in wanted]
    samples = [outputs[number] for number in numbers]
    extents = [forms.extent_of(sample.extent) for sample in samples]
    parts_by_form = [maker_of(form).make(form, samples, extents) for form in forms.forms] if samples else []
    return [
        SampleRecord(
            index=sample.index,
            key=sample.key,
            length=extent.length,
            parts={name: blob for parts in parts_by_form for name, blob in parts[position].items()},
            seed=work.inputs.seed(sample.index),
            first=extent.first,
            shapes=extent.shapes,
            decoder=extent.decoder,
        )
        for position, (sample, extent) in enumerate(zip(samples, extents, strict=True))
    ]


def measure_errors(work: TeacherRun, outputs: StudentOutputs, records: Sequence[SampleRecord], forms: Held) -> Errors:
    """What coding cost the rows of these records that count, from outputs with check outputs."""
    positions = {index: number for number, index in enumerate(outputs.indices)}
    samples = [outputs[positions[record.index]] for record in records]
    return Errors({form.SUBJECT: maker_of(form).measure(form, samples, records) for form in forms.forms})


def tolerance_of(name: str, dtype: str) -> float:
    """A limit of total variation by the teacher's dtype."""
    table = load_tolerances()[name]["total_variation"]
    return float(table.get(dtype, table["float32"]))
