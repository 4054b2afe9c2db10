"""A squeezed graph beside the float64 reference, on the graph's own maps and values."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import value_outputs
from shd_ref.cache.codecs.codecs import encode
from shd_ref.errors import ShdError
from shd_ref.merging.mixing import SqueezeResult, squeeze_heads
from shd_ref.teacher.graph.find import projection_of
from shd_ref.teacher.rewrite.rule import SqueezeOptions
from shd_ref.teacher.rewrite.squeeze import SqueezedGraph
from shd_ref.teacher.run.outputs import LayerOutputs
from shd_ref.teacher.run.threads import SMALL_PRODUCT, threads_for
from shd_ref.tolerances import load_tolerances

QueryMask: TypeAlias = NDArray[np.bool_] | Mapping[int, NDArray[np.bool_] | None] | None


@dataclass(frozen=True)
class Comparison:
    """A squeezed graph beside the reference, on the graph's own maps and values; worst or mean over layers.

    Attributes:
        map_difference: largest absolute difference of a merged map.
        code_mismatch: largest fraction of codes of a layer that differ; 0 for the codec float32.
        residual: mean relative error of the merged attention output, see ``SqueezeResult``.
        constant_residual: the same for the strategy ``constant``.
    """

    map_difference: float
    code_mismatch: float
    residual: float
    constant_residual: float


def compare_with_reference(
    squeezed: SqueezedGraph, outputs: Mapping[str, NDArray[Any]], *, query_mask: QueryMask = None
) -> Comparison:
    """Judge a run of a graph made with ``check_outputs=True`` by the float64 reference.

    Args:
        squeezed: the graph that was run.
        outputs: its outputs by name, from one run.
        query_mask: boolean ``(B, L)``, what was fed to ``row_mask_input``; or that of each layer, by student layer.

    Raises:
        ShdError: ``graph-mismatch`` above the thresholds of ``specs/tolerances.json``; ``argument-value`` for a
            graph without check outputs; ``not-finite`` and ``not-a-distribution`` for maps that the reference
            refuses.
    """
    if not squeezed.check_outputs:
        raise ShdError("argument-value", "squeezed must be made with check_outputs=True to be compared")
    masks = (
        query_mask
        if isinstance(query_mask, Mapping)
        else dict.fromkeys((each.student_layer for each in squeezed.layers), query_mask)
    )
    layers = [LayerOutputs.read(each, outputs, masks[each.student_layer]) for each in squeezed.layers]
    return compare_layers(squeezed.options, layers)


def compare_layers(options: SqueezeOptions, outputs: Sequence[LayerOutputs]) -> Comparison:
    """``compare_with_reference`` on the typed outputs of a run.

    Raises:
        ShdError: as ``compare_with_reference``.
    """
    products = [
        each.checked.probs.shape[-2] * each.checked.probs.shape[-1] * projection_of(each.layer.site).shape[-1]
        for each in outputs
    ]
    compare = functools.partial(_compare_layer, options=options)
    if max(products) > SMALL_PRODUCT:
        # One by one: value outputs in float64 are many times larger than the maps.
        layers = list(map(compare, outputs))
    else:
        with threads_for(max(products)), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            layers = list(pool.map(compare, outputs))
    return Comparison(
        map_difference=max(layer.map_difference for layer in layers),
        code_mismatch=max(layer.code_mismatch for layer in layers),
        residual=float(np.mean([layer.residual for layer in layers])),
        constant_residual=float(np.mean([layer.constant_residual for layer in layers])),
    )


def _compare_layer(each: LayerOutputs, options: SqueezeOptions) -> Comparison:
    layer, check = each.layer, each.checked
    limits = load_tolerances()["graph"]
    dtype = layer.site.dtype if layer.site.dtype in limits["probs"] else "float32"
    # In the teacher's own precision, which decides how exactly rows must sum to one.
    probs = check.probs.astype(dtype)
    x = value_outputs(check.values, projection_of(layer.site))

    def reference(strategy: str) -> SqueezeResult:
        return squeeze_heads(
            probs,
            x,
            options.num_student_heads,
            plan=layer.plan,
            strategy=strategy,
            query_mask=each.row_mask,
            temperature=options.temperature,
            alpha_rule=options.alpha_rule,
            alpha_per=options.alpha_per,
            row_sums=layer.site.row_sums,
        )

    expected, merged = reference(options.strategy), check.merged
    difference = float(np.abs(merged - expected.probs).max(initial=0.0))
    mismatch = 0.0
    if options.codec != "float32":
        # bf16 is coded on the host, from the graph's float32 maps.
        codes = each.codes if options.codec == "sqrt8-row" else encode(options.codec, merged)
        mismatch = float(np.mean(codes != encode(options.codec, expected.probs.astype(np.float32))))
    for name, got in (("probs", difference), ("code_mismatch", mismatch)):
        limit = limits[name][dtype]
        if not got <= limit:  # also where it is NaN
            raise ShdError(
                "graph-mismatch",
                f"student layer {layer.student_layer} (site {layer.site.name}) must agree with the reference: {name} "
                f"within {limit:g} in {dtype}; got {got:.3g}: run the teacher in float32, or squeeze its maps on the "
                "host with shd_ref.squeeze_heads",
            )
    return Comparison(
        difference, mismatch, float(expected.residual.mean()), float(reference("constant").residual.mean())
    )
