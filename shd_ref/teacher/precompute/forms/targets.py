"""Logits and hidden states: rows of each sample, coded on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    AveragedTeacher,
    Extent,
    Factors,
    Hidden,
    HiddenError,
    HiddenLayer,
    Logits,
    LogitsError,
    Manifest,
    Maps,
    NewRecord,
    StoredRecord,
    Teacher,
)
from shd_ref.cache.codecs.distortion import merge_errors
from shd_ref.cache.codecs.logits import entropy_moves
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.forms.maker import tolerance_of
from shd_ref.teacher.run.outputs import SampleOutputs, StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

Counted = NDArray[np.bool_] | None


class HeldForms(Protocol):
    """What a record holds: a manifest says it, and so does ``Forms`` before there is one."""

    @property
    def attention(self) -> Maps | Factors:
        """The squeezed attention."""

    @property
    def logits(self) -> Logits | None:
        """The teacher's logits, if any."""

    @property
    def hidden(self) -> Hidden | None:
        """Its hidden states, if any."""


class Forms(NamedTuple):
    """The forms of a record."""

    attention: Maps | Factors
    logits: Logits | None = None
    hidden: Hidden | None = None


def describe_logits(work: TeacherRun, outputs: StudentOutputs) -> Logits | None:
    """How logits are stored; None where they are not asked for.

    Args:
        work: the run.
        outputs: of any samples.

    Raises:
        ShdError: ``graph-unsupported`` for logits that are no rows of classes; ``argument-value`` for options that do
            not suit them.
    """
    options, logits = work.options, outputs.targets.logits
    if logits is None:
        return None
    name = str(work.targets.logits)
    if logits.ndim == 3:
        _check_rows(work, outputs, "logits", logits)
    elif logits.ndim != 2:
        raise ShdError(
            "graph-unsupported",
            f"logits must be (samples, positions, classes) or (samples, classes); got {logits.ndim} axes in {name}: "
            "name another output (--logits-output)",
            "CACHE-160",
        )
    columns = work.logit_columns or logits.shape[-1]  # a mean of several is cut already
    size = columns if options.vocab_size is None else options.vocab_size
    if size > columns:
        raise ShdError(
            "argument-value", f"vocab_size must be at most {columns}, the columns of {name}; got {size}", "KD-7"
        )
    common: dict[str, Any] = {
        "codec": options.logits,
        "rows": "sample" if logits.ndim == 2 else "decoder" if work.has_decoder_rows else "positions",
        "tensor": name,
        "vocab_size": size,
        "padded_vocab_size": columns if size < columns else None,
        "with_teachers": tuple(other.describe(size) for other in work.others),
    }
    if options.logits == "float16":
        return Logits(**common)
    drawn = options.logits == "sampled"
    return Logits(
        **common,
        temperature=options.logits_temperature,
        # A small vocabulary is kept whole; a class is left to draw from.
        head=min(options.logits_top, size - drawn),
        draws=options.logits_draws if drawn else 0,
        value_bits=options.logits_bits,
        seed=work.run.seed if drawn else None,
    )


def describe_hidden(work: TeacherRun, outputs: StudentOutputs) -> Hidden | None:
    """How hidden states are stored; None where they are not asked for.

    Raises:
        ShdError: ``graph-unsupported`` for tensors that have no row for each position.
    """
    layers = []
    for layer, tensor in work.targets.hidden:
        states = outputs.targets.hidden[layer]
        if states.ndim != 3:
            raise ShdError(
                "graph-unsupported",
                f"hidden state {layer} must be (samples, positions, width); got {states.ndim} axes in {tensor}: "
                "ask for other layers",
                "CACHE-160",
            )
        _check_rows(work, outputs, f"hidden state {layer}", states)
        layers.append(HiddenLayer(layer, tensor, states.shape[-1]))
    rows = "decoder" if work.has_decoder_rows else "positions"
    return Hidden(codec=work.options.hidden_codec, rows=rows, layers=tuple(layers)) if layers else None


def _check_rows(work: TeacherRun, outputs: StudentOutputs, what: str, rows: NDArray[Any]) -> None:
    """Refuse rows that are not those of the positions."""
    mask = outputs.targets.row_mask
    if mask is not None:
        positions = mask.shape[1]
    elif work.has_decoder_rows:
        positions = int(work.inputs.decoder_lengths[list(outputs.batch.indices)].max())
    elif outputs.layers:
        positions = outputs.layers[0].map_axes[0]
    else:
        positions = 0
    if not positions:
        return  # nothing else says how many there are
    if rows.shape[1] != positions:
        raise ShdError(
            "graph-unsupported",
            f"{what} must have a row for each of {positions} positions of the sequence; got {rows.shape[1]}: "
            "export the model with all positions (as of a decoder without a number of logits to keep)",
            "CACHE-160",
        )


def make_targets(
    forms: HeldForms, sample: SampleOutputs, extent: Extent
) -> tuple[NDArray[np.uint8] | None, dict[int, NDArray[np.uint8]]]:
    """What a record holds of a sample's logits and hidden states: ``NewRecord.logits`` and ``NewRecord.hidden``.

    Args:
        forms: of the record.
        sample: what the teacher gave.
        extent: of the record.

    Raises:
        ShdError: as ``Logits.encode`` and ``Hidden.encode``, naming the sample.
    """
    try:
        return _encode(forms, sample, extent)
    except ShdError as error:
        named = ShdError(error.code, f"sample {sample.index} (key {sample.key}): {error}")
        named.spec_id = error.spec_id
        raise named from error


