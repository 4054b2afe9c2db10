"""Outputs of a run as records of a cache."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, Errors, Extent, Factors, Maps, NewRecord
from shd_ref.merging.mixing import compose_mixing
from shd_ref.teacher.precompute.forms.factors import FactorsMaker
from shd_ref.teacher.precompute.forms.maker import Maker
from shd_ref.teacher.precompute.forms.maps import MapsMaker
from shd_ref.teacher.precompute.forms.nothing import NothingMaker
from shd_ref.teacher.precompute.forms.targets import HeldForms, make_targets, measure_targets
from shd_ref.teacher.run.options import NO_FORM
from shd_ref.teacher.run.outputs import SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

MAKERS: Final[dict[str, Maker[Any]]] = {"maps": MapsMaker(), "factored": FactorsMaker(), NO_FORM: NothingMaker()}
"""By the name that a form has in options and manifests."""


def maker_of(form: Maps | Factors) -> Maker[Any]:
    """The maker of a form, ``NO_ATTENTION`` included."""
    return MAKERS[NO_FORM if form is NO_ATTENTION else form.form]


def extent_of(forms: HeldForms, sample: SampleOutputs) -> Extent:
    """The extent that the record of a sample states."""
    has_decoder_rows = any(each is not None and each.rows == "decoder" for each in (forms.logits, forms.hidden))
    extent = maker_of(forms.attention).extent(forms.attention, sample)
    return replace(extent, decoder=sample.extent.decoder if has_decoder_rows else 0)


def make_records(
    work: TeacherRun, outputs: StudentOutputs, wanted: Container[int], forms: HeldForms
) -> list[NewRecord]:
    """The batch as records: codes, alphas before clipping, and the mixing that they compose to; and its targets.

    Args:
        work: the run.
        outputs: what it gave the student.
        wanted: indices of the samples to make a record of.
        forms: of the records, such as the manifest's.

    Raises:
        ShdError: as ``Maker.make`` and ``make_targets``.
    """
    form = forms.attention
    numbers = [number for number, index in enumerate(outputs.batch.indices) if index in wanted]
    if not numbers:
        return []
    if form is NO_ATTENTION:
        alphas, mixings = np.empty((len(numbers), 0, 0), np.float32), None
    else:
        alphas = _stack_layers([layer.alphas[numbers] for layer in outputs.layers])
        # Weights by row follow from the alphas and would double a record; weights by map are small.
        mixings = mixings_of(outputs, alphas) if form.alpha_per == "map" else None
    maker, records = maker_of(form), []
    for place, number in enumerate(numbers):
        sample = work.sample(outputs, number)
        extent = extent_of(forms, sample)
        logits, hidden = make_targets(forms, sample, extent)
        records.append(
            NewRecord(
                index=sample.index,
                key=sample.key,
                length=extent.length,
                codes=maker.make(form, sample),
                alphas=alphas[place],
                mixing=None if mixings is None else mixings[place],
                seed=work.inputs.seed(sample.index),
                first=extent.first,
                shapes=extent.shapes,
                logits=logits,
                hidden=hidden,
                decoder=extent.decoder,
            )
        )
    return records


def measure_errors(
    work: TeacherRun, outputs: StudentOutputs, records: Sequence[NewRecord], forms: HeldForms
) -> Errors:
    """What coding cost the rows of these samples that count, from outputs with check outputs.

    Args:
        work: the run.
        outputs: what it gave the student.
        records: what ``make_records`` made of it.
        forms: of the records, such as the manifest's.

    Raises:
        ShdError: as ``Maker.measure``.
    """
    form = forms.attention
    place = {index: number for number, index in enumerate(outputs.batch.indices)}
    samples = [work.sample(outputs, place[record.index]) for record in records]
    logits, hidden = measure_targets(forms, samples, records)
    return Errors(attention=maker_of(form).measure(form, samples, records), logits=logits, hidden=hidden)


def mixings_of(outputs: StudentOutputs, raw_alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of some samples ``(B, num_layers, H_s, H_t)``, from alphas before clipping ``(B, num_layers, n)``."""
    options, plans = outputs.student.options, outputs.student.plans
    (samples, num_layers, number), heads = raw_alphas.shape, outputs.layers[0].layer.site.num_heads or 0
    shape = (samples, num_layers, options.num_student_heads, heads)
    if options.strategy == "mean":
        return np.full(shape, 1.0 / heads, dtype=np.float32)
    if not number:
        return np.broadcast_to(np.eye(heads, dtype=np.float32), (samples, num_layers, heads, heads))
    clipped = np.clip(raw_alphas.astype(np.float64), 0.0, 1.0)
    mixings = np.empty(shape, dtype=np.float32)
    for plan in set(plans):  # layers that share a plan are composed at once
        columns = [column for column, each in enumerate(plans) if each == plan]
        ends = np.cumsum([len(one_round) for one_round in plan])
        alphas = clipped[:, columns].reshape(-1, number)
        rounds: list[NDArray[Any]] = np.split(alphas, ends[:-1], axis=1)
        composed = compose_mixing(rounds, plan, heads)
        mixings[:, columns] = composed.reshape(samples, len(columns), *composed.shape[1:])
    return mixings


def _stack_layers(alphas: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Weights of all layers ``(B, layers, n)`` or ``(B, layers, n, L)``; layers with fewer rows end in zeros."""
    longest = max(each.shape[-1] for each in alphas)
    padded = [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, longest - a.shape[-1])]) for a in alphas]
    return np.stack(padded, axis=1)
