"""How each form of a record is made from a run of the teacher.

Before the first shard each maker describes its form for the manifest (``describe_forms``); of each batch they make
the parts of records (``make_records``) and measure what coding cost (``measure_errors``). ``attention.py``
makes both forms of attention, ``rows.py`` all forms of rows. A form from elsewhere is one entry more in ``MAKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from shd_ref.cache import Embeddings, Errors, Exact, Factors, Form, Forms, Hidden, Logits, Maps, SampleRecord
from shd_ref.cache.forms.held import Held
from shd_ref.teacher.precompute.forms.attention import FactorsMaker, MapsMaker
from shd_ref.teacher.precompute.forms.maker import Maker
from shd_ref.teacher.precompute.forms.rows import EmbeddingsMaker, ExactMaker, HiddenMaker, LogitsMaker
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

MAKERS: dict[type[Form], Maker[Any]] = {
    Maps: MapsMaker(),
    Factors: FactorsMaker(),
    Logits: LogitsMaker(),
    Hidden: HiddenMaker(),
    Embeddings: EmbeddingsMaker(),
    Exact: ExactMaker(),
}


def maker_of(form: Form) -> Maker[Any]:
    return MAKERS[type(form)]


def describe_forms(work: TeacherRun, outputs: StudentOutputs) -> Forms:
    """All that the options ask for, see ``Maker.describe``."""
    forms = [maker.describe(work, outputs) for maker in MAKERS.values()]
    return Forms(*(form for form in forms if form is not None))


def make_records(
    outputs: StudentOutputs, wanted: Container[int], forms: Held, seed_of: Callable[[int], int | None]
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
            seed=seed_of(sample.index),
            first=extent.first,
            shapes=extent.shapes,
            decoder=extent.decoder,
        )
        for position, (sample, extent) in enumerate(zip(samples, extents, strict=True))
    ]


def measure_errors(outputs: StudentOutputs, records: Sequence[SampleRecord], forms: Held) -> Errors:
    """What coding cost the rows of these records that count, from outputs with check outputs."""
    positions = {index: number for number, index in enumerate(outputs.indices)}
    samples = [outputs[positions[record.index]] for record in records]
    return Errors({form.SUBJECT: maker_of(form).measure(form, samples, records) for form in forms.forms})