def _encode(
    forms: HeldForms, sample: SampleOutputs, extent: Extent
) -> tuple[NDArray[np.uint8] | None, dict[int, NDArray[np.uint8]]]:
    logits, hidden = None, {}
    if forms.logits is not None:
        logits = forms.logits.encode(*_logit_rows(forms.logits, sample, extent, sample.index))
    if forms.hidden is not None:
        for layer in forms.hidden.teacher_layers:
            hidden[layer] = forms.hidden.encode(layer, *_hidden_rows(forms.hidden, layer, sample, extent))
    return logits, hidden


def measure_targets(
    forms: HeldForms, samples: Sequence[SampleOutputs], records: Sequence[NewRecord]
) -> tuple[LogitsError | None, HiddenError | None]:
    """What coding cost the rows of these samples that count: ``Errors.logits`` and ``Errors.hidden``."""
    logits, hidden = [], []
    for sample, record in zip(samples, records, strict=True):
        if forms.logits is not None:
            assert record.logits is not None
            rows, _, counted = _logit_rows(forms.logits, sample, record.extent, record.index)
            logits.append(forms.logits.measure(rows, record.logits, counted))
        if forms.hidden is not None:
            for layer, codes in record.hidden.items():
                rows, counted = _hidden_rows(forms.hidden, layer, sample, record.extent)
                hidden.append(forms.hidden.measure(layer, rows, codes, counted))
    return (
        None if forms.logits is None else merge_errors(LogitsError, logits),
        None if forms.hidden is None else merge_errors(HiddenError, hidden),
    )


def check_targets(manifest: Manifest, sample: SampleOutputs, record: StoredRecord) -> int:
    """Refuse a record whose logits or hidden states are not what the teacher gives now (CACHE-91).

    Args:
        manifest: of the cache.
        sample: run again.
        record: what the cache holds of it.

    Returns:
        How many rows were compared.

    Raises:
        ShdError: ``cache-mismatch``.
    """
    dtype, compared = manifest.teacher.dtype, 0
    if manifest.logits is not None:
        # A mean moves no further than the teacher of it that moves most.
        teachers: tuple[Teacher | AveragedTeacher, ...] = (manifest.teacher, *manifest.logits.with_teachers)
        again = max(tolerance_of("recheck", each.dtype) for each in teachers)
        rows, _, counted = _logit_rows(manifest.logits, sample, record.extent, record.index)
        found, bound = manifest.logits.compare(record, rows)
        _check_moves(record, "logits", found, bound + again, counted)
        compared += len(found)
        if manifest.logits.draws:
            found, bound = manifest.logits.compare_entropies(record, rows)
            bound = bound + entropy_moves(again, manifest.logits.vocab_size)
            _check_moves(record, "entropies of logits", found, bound, counted)
    if manifest.hidden is not None:
        for layer in manifest.hidden.teacher_layers:
            rows, counted = _hidden_rows(manifest.hidden, layer, sample, record.extent)
            stored = manifest.hidden.decode(record, layer).astype(np.float64)
            norms = np.linalg.norm(rows, axis=-1)
            norms = np.where(norms > 0, norms, 1.0)
            found = np.linalg.norm(stored - rows, axis=-1) / norms
            bound = np.sqrt(rows.shape[-1]) * manifest.hidden.bound(rows) / norms
            _check_moves(record, f"hidden state {layer}", found, bound + tolerance_of("recheck", dtype), counted)
            compared += len(found)
    return compared


def _check_moves(
    record: StoredRecord, what: str, found: NDArray[np.float64], limits: NDArray[np.float64], counted: Counted
) -> None:
    wrong = ~(found <= limits) if counted is None else ~(found <= limits) & counted
    if wrong.any():
        row = int(np.where(wrong, found - limits, -np.inf).argmax())
        raise ShdError(
            "cache-mismatch",
            f"record {record.index} (key {record.key}) {what} row {row} must equal what the teacher gives now within "
            f"{limits[row]:.4f}, the bound for coding and rerunning the teacher; got "
            f"{found[row]:.4f}: the cache was made another way",
            "CACHE-91",
        )


def _logit_rows(
    form: Logits, sample: SampleOutputs, extent: Extent, index: int
) -> tuple[NDArray[np.float32], int, Counted]:
    """What ``Logits.encode`` takes: rows, the sample's index, and which rows count."""
    logits = sample.targets.logits
    assert logits is not None
    if form.rows == "sample":
        return logits[None], index, None
    rows, counted = _rows(form, logits, sample, extent)
    return rows, index, counted


def _hidden_rows(
    form: Hidden, layer: int, sample: SampleOutputs, extent: Extent
) -> tuple[NDArray[np.float32], Counted]:
    """What ``Hidden.encode`` takes of a layer: rows, and which of them count."""
    return _rows(form, sample.targets.hidden[layer], sample, extent)


def _rows(
    form: Logits | Hidden, values: NDArray[np.float32], sample: SampleOutputs, extent: Extent
) -> tuple[NDArray[np.float32], Counted]:
    """The rows of a record, and which of them count."""
    kept = slice(extent.decoder) if form.rows == "decoder" else slice(extent.first, extent.length)
    mask = sample.targets.row_mask
    return values[kept], None if mask is None else mask[kept]
