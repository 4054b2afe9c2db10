"""Logits and hidden states: rows of each sample, coded on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    AveragedTeacher,
    Extent,
    Form,
    Hidden,
    HiddenLayer,
    Logits,
    Manifest,
    RowError,
    SampleRecord,
    Teacher,
)
from shd_ref.cache.codecs.distortion import merge_errors
from shd_ref.cache.forms.rows import Rows
from shd_ref.cache.forms.vectors import SingleVectors
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import Maker, tolerance_of
from shd_ref.teacher.run.averaged import naming
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun

Counted = NDArray[np.bool_] | None
RowsT = TypeVar("RowsT", bound=Rows)


class RowsMaker(Maker[RowsT]):
    """Makes a form whose parts are rows."""

    @abstractmethod
    def values(self, form: RowsT, sample: StudentOutputs) -> Iterator[NDArray[np.float32]]:
        """What the teacher gave for each part of the form: rows, padding included, or the one row of a sample."""

    @abstractmethod
    def encode(self, form: RowsT, part: int, rows: NDArray[np.float32], counted: Counted) -> Any:
        """The rows of a part, by its number, as bytes."""

    @abstractmethod
    def measure_part(
        self, form: RowsT, part: int, rows: NDArray[np.float32], codes: Any, counted: Counted
    ) -> RowError:
        """What coding cost them."""

    def make(self, form: RowsT, samples: Sequence[StudentOutputs], extents: Sequence[Extent]) -> list[dict[str, Any]]:
        """Rows of bytes, by the names of the form's parts; errors name the sample."""
        made = []
        for sample, extent in zip(samples, extents, strict=True):
            with naming(f"sample {sample.index} (key {sample.key})"):
                parts = enumerate(self.rows(form, sample, extent))
                codes = [self.encode(form, number, rows, counted) for number, (rows, counted) in parts]
            made.append(dict(zip((part.name for part in form.parts), codes, strict=True)))
        return made

    def measure(self, form: RowsT, samples: Sequence[StudentOutputs], records: Sequence[SampleRecord]) -> RowError:
        """Over all parts."""
        return merge_errors(
            form.ERROR,
            [
                self.measure_part(form, number, rows, record.parts[part.name], counted)
                for sample, record in zip(samples, records, strict=True)
                for number, (part, (rows, counted)) in enumerate(
                    zip(form.parts, self.rows(form, sample, record.extent), strict=True)
                )
            ],
        )

    def rows(
        self, form: RowsT, sample: StudentOutputs, extent: Extent
    ) -> Iterator[tuple[NDArray[np.float32], Counted]]:
        """The rows of a record, and which of them count, part by part."""
        kept = slice(extent.decoder) if form.rows == "decoder" else slice(extent.first, extent.length)
        mask = sample.targets.row_mask
        for values in self.values(form, sample):
            if form.rows == "sample":
                yield values[None], None
            else:
                yield values[kept], None if mask is None else mask[kept]


