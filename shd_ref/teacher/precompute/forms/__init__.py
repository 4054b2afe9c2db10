"""How each form of a record is made from a run of the teacher.

Before the first shard each maker describes its form for the manifest (``describe_forms``); of each batch they make
the parts of records (``make_records``) and measure the error of coding (``measure_errors``). ``attention.py``
makes both forms of attention, ``rows.py`` all forms of rows. A form from elsewhere is one entry more in ``MAKERS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from shd_ref.cache import U8, Embeddings, Errors, Exact, Factors, Form, Hidden, Logits, Maps, SampleRecord
from shd_ref.cache.forms import Forms, Held
from shd_ref.errors import ShdError, graph_unsupported
from shd_ref.teacher.opening.model import rounds_in_run
from shd_ref.teacher.options import NO_FORM
from shd_ref.teacher.precompute.forms.attention import FactorsMaker, MapsMaker
from shd_ref.teacher.precompute.forms.maker import Maker
from shd_ref.teacher.precompute.forms.rows import EmbeddingsMaker, ExactMaker, HiddenMaker, LogitsMaker
from shd_ref.teacher.run.outputs import COMPARED_ENTRIES, BatchOutputs, check_finite
from shd_ref.teacher.run.teacher import EXPORT_OTHERWISE, TeacherRun

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


def describe_forms(work: TeacherRun, outputs: BatchOutputs) -> Forms:
    """All forms that the options request, see ``Maker.describe``."""
    forms = [maker.describe(work, outputs) for maker in MAKERS.values()]
    return Forms(*(form for form in forms if form is not None))


def options_for(forms: Held, *, has_targets: bool = True) -> dict[str, Any]:
    """The ``PrecomputeOptions`` of a cache, all of them or those of its attention."""
    options: dict[str, Any] = {"form": NO_FORM, "hidden": ()}
    for form in forms.forms:
        of_form = maker_of(form).options(form) if has_targets or maker_of(form).BY_LAYER else {}
        hidden = (*options["hidden"], *of_form.get("hidden", ()))  # last states are among them
        options |= of_form | {"hidden": hidden}
    return options


def make_records(outputs: BatchOutputs, forms: Held, seed_of: Callable[[int], int | None]) -> list[SampleRecord]:
    """Records of a batch in these forms, such as the manifest's."""
    samples = [outputs[number] for number in range(len(outputs.indices))]
    extents = [forms.extent_of(sample.extent) for sample in samples]
    parts_by_form = [maker_of(form).make(form, samples, extents) for form in forms.forms]
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


def measure_errors(outputs: BatchOutputs, records: Sequence[SampleRecord], forms: Held) -> Errors:
    """The error of coding in the rows that count, of the records of a batch with check outputs."""
    samples = [outputs[number] for number in range(len(records))]
    return Errors({form.SUBJECT: maker_of(form).measure(form, samples, records) for form in forms.forms})


_MOST_GROUPS: Final = 1000
"""Batches that are looked through for samples that run together."""


def check_company(work: TeacherRun, forms: Held) -> None:
    """Refuse a teacher whose results for a sample change with its batch: a record must be its sample's alone.

    Two samples run together, and one of them alone; what would be stored of it must be right in company too, by the
    rule by which a cache is checked against its teacher (CACHE-91). Where all samples run alone, one runs twice.
    """
    lengths = work.inputs.lengths
    groups = list(itertools.islice(work.groups(range(len(work.inputs))), _MOST_GROUPS))
    # The longest and the shortest of a batch, of that in which padding is the largest part, as it may move them.
    pairs = [(group[0], group[-1]) for group in groups if len(group) > 1]
    pairs.sort(key=lambda pair: int(lengths[pair[1]]) / max(int(lengths[pair[0]]), 1))
    batch = (pairs or groups[-1:])[0]
    alone = work.squeeze(work.inputs.batch(batch[-1:]))
    check_finite(work, alone)
    (record,) = make_records(alone, forms, work.inputs.seed)
    parts = {**record.parts}  # as they are read again
    for form in forms.forms:
        coded = (part.name for part in form.parts if part.dtype == U8)
        parts |= dict(zip(coded, form.pack(record), strict=True))
    record = replace(record, parts=parts)
    # Where activations are rounded to integers, a last bit may move a map by much.
    dtype = "bfloat16" if rounds_in_run(work.graph.model) else work.graph.dtype
    for part, company in enumerate(work.squeeze_parts(work.inputs.batch(batch))):
        for maker, form in ((maker_of(form), form) for form in forms.forms):
            try:
                if maker.BY_LAYER or not part:
                    maker.recheck(form, dtype, company[len(batch) - 1], record, COMPARED_ENTRIES)
            except ShdError as error:
                if error.code != "cache-mismatch":
                    raise
                raise graph_unsupported(
                    "the teacher must give a sample in company what it gives it alone; its results change with "
                    f"the other samples of the batch, with their padding, or from run to run ({error}): "
                    f"{EXPORT_OTHERWISE}{', or run samples alone (--batch-size 1)' * (len(batch) > 1)}"
                ) from error
