"""The teacher's own maps and value outputs, read from its graph, and plans matched on them (PLAN-9 to PLAN-13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import value_outputs
from shd_ref.cache.documents import sample_order
from shd_ref.merging.matching import match_factored
from shd_ref.merging.plans import MergePlan
from shd_ref.teacher.graph.find import AttentionSite, projection_of
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.opening.model import Weights, onnx
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.rewrite.function import site_tensors
from shd_ref.teacher.rewrite.squeeze import assemble_graph, check_opset
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.session import open_session, threads_for

if TYPE_CHECKING:
    from shd_ref.teacher.run.teacher import TeacherGraph

SiteMasks: TypeAlias = Mapping[int, tuple[str | None, str | None]]
"""By site the inputs that say which rows, and which keys, of its maps count, see ``TeacherGraph.masks_of``."""


class AttentionReader:
    """A teacher graph that outputs the maps and values of supported sites; options are as in ``open_session``."""

    def __init__(
        self,
        model: onnx.ModelProto,
        sites: Sequence[AttentionSite],
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
        graph = assemble_graph(model, body)
        self._session = open_session(graph, provider=provider, num_threads=num_threads, weights=weights)

    def read(self, number: int, batch: Batch) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Maps ``(B, H, L, S)`` in their own dtype and X ``(B, H, S, D)`` of one site, as X is large."""
        maps, values, _ = self.read_values(number, batch)
        return maps, value_outputs(values, projection_of(self.sites[number]))

    def read_values(
        self, number: int, batch: Batch, *, on_error: str = "stop"
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp]]:
        """The same with V ``(B, H_kv, S, d_v)`` for X, and the places of the samples in the batch."""
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
        return run_batch(self._session, names, batch)

    @staticmethod
    def _names(number: int) -> tuple[str, str]:
        return f"{FUNCTION_DOMAIN}/{number}/probs", f"{FUNCTION_DOMAIN}/{number}/values"


def match_plans(
    graph: TeacherGraph, inputs: ModelInputs, masks: SiteMasks, options: PrecomputeOptions, run: RunOptions
) -> tuple[MergePlan, ...]:
    """The plan of every layer, matched on the first samples of CACHE-26's order; none without layers.

    Raises ``dependency-missing`` without networkx. With ``on_error="skip"`` samples that give NaN do not choose.
    """
    if not graph.layers:
        return ()
    sites = [site for _, site in graph.layers]
    reader = AttentionReader(graph.bare, sites, run.provider, run.num_threads, graph.weights)
    chosen = [int(index) for index in sample_order(len(inputs), run.seed)[: options.calibration_samples]]
    heads, by, plans = options.num_student_heads, options.matched_by, []
    for number, site in enumerate(sites):
        calibration, (rows, _) = [], masks[site.layer]
        for batch in inputs.batches(chosen, run.batch_size):
            probs, values, places = reader.read_values(number, batch, on_error=options.on_error)
            mask = None if rows is None else batch.arrays[rows][places].astype(np.bool_)
            if len(places):
                calibration.append((probs, values, mask))
        largest = max((probs[0, 0].size for probs, *_ in calibration), default=0)
        with threads_for(largest * 2 * (site.d_v or 0)):
            weight = np.asarray(site.output_projection)
            plans.append(match_factored(calibration, weight, heads, by, row_sums=site.row_sums))
    return tuple(plans)
