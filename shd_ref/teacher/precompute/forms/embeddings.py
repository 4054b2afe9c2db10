"""Embeddings: the states of a text pooled into one vector, on the host in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Embeddings, Form
from shd_ref.errors import graph_unsupported
from shd_ref.teacher.options import Pooling, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms.rows import SingleMaker
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun


class EmbeddingsMaker(SingleMaker[Embeddings]):
    """Makes ``Embeddings``."""

    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> Embeddings | None:
        """Refuses a graph without a mask, and a tensor that has no state for each position."""
        pooling, states, mask = work.options.embeddings, outputs.targets.pooled, outputs.targets.row_mask
        if pooling is None or states is None:
            return None
        if mask is None:
            raise graph_unsupported(
                "embeddings are pooled over the positions that the graph's padding mask counts, and it takes none: "
                "export it with attention_mask, or name its mask (--mask)",
                "CACHE-181",
            )
        if states.ndim != 3 or states.shape[:2] != mask.shape:
            raise graph_unsupported(
                f"embeddings must be pooled from {(*mask.shape, 'width')} states, one of each position; got "
                f"{states.shape} in {work.targets.pooled}",
                "CACHE-181",
            )
        return Embeddings(
            codec=work.options.embeddings_codec,
            pooling=pooling.mode,
            normalize=pooling.normalize,
            tensor=str(work.targets.pooled),
            width=states.shape[-1],
        )

    def options(self, form: Embeddings) -> dict[str, Any]:
        """The pooling."""
        return {"embeddings": Pooling(form.pooling, form.normalize)}

    def decided(
        self, form: Form | None, options: PrecomputeOptions, run: RunOptions
    ) -> Iterator[tuple[str, object, object]]:
        """Pooling and codec."""
        asked = options.embeddings
        held = form if isinstance(form, Embeddings) else None
        yield "pooling", held and str(Pooling(held.pooling, held.normalize)), asked and str(asked)
        yield "codec", held and held.codec, asked and options.embeddings_codec

    def values(self, form: Embeddings, sample: StudentOutputs) -> Iterator[NDArray[np.float32]]:
        """The embedding."""
        states, mask = sample.targets.pooled, sample.targets.row_mask
        assert states is not None  # it has been described
        assert mask is not None
        yield pool_states(states[mask], form.pooling, normalize=form.normalize)


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