class LogitsMaker(RowsMaker[Logits]):
    """Makes ``Logits``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> Logits | None:
        """Refuses logits that are no rows of classes."""
        options, logits = work.options, outputs.targets.logits
        if logits is None:
            return None
        name = str(work.targets.logits)
        if logits.ndim == 3:
            check_states(work, outputs, "logits", logits)
        elif logits.ndim != 2:
            raise graph_unsupported(
                f"logits must be (samples, positions, classes) or (samples, classes); got {logits.ndim} axes in "
                f"{name}: name another output (--logits-output)",
                "CACHE-160",
            )
        columns = work.logit_columns or logits.shape[-1]  # a mean of several is cut already
        size = columns if options.vocab_size is None else options.vocab_size
        if size > columns:
            raise argument_value(f"vocab_size must be at most {columns}, the columns of {name}; got {size}")
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
        return Logits(
            **common,
            temperature=options.logits_temperature,
            head=min(options.logits_top, size),  # a small vocabulary is kept whole
            value_bits=options.logits_bits,
        )

    def options(self, form: Logits) -> dict[str, Any]:
        """Codec, tensor and vocabulary."""
        return {
            "logits": form.codec,
            "logits_output": form.tensor,
            "logits_temperature": form.temperature or 1.0,
            # Several teachers may be padded to different sizes, or not at all.
            "vocab_size": form.vocab_size if form.padded_vocab_size or form.with_teachers else None,
        }

    def decided(
        self, form: Form | None, options: PrecomputeOptions, run: RunOptions
    ) -> Iterator[tuple[str, object, object]]:
        """Codec and further teachers."""
        others = form.with_teachers if isinstance(form, Logits) else ()
        yield "codec", None if form is None else form.codec, None if options.logits == "none" else options.logits
        yield "with_teachers", [other.name for other in others], [path.name for path in options.with_teachers]

    def values(self, form: Logits, sample: StudentOutputs) -> Iterator[NDArray[np.float32]]:
        """The logits."""
        assert sample.targets.logits is not None
        yield sample.targets.logits

    def encode(self, form: Logits, part: int, rows: NDArray[np.float32], counted: Counted) -> Any:
        """See ``Logits.encode``."""
        return form.encode(rows, counted)

    def measure_part(
        self, form: Logits, part: int, rows: NDArray[np.float32], codes: Any, counted: Counted
    ) -> RowError:
        """See ``Logits.measure``."""
        return form.measure(rows, codes, counted)

    def recheck(
        self, form: Logits, manifest: Manifest, sample: StudentOutputs, record: SampleRecord
    ) -> tuple[int, float]:
        """The total variation of each row."""
        # A mean moves no further than the teacher of it that moves most.
        teachers: tuple[Teacher | AveragedTeacher, ...] = (manifest.teacher, *form.with_teachers)
        again = max(tolerance_of("recheck", teacher.dtype) for teacher in teachers)
        ((rows, counted),) = self.rows(form, sample, record.extent)
        moved, bound = form.compare(record, rows)
        _check_moves(record, "logits", moved, bound + again, counted)
        return len(moved), float(moved.max(initial=0.0))


class HiddenMaker(RowsMaker[Hidden]):
    """Makes ``Hidden``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> Hidden | None:
        """Refuses tensors that have no row for each position."""
        layers = []
        for layer, tensor in work.targets.hidden:
            states = outputs.targets.hidden[layer]
            if states.ndim != 3:
                raise graph_unsupported(
                    f"hidden state {layer} must be (samples, positions, width); got {states.ndim} axes in {tensor}: "
                    "ask for other layers",
                    "CACHE-160",
                )
            check_states(work, outputs, f"hidden state {layer}", states)
            layers.append(HiddenLayer(layer, tensor, states.shape[-1]))
        rows = "decoder" if work.has_decoder_rows else "positions"
        return Hidden(codec=work.options.hidden_codec, rows=rows, layers=tuple(layers)) if layers else None

    def options(self, form: Hidden) -> dict[str, Any]:
        """The layers, and their codec, which last states share."""
        return {"hidden": tuple(form.teacher_layers), "hidden_codec": form.codec}

    def decided(
        self, form: Form | None, options: PrecomputeOptions, run: RunOptions
    ) -> Iterator[tuple[str, object, object]]:
        """Nothing: which layers there are, the graph says."""
        return iter(())

    def values(self, form: Hidden, sample: StudentOutputs) -> Iterator[NDArray[np.float32]]:
        """Each layer's."""
        return (sample.targets.hidden[layer] for layer in form.teacher_layers)

    def encode(self, form: Hidden, part: int, rows: NDArray[np.float32], counted: Counted) -> Any:
        """See ``Hidden.encode``."""
        return form.encode(form.teacher_layers[part], rows, counted)

    def measure_part(
        self, form: Hidden, part: int, rows: NDArray[np.float32], codes: Any, counted: Counted
    ) -> RowError:
        """See ``Hidden.measure``."""
        return form.measure(form.teacher_layers[part], rows, codes, counted)

    def recheck(
        self, form: Hidden, manifest: Manifest, sample: StudentOutputs, record: SampleRecord
    ) -> tuple[int, float]:
        """The distance of each row as a share of its norm."""
        count, largest = 0, 0.0
        for layer, (rows, counted) in zip(form.teacher_layers, self.rows(form, sample, record.extent), strict=True):
            stored, bound = form.decode(record, layer), form.bound(rows)
            moved = check_vectors(record, f"hidden state {layer}", stored, rows, bound, manifest, counted)
            count, largest = count + len(moved), max(largest, float(moved.max(initial=0.0)))
        return count, largest


