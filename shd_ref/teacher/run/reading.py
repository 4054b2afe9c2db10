"""The teacher's own maps and value outputs, read from its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import value_outputs
from shd_ref.teacher.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.graph.find import AttentionSite, projection_of
from shd_ref.teacher.opening.weights import Weights
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.squeeze import assemble_graph, check_opset, site_tensors
from shd_ref.teacher.run.inputs import Batch, run_batch
from shd_ref.teacher.session import open_session


class AttentionReader:
    """A teacher graph that outputs the maps and values of its attention sites.

    Args:
        model: the teacher, from ``load_teacher``; not changed.
        sites: supported sites of this model, from ``find_sites``.
        provider: as in ``open_session``.
        num_threads: as in ``open_session``.
        weights: as in ``open_session``.

    Raises:
        ShdError: ``graph-unsupported`` (an operator set that is too old), ``provider-unavailable``.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        sites: Sequence[AttentionSite],
        *,
        provider: str = "cpu",
        num_threads: int | None = None,
        weights: Weights | None = None,
    ) -> None:
        body = Body(f"{FUNCTION_DOMAIN}/", check_opset(model))
        self.sites = tuple(sites)
        for number, site in enumerate(self.sites):
            body.prefix = f"{FUNCTION_DOMAIN}/{number}/"
            for name, tensor in zip(self._names(number), site_tensors(body, site), strict=True):
                body.output(body.op("Cast", tensor, to=FLOAT), name, FLOAT, rank=4)
        graph = assemble_graph(model, body, ())
        self._session = open_session(graph, provider=provider, num_threads=num_threads, weights=weights)

    def read(self, number: int, batch: Batch) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Maps ``(B, H, L, S)`` in the teacher's own dtype and X ``(B, H, S, D)`` of one site, by its number.

        One site a call: value outputs are many times larger than what they are made of.

        Args:
            number: of the site.
            batch: the samples.

        Raises:
            ShdError: ``not-finite``; ``inputs-invalid``.
        """
        maps, values, _ = self.read_values(number, batch)
        return maps, value_outputs(values, projection_of(self.sites[number]))

    def read_values(
        self, number: int, batch: Batch, *, on_error: str = "stop"
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp]]:
        """The same with V ``(B, H_kv, S, d_v)`` in the place of X.

        Args:
            number: of the site.
            batch: the samples.
            on_error: ``"skip"`` leaves out samples on which the teacher gives NaN or infinity.

        Returns:
            Maps, values, and the places in the batch of the samples that they hold.

        Raises:
            ShdError: ``not-finite`` with ``"stop"``; ``inputs-invalid``.
        """
        site, count = self.sites[number], len(batch.indices)
        probs, values = (array[:count] for array in self.run(self._names(number), batch).values())
        places = np.arange(count)
        if on_error == "skip":
            sound = np.isfinite(probs).all(axis=(1, 2, 3)) & np.isfinite(values).all(axis=(1, 2, 3))
            probs, values, places = probs[sound], values[sound], places[sound]
        # The own dtype decides how exactly rows must sum to one.
        return probs.astype(site.dtype or "float32"), values, places

    @property
    def maps(self) -> dict[str, AttentionSite]:
        """The sites by the names of their maps ``(B, H, L, S)`` among the outputs."""
        return {self._names(number)[0]: site for number, site in enumerate(self.sites)}

    def run(self, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
        """Some of the outputs, by name."""
        return run_batch(self._session, names, batch)

    @staticmethod
    def _names(number: int) -> tuple[str, str]:
        return f"{FUNCTION_DOMAIN}/{number}/probs", f"{FUNCTION_DOMAIN}/{number}/values"
