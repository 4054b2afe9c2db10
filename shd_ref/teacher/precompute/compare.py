"""A squeezed graph compared with the float64 reference, on the graph's own maps and values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import Array, as_float, check_probs, soften_rows
from shd_ref.cache.codecs.codecs import encode
from shd_ref.errors import ShdError, graph_unsupported
from shd_ref.merging.alpha import ALPHA_RULES
from shd_ref.merging.mixing import mix_maps, output_residual, solve_mixing
from shd_ref.merging.plans import plan_groups
from shd_ref.teacher.graph.find import projection_of
from shd_ref.teacher.rewrite.squeeze import SqueezedGraph, SqueezedLayer
from shd_ref.teacher.run.outputs import COMPARED_ENTRIES, LayerOutputs
from shd_ref.teacher.session import SMALL_PRODUCT, run_ahead, threads_for
from shd_ref.tokens import pool_maps
from shd_ref.tolerances import load_tolerances


@dataclass(frozen=True)
class Comparison:
    """A squeezed graph compared with the reference, on the graph's own maps and values; worst or mean over layers.

    Attributes:
        map_difference, code_mismatch: largest of a merged map; largest fraction of a layer's codes that differ.
        residual, constant_residual: mean relative error of the merged attention output; with strategy ``constant``.
    """

    map_difference: float
    code_mismatch: float
    residual: float
    constant_residual: float

    @classmethod
    def merged(cls, layers: Sequence[Comparison]) -> Comparison:
        return cls(
            map_difference=max(layer.map_difference for layer in layers),
            code_mismatch=max(layer.code_mismatch for layer in layers),
            residual=_mean(layer.residual for layer in layers),
            constant_residual=_mean(layer.constant_residual for layer in layers),
        )


def compare_with_reference(
    squeezed: SqueezedGraph, outputs: Mapping[str, NDArray[Any]], *, query_mask: NDArray[np.bool_] | None = None
) -> Comparison:
    """Judge the outputs by name of a graph made with ``check_outputs=True`` by the float64 reference.

    Args:
        query_mask: boolean ``(B, L)``, as fed to ``row_mask_input``.

    Raises:
        ShdError: ``graph-mismatch`` above the thresholds of ``specs/tolerances.json``; ``not-finite`` and
            ``graph-unsupported`` for maps that are no distributions.
    """
    layers = [LayerOutputs.read(layer, outputs, query_mask) for layer in squeezed.layers]
    return Comparison.merged(compare_layers(layers))


def compare_layers(outputs: Sequence[LayerOutputs], callers: int = 2) -> list[Comparison]:
    """``compare_with_reference`` on the typed outputs of a run, layer by layer."""
    products = [
        output.map_axes[0] * output.map_axes[1] * projection_of(output.layer.site).shape[-1] for output in outputs
    ]
    largest = max(products)
    with threads_for(largest if callers else 0):  # a run of one thread takes no more for its products
        # Large ones one by one, each product on all threads.
        ahead = run_ahead(_compare_layer, outputs, 0 if largest > SMALL_PRODUCT else callers)
        return [comparison for _, comparison in ahead]


def _compare_layer(layer_outputs: LayerOutputs) -> Comparison:
    samples = [_compare_sample(layer_outputs[number : number + 1]) for number in range(len(layer_outputs.alphas))]
    return replace(Comparison.merged(samples), code_mismatch=_mean(sample.code_mismatch for sample in samples))


def _compare_sample(layer_outputs: LayerOutputs) -> Comparison:
    layer, rule = layer_outputs.layer, layer_outputs.layer.rule
    limits = load_tolerances()["graph"]
    dtype = layer.site.dtype or "float32"
    dtype = dtype if dtype in limits["probs"] else "float32"
    products, outputs = _factor_products(layer_outputs, rule.strategy, dtype)
    mixing_of = functools.partial(
        solve_mixing, products, outputs, rule.rounds, query_mask=layer_outputs.row_mask, alpha_rule=ALPHA_RULES[0]
    )
    mixing, constant = (mixing_of(strategy=strategy)[0] for strategy in (rule.strategy, "constant"))
    groups = plan_groups(rule.rounds, products.shape[1])
    difference = wrong = count = 0.0
    for rows, expected, merged in _mixed(layer_outputs, dtype, mixing):
        actual = merged
        count += merged.size
        if layer_outputs.rows is not None and "codes" in layer_outputs.arrays and rule.codec != "sqrt8-row":
            actual = layer_outputs.codes[:, :, rows]  # from the Loop, where merged was made again
        difference = float(np.maximum(difference, np.abs(actual - expected.astype(dtype)).max(initial=0.0)))
        if rule.codec != "float32":
            # u4 is coded on the host, from the graph's float32 maps.
            coded = layer_outputs.codes if rule.codec == "sqrt8-row" else None
            codes = encode(rule.codec, actual) if coded is None else coded[:, :, rows]
            wrong += int((codes != encode(rule.codec, expected.astype(np.float32))).sum())
    mismatch = wrong / max(count, 1)
    for name, got in (("probs", difference), ("code_mismatch", mismatch)):
        limit = limits[name][dtype]
        if not got <= limit:  # also where it is NaN
            raise _mismatch(layer, f"{name} within {limit:g} in {dtype}", got)
    residual, constant_residual = (
        float(output_residual(products, outputs, weights, groups, layer_outputs.row_mask)[0])
        for weights in (mixing, constant)
    )
    return Comparison(difference, mismatch, residual, constant_residual)


def _factor_products(layer_outputs: LayerOutputs, strategy: str, dtype: str) -> tuple[Array, Array]:
    """Factors ``(1, H, L, m)``, ``(1, H, m, D)`` of the ``A_p X_q = (A_p V_q) W_q`` within groups; m is their d_v."""
    values, rule = as_float(layer_outputs.values, "values", ndim=4), layer_outputs.layer.rule
    heads, d_v = rule.num_heads, values.shape[-1]
    rows = (layer_outputs.probs if layer_outputs.rows is None else layer_outputs.sums).shape[-2]
    projection = projection_of(layer_outputs.layer.site).astype(np.float64).reshape(heads, d_v, -1)
    values = np.repeat(values, heads // values.shape[1], axis=1)
    groups = [tuple(range(heads))] if strategy == "mean" else plan_groups(rule.rounds, heads)
    width = d_v * max(map(len, groups))
    products, outputs = np.zeros((1, heads, rows, width)), np.zeros((1, heads, width, projection.shape[-1]))
    columns = np.zeros((heads, values.shape[2], width))  # of each head the values of its group
    for group in groups:
        for index, head in enumerate(group):
            block = slice(index * d_v, (index + 1) * d_v)
            outputs[0, head, block] = projection[head]
            columns[list(group), :, block] = values[0, head]
            if layer_outputs.rows is not None:
                products[0, list(group), :, block] = layer_outputs.rows.products(layer_outputs.sums[0], group, head)
    for tile, maps, _ in _tiles(layer_outputs, dtype):
        computed = maps @ columns
        if layer_outputs.rows is None:
            products[:, :, tile] = computed
            continue
        # Only some rows are computed again; they stand for all of the graph's sums.
        limit = load_tolerances()["graph"]["probs"][dtype] * max(1.0, float(np.abs(columns).max(initial=0.0)))
        difference = float(np.abs(products[:, :, tile] - computed).max(initial=0.0))
        if not difference <= limit:
            raise _mismatch(
                layer_outputs.layer, f"products of maps and values within {limit:g} in {dtype}", difference
            )
    return products, outputs


def _mismatch(layer: SqueezedLayer, what: str, got: float) -> ShdError:
    return ShdError(
        "graph-mismatch",
        f"student layer {layer.student_layer} (site {layer.site.name}) must agree with the reference: {what}; got "
        f"{got:.3g}: run the teacher in float32, or squeeze its maps on the host with shd_ref.squeeze_heads",
    )


def _tiles(layer_outputs: LayerOutputs, dtype: str) -> Iterator[tuple[slice, Array, Array]]:
    """Some rows of the maps at a time, checked and in float64: whole ones would take many times a plain pass."""
    mask = layer_outputs.row_mask
    for tile, arrays in layer_outputs.tiles(COMPARED_ENTRIES if layer_outputs.rows else None):
        name = f"teacher_probs from row {tile.start}" if tile.start else "teacher_probs"
        # In the teacher's own precision, which decides how exactly rows must sum to one.
        maps = arrays["probs"].astype(dtype)
        counted = None if mask is None else mask[:, tile]
        site = layer_outputs.layer.site
        try:
            checked = check_probs(maps, name, query_mask=counted, row_sums=site.row_sums)
        except ShdError as error:
            if error.code != "not-a-distribution":
                raise
            raise graph_unsupported(
                f"{site.label}: its map is changed after the softmax, as by a gate or a scale ({error}): choose "
                "other layers (--sites), or a teacher that uses its maps as they are"
            ) from error
        yield tile, checked, arrays["merged"]


def _mixed(layer_outputs: LayerOutputs, dtype: str, mixing: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Merged maps by the reference, with the graph's, some rows at a time; pooled ones as a whole."""
    layer, rule = layer_outputs.layer, layer_outputs.layer.rule
    whole = []
    for tile, probs, merged in _tiles(layer_outputs, dtype):
        expected = mix_maps(soften_rows(probs, rule.temperature, row_sums=layer.site.row_sums), mixing)
        whole.append(expected)
        if not rule.pooled:
            yield tile, expected, merged
    if rule.pooled:
        groups = layer_outputs.arrays["groups"].astype(np.float64)[:, None]
        pooled = pool_maps(np.concatenate(whole, axis=2), groups, groups, layer_outputs.row_mask)
        yield slice(None), pooled.probs, layer_outputs.merged


def _mean(numbers: Iterable[float]) -> float:
    return float(np.mean(list(numbers)))