SingleT = TypeVar("SingleT", bound=SingleVectors)


class SingleMaker(RowsMaker[SingleT]):
    """Makes a form of vectors of one tensor."""

    def encode(self, form: SingleT, part: int, rows: NDArray[np.float32], counted: Counted) -> Any:
        """See ``SingleVectors.encode``."""
        return form.encode(rows, counted)

    def measure_part(
        self, form: SingleT, part: int, rows: NDArray[np.float32], codes: Any, counted: Counted
    ) -> RowError:
        """See ``SingleVectors.measure``."""
        return form.measure(rows, codes, counted)

    def recheck(
        self, form: SingleT, manifest: Manifest, sample: StudentOutputs, record: SampleRecord
    ) -> tuple[int, float]:
        """The distance of each row as a share of its norm."""
        ((rows, counted),) = self.rows(form, sample, record.extent)
        stored = form.decode(record).reshape(rows.shape)
        moved = check_vectors(record, form.PART.title, stored, rows, form.bound(rows), manifest, counted)
        return len(moved), float(moved.max(initial=0.0))


def check_vectors(
    record: SampleRecord,
    what: str,
    stored: NDArray[np.float32],
    rows: NDArray[np.float32],
    bound: NDArray[np.float64],
    manifest: Manifest,
    counted: Counted = None,
) -> NDArray[np.float64]:
    """How far stored rows ``(R, D)`` are from the teacher's, as shares of their norms; refused beyond the bound."""
    norms = np.linalg.norm(rows, axis=-1)
    norms = np.where(norms > 0, norms, 1.0)
    moved: NDArray[np.float64] = np.linalg.norm(stored.astype(np.float64) - rows, axis=-1) / norms
    limits = np.sqrt(rows.shape[-1]) * bound / norms + tolerance_of("recheck", manifest.teacher.dtype)
    _check_moves(record, what, moved, limits, counted)
    return moved


def check_states(work: TeacherRun, outputs: StudentOutputs, what: str, rows: NDArray[Any]) -> None:
    """Refuse an output that lacks a row for each position: ``graph-unsupported``."""
    mask = outputs.targets.row_mask
    if mask is not None:
        positions = mask.shape[1]
    elif work.has_decoder_rows:
        positions = int(work.inputs.decoder_lengths[list(outputs.indices)].max())
    elif outputs.layers:
        positions = outputs.layers[0].map_axes[0]
    else:
        positions = 0
    if not positions:
        return  # nothing else says how many there are
    if rows.shape[1] != positions:
        raise graph_unsupported(
            f"{what} must have a row for each of {positions} positions of the sequence; got {rows.shape[1]}: "
            "export the model with all positions (as of a decoder without a number of logits to keep)",
            "CACHE-160",
        )


def _check_moves(
    record: SampleRecord, what: str, moves: NDArray[np.float64], limits: NDArray[np.float64], counted: Counted
) -> None:
    wrong = ~(moves <= limits) if counted is None else ~(moves <= limits) & counted
    if wrong.any():
        row = int(np.where(wrong, moves - limits, -np.inf).argmax())
        raise ShdError(
            "cache-mismatch",
            f"record {record.index} (key {record.key}) {what} row {row} must equal what the teacher gives now within "
            f"{limits[row]:.4f}, the bound for coding and rerunning the teacher; got "
            f"{moves[row]:.4f}: the cache was made another way",
            "CACHE-91",
        )
