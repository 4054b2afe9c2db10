"""Exact targets: the states that the head reads, and the head, compared with the graph's own logits first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Exact, Form
from shd_ref.cache.codecs.logits import rows_moved
from shd_ref.errors import ShdError, argument_value, graph_unsupported
from shd_ref.teacher.graph.targets import dtype_of
from shd_ref.teacher.options import LAST, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import tolerance_of
from shd_ref.teacher.precompute.forms.rows import SingleMaker, check_states
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


class ExactMaker(SingleMaker[Exact]):
    """Makes ``Exact``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> Exact | None:
        """Refuses a head that does not make the graph's own logits of these states."""
        states = outputs.targets.last
        if states is None or work.head is None:
            return None
        if states.ndim != 3:
            rule = "the states that the head reads must be (samples, positions, width)"
            raise graph_unsupported(f"{rule}; got {states.ndim} axes in {work.head.states}", "CACHE-187")
        check_states(work, outputs, "the states that the head reads", states)
        rows = "decoder" if work.has_decoder_rows else "positions"
        form, _ = _with_head(work, work.options.hidden_codec, rows)
        _compare(work, form, outputs.indices[0])
        return form

    def files(self, work: TeacherRun, form: Exact) -> Mapping[str, Sequence[Any]]:
        """The head's."""
        current, pieces = _with_head(work, form.codec, form.rows)
        if current.head != form.head:
            problem = (
                f"the teacher's head has XXH3-128 {current.head.xxh3_128}; got {form.head.xxh3_128} in the manifest"
            )
            raise ShdError("cache-mismatch", f"{problem}: the cache was made another way", "CACHE-188")
        return {form.files[0].name: pieces}

    def options(self, form: Exact) -> dict[str, Any]:
        """Options that store the last states."""
        return {"hidden": (LAST,), "hidden_codec": form.codec, "vocab_size": _stated_size(form)}

    def decided(
        self, form: Form | None, options: PrecomputeOptions, run: RunOptions
    ) -> Iterator[tuple[str, object, object]]:
        """The codec."""
        yield "codec", None if form is None else form.codec, options.hidden_codec if options.exact else None

    def values(self, form: Exact, sample: StudentOutputs) -> Iterator[NDArray[np.float32]]:
        """The states."""
        assert sample.targets.last is not None  # they have been described
        yield sample.targets.last


def _stated_size(form: Exact) -> int | None:
    return form.head.vocab_size if form.head.padded_vocab_size else None


def _with_head(work: TeacherRun, codec: str, rows: str) -> tuple[Exact, Sequence[Any]]:
    """The form of a teacher, and the pieces of its head's file."""
    graph_head, size = work.head, work.options.vocab_size
    assert graph_head is not None  # it was asked for
    columns = len(graph_head.head.weight)
    if size is not None and size > columns:
        message = f"vocab_size must be at most {columns}, the classes of the teacher's head; got {size}"
        raise argument_value(message, "CACHE-188")
    padded = columns if size is not None and size < columns else None
    return Exact.of_head(graph_head.head.cut(size or columns), codec, rows, graph_head.states, padded)


def _compare(work: TeacherRun, form: Exact, index: int) -> None:
    """Compare the head with the graph's own logits, on rows of a sample (CACHE-191)."""
    assert work.head is not None
    states, logits = work.run_head(index)
    logits_of_head = work.head.head.cut(form.head.vocab_size).logits(states)
    moved = rows_moved(logits, 1.0, lambda rows: logits_of_head[rows])
    limit = tolerance_of("recheck", dtype_of(work.model, [site for _, site in work.layers], work.targets))
    if not moved.max(initial=0.0) <= limit:
        raise graph_unsupported(
            f"the teacher's head must make its logits of the states that are stored, within a total variation of "
            f"{limit:g}; got {moved.max():.3g}: store --logits instead",
            "CACHE-191",
        )
