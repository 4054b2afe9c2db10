"""Targets that are rows: logits, hidden states, embeddings, and last states with the teacher's head.

A maker returns the teacher's rows for each part of its form (``values``); coding, measuring and comparing them with
another run is then one for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Embeddings, Exact, Extent, Hidden, HiddenLayer, Logits, RowError, SampleRecord
from shd_ref.cache.codecs.codecs import merge_errors
from shd_ref.cache.codecs.logits import rows_moved
from shd_ref.cache.forms.rows import Counted, Rows
from shd_ref.errors import ShdError, graph_unsupported, need
from shd_ref.teacher.graph.targets import LAST_ROLE, LOGITS, POOLED, hidden_role
from shd_ref.teacher.options import LAST
from shd_ref.teacher.precompute.forms.maker import Maker, not_now, tolerance_of
from shd_ref.teacher.run.averaged import naming
from shd_ref.teacher.run.outputs import BatchOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.sentence_folder import Pooling

RowsT = TypeVar("RowsT", bound=Rows)


class RowsMaker(Maker[RowsT]):
    """Makes a form whose parts are rows."""

    @abstractmethod
    def values(self, form: RowsT, sample: BatchOutputs) -> Iterator[NDArray[np.float32]]:
        """The teacher's rows for each part of the form, padding included, or the one row of a sample."""

    def rows(
        self, form: RowsT, sample: BatchOutputs, extent: Extent
    ) -> Iterator[tuple[int | None, NDArray[np.float32], Counted]]:
        """The rows of a record, and which of them count, part by part, after the number of the part's layer."""
        positions = slice(extent.decoder) if form.rows == "decoder" else slice(extent.first, extent.length)
        mask = sample.targets.row_mask
        for part, values in zip(form.parts, self.values(form, sample), strict=True):
            if form.rows == "sample":
                yield part.layer, values[None], None
            else:
                yield part.layer, values[positions], None if mask is None else mask[positions]

    def make(self, form: RowsT, samples: Sequence[BatchOutputs], extents: Sequence[Extent]) -> list[dict[str, Any]]:
        """Rows of bytes, by the names of the form's parts; errors name the sample."""
        records = []
        for sample, extent in zip(samples, extents, strict=True):
            parts = self.rows(form, sample, extent)
            with naming(f"sample {sample.index} (key {sample.key})"):
                codes = [form.encode(rows, counted, layer) for layer, rows, counted in parts]
            records.append(dict(zip((part.name for part in form.parts), codes, strict=True)))
        return records

    def measure(self, form: RowsT, samples: Sequence[BatchOutputs], records: Sequence[SampleRecord]) -> RowError:
        errors = []
        for sample, record in zip(samples, records, strict=True):
            for part, (layer, rows, counted) in zip(form.parts, self.rows(form, sample, record.extent), strict=True):
                errors.append(form.measure(rows, record.parts[part.name], counted, layer))
        return merge_errors(form.ERROR, errors)

    def recheck(
        self, form: RowsT, dtype: str, sample: BatchOutputs, record: SampleRecord, entries: int | None = None
    ) -> tuple[int, float]:
        # A mean moves no further than the teacher of it that moves most.
        dtypes = [dtype, *(teacher.dtype for teacher in form.averaged)]
        tolerance = max(tolerance_of("recheck", kind) for kind in dtypes)
        count, largest = 0, 0.0
        for part, (layer, rows, counted) in zip(form.parts, self.rows(form, sample, record.extent), strict=True):
            moves, bounds = form.compare(record, rows, layer)
            limits = bounds + tolerance
            wrong = ~(moves <= limits) if counted is None else ~(moves <= limits) & counted
            if wrong.any():
                row = int(np.where(wrong, moves - limits, -np.inf).argmax())
                raise not_now(record, f"{part.title} row {row}", limits[row], moves[row])
            count, largest = count + len(moves), max(largest, float(moves.max(initial=0.0)))
        return count, largest


class LogitsMaker(RowsMaker[Logits]):
    """Makes ``Logits``."""

    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> Logits | None:
        options, logits = work.options, outputs.targets.arrays.get(LOGITS)
        if logits is None:
            return None
        name = work.graph.targets.names[LOGITS]
        got = f"{logits.ndim} axes in {name}: name another output (--logits-output)"
        rule = "be (samples, positions, classes) or (samples, classes)"
        need(logits.ndim in (2, 3), "graph-unsupported", "logits", rule, got, spec_id="CACHE-160")
        if logits.ndim == 3:
            check_states(work, outputs, "logits", logits)
        columns, *columns_of_others = work.logit_columns  # a mean of several is cut already
        size = columns if options.vocab_size is None else options.vocab_size
        need(size <= columns, "argument-value", "vocab_size", f"be at most {columns}, the columns of {name}", size)
        topk: dict[str, Any] = {
            "temperature": options.logits_temperature,
            "head": min(options.logits_top, size),  # a small vocabulary is kept whole
            "value_bits": options.logits_bits,
        }
        return Logits(
            codec=options.logits,
            rows="sample" if logits.ndim == 2 else _rows_of(work),
            tensor=name,
            vocab_size=size,
            padded_vocab_size=columns if size < columns else None,
            with_teachers=tuple(
                other.describe(columns, size)
                for other, columns in zip(work.graph.others, columns_of_others, strict=True)
            ),
            **({} if options.logits == "float16" else topk),
        )

    def options(self, form: Logits) -> dict[str, Any]:
        return {
            "logits": form.codec,
            "with_teachers": tuple(Path(teacher.name) for teacher in form.with_teachers),
            "logits_output": form.tensor,
            "logits_temperature": form.temperature or 1.0,
            # Several teachers may be padded to different sizes, or not at all.
            "vocab_size": form.vocab_size if form.padded_vocab_size or form.with_teachers else None,
        }

    def values(self, form: Logits, sample: BatchOutputs) -> Iterator[NDArray[np.float32]]:
        yield sample.targets.arrays[LOGITS]


class HiddenMaker(RowsMaker[Hidden]):
    """Makes ``Hidden``; the graph gives the layers."""

    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> Hidden | None:
        layers = []
        for layer in sorted(set(work.options.hidden_layers)):
            states, tensor = outputs.targets.arrays[hidden_role(layer)], work.graph.targets.names[hidden_role(layer)]
            check_states(work, outputs, f"hidden state {layer}", states)
            layers.append(HiddenLayer(layer, tensor, states.shape[-1]))
        form = {"codec": work.options.hidden_codec, "rows": _rows_of(work)}
        return Hidden(**form, layers=tuple(layers)) if layers else None

    def options(self, form: Hidden) -> dict[str, Any]:
        """The layers, and their codec, which last states share."""
        return {"hidden": tuple(form.teacher_layers), "hidden_codec": form.codec}

    def values(self, form: Hidden, sample: BatchOutputs) -> Iterator[NDArray[np.float32]]:
        return (sample.targets.arrays[hidden_role(layer)] for layer in form.teacher_layers)


class EmbeddingsMaker(RowsMaker[Embeddings]):
    """Makes ``Embeddings``: the states of a text pooled into one vector, on the host in float64."""

    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> Embeddings | None:
        pooling, targets, mask = work.options.embeddings, outputs.targets.arrays, outputs.targets.row_mask
        if pooling is None:
            return None
        states = targets[POOLED]
        if mask is None:
            rule = "embeddings are pooled over the positions that the graph's padding mask counts, and it takes none"
            raise graph_unsupported(f"{rule}: export it with attention_mask, or name its mask (--mask)", "CACHE-181")
        rule = f"be pooled from {(*mask.shape, 'width')} states, one of each position"
        got = f"{states.shape} in {work.graph.targets.names[POOLED]}"
        fits = states.ndim == 3 and states.shape[:2] == mask.shape
        need(fits, "graph-unsupported", "embeddings", rule, got, spec_id="CACHE-181")
        return Embeddings(
            codec=work.options.embeddings_codec,
            pooling=pooling.mode,
            normalize=pooling.normalize,
            tensor=work.graph.targets.names[POOLED],
            width=states.shape[-1],
        )

    def options(self, form: Embeddings) -> dict[str, Any]:
        return {"embeddings": Pooling(form.pooling, form.normalize), "embeddings_codec": form.codec}

    def values(self, form: Embeddings, sample: BatchOutputs) -> Iterator[NDArray[np.float32]]:
        mask = sample.targets.row_mask
        assert mask is not None  # it has been described
        yield pool_states(sample.targets.arrays[POOLED][mask], form.pooling, normalize=form.normalize)


def pool_states(states: NDArray[np.float32], pooling: str, *, normalize: bool) -> NDArray[np.float32]:
    """The embedding ``(D,)`` of a text's states ``(n, D)``, those that count alone (CACHE-182)."""
    wide = states.astype(np.float64)
    if pooling == "mean":
        pooled = wide.mean(axis=0)
    elif pooling == "max":
        pooled = wide.max(axis=0)
    else:
        pooled = wide[0 if pooling == "cls" else -1]
    norm = np.linalg.norm(pooled)
    pooled = pooled / norm if normalize and norm > 0 else pooled
    return np.asarray(pooled, dtype=np.float32)


class ExactMaker(RowsMaker[Exact]):
    """Makes ``Exact``: the states that the head reads, and the head, compared with the graph's own logits first."""

    def describe(self, work: TeacherRun, outputs: BatchOutputs) -> Exact | None:
        if work.graph.targets.head is None:
            return None
        check_states(work, outputs, "the states that the head reads", outputs.targets.arrays[LAST_ROLE])
        form, _ = _with_head(work, work.options.hidden_codec, _rows_of(work))
        _compare_head(work, form, outputs.indices[0])
        return form

    def files(self, work: TeacherRun, form: Exact) -> Mapping[str, Sequence[Any]]:
        current, pieces = _with_head(work, form.codec, form.rows)
        if current.head != form.head:
            problem = f"the teacher's head has XXH3-128 {current.head.xxh3_128}; got {form.head.xxh3_128}"
            message = f"{problem} in the manifest: the cache was made another way"
            raise ShdError("cache-mismatch", message, "CACHE-188")
        return {form.files[0].name: pieces}

    def options(self, form: Exact) -> dict[str, Any]:
        size = form.head.vocab_size if form.head.padded_vocab_size else None
        return {"hidden": (LAST,), "hidden_codec": form.codec, "vocab_size": size}

    def values(self, form: Exact, sample: BatchOutputs) -> Iterator[NDArray[np.float32]]:
        yield sample.targets.arrays[LAST_ROLE]


def _with_head(work: TeacherRun, codec: str, rows: str) -> tuple[Exact, Sequence[Any]]:
    """The form of a teacher, and the pieces of its head's file."""
    graph_head, size = work.graph.targets.head, work.options.vocab_size
    assert graph_head is not None  # the options request it
    columns = len(graph_head.head.weight)
    rule = f"be at most {columns}, the classes of the teacher's head"
    need(size is None or size <= columns, "argument-value", "vocab_size", rule, size, spec_id="CACHE-188")
    padded = columns if size is not None and size < columns else None
    return Exact.of_head(graph_head.head.cut(size or columns), codec, rows, graph_head.states, padded)


def _compare_head(work: TeacherRun, form: Exact, index: int) -> None:
    """Compare the head with the graph's own logits, on rows of a sample (CACHE-191)."""
    assert work.graph.targets.head is not None
    states, logits = work.run_head(index, work.graph.targets.head)
    logits_of_head = work.graph.targets.head.head.cut(form.head.vocab_size).logits(states)
    moved = rows_moved(logits, 1.0, lambda rows: logits_of_head[rows]).max(initial=0.0)
    limit = tolerance_of("recheck", work.graph.dtype)
    rule = f"make its logits of the states that are stored, within a total variation of {limit:g}"
    got = f"{moved:.3g}: store --logits instead"
    need(bool(moved <= limit), "graph-unsupported", "the teacher's head", rule, got, spec_id="CACHE-191")


def _rows_of(work: TeacherRun) -> str:
    return "decoder" if work.graph.has_decoder_rows else "positions"


def check_states(work: TeacherRun, outputs: BatchOutputs, what: str, rows: NDArray[Any]) -> None:
    """Refuse an output that lacks a row for each position: ``graph-unsupported``."""
    got = f"{rows.ndim} axes: ask for others"
    need(rows.ndim == 3, "graph-unsupported", what, "be (samples, positions, width)", got, spec_id="CACHE-160")
    mask = outputs.targets.row_mask
    if mask is not None:
        positions = mask.shape[1]
    elif work.graph.has_decoder_rows:
        positions = int(work.inputs.decoder_lengths[list(outputs.indices)].max())
    elif outputs.layers:
        positions = outputs.layers[0].map_axes[0]
    else:
        return  # nothing says how many there are
    rule = f"have a row for each of {positions} positions of the sequence"
    remedy = "export the model with all positions (as of a decoder without a number of logits to keep)"
    fits = not positions or rows.shape[1] == positions
    need(fits, "graph-unsupported", what, rule, rows.shape[1], remedy=remedy, spec_id="CACHE-160")
