"""The page: every number as text, every figure in its place. Needs the extra ``report``.

Caches are untrusted: the template escapes, figures hold none of their strings, and the page forbids scripts and
requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

import shd_ref
from shd_ref.cache import Attention, CacheReader, Manifest, SampleRecord
from shd_ref.report.content import CACHED, CacheContent, Evidence, LayerContent, choose_example
from shd_ref.report.facts import listing_facts
from shd_ref.report.figures import alpha_figure, entropy_figure, jinja2, map_picture, residual_figure

_SHOWN_LAYERS = 3
_SHOWN_HEADS = 8
_SHOWN_MEMBERS = 8


@dataclass(frozen=True)
class Table:
    """A table of the page; ``best`` marks cells by row and column."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: tuple[int, ...] = ()
    best: Mapping[int, Iterable[int]] = field(default_factory=dict)


def render_page(reader: CacheReader, content: CacheContent, evidence: Evidence | None) -> str:
    """The whole page as HTML; ``evidence`` where the teacher was at hand."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("shd_ref.report").joinpath("page.html").read_text(encoding="utf-8")
    listing, manifest = content.listing, reader.manifest
    shards = f"{len(listing.written)} of {manifest.shards.num_shards}"
    sections: dict[str, Any] = {}
    if manifest.find(Attention) is not None:
        sections = {
            "alphas": _alphas(content, manifest),
            "residuals": _residuals(reader, evidence),
            "maps": _maps(reader, content, evidence),
            "entropy": _entropy(content),
            "groups": _groups(content.layers),
        }
    return environment.from_string(source).render(
        sections,
        title=f"Supervision cache of {manifest.teacher.name}",
        lead=f"{_lead(manifest)}: {count_of(listing.samples, 'sample')}, each found by a hash of its inputs.",
        warning=None if listing.sealed else f"This cache is not complete: {shards} shards are committed.",
        facts=list(listing_facts(listing)),
        footer=f"Made by squeezing-heads {shd_ref.__version__}. This file asks for nothing from anywhere.",
    )


def count_of(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _lead(manifest: Manifest) -> str:
    attention = manifest.find(Attention)
    if attention is None:
        names = {"logits": "Logits", "hidden": "hidden states", "exact": "exact targets"}
        return " and ".join(names.get(form.SUBJECT, form.SUBJECT) for form in manifest.forms)
    heads = f"{attention.num_teacher_heads} heads to {attention.num_student_heads}"
    return f"Attention of {count_of(len(attention.layers), 'layer')}, squeezed from {heads}"


def _alphas(content: CacheContent, manifest: Manifest) -> dict[str, Any]:
    """The distribution of alpha, layer by layer."""
    layers = content.layers
    if not any(layer.merges for layer in layers):
        text = f"The strategy {manifest.attention.strategy} has no pairwise weights."
        return {"text": text, "figures": [], "table": None}
    text = (
        f"Alpha is the weight of the first of two merged heads, one per map, before it is clipped to [0, 1]: bars "
        f"hold the middle half and lines the middle nine tenths of {count_of(content.records_read, 'sample')}; the "
        "dot is the median. A spread-out alpha is what a constant merge would throw away."
    )
    figures, rows = [], []
    for layer in layers:
        medians = [merge.quantiles[2] for merge in layer.merges if merge.quantiles]
        note = f"median {min(medians):.2f} to {max(medians):.2f}" if medians else "no finite weight"
        clipped = sum(merge.clipped for merge in layer.merges) / max(sum(len(one.values) for one in layer.merges), 1)
        figures.append(
            {
                "svg": alpha_figure(layer),
                "title": f"Layer {layer.student_layer}",
                "note": f"{note}, {clipped:.1%} clipped",
                "label": f"Merge weights of student layer {layer.student_layer}: {note}, {len(layer.merges)} merges",
            }
        )
        for merge in layer.merges:
            quantiles = [f"{q:.3f}" for q in merge.quantiles or (math.nan,) * 5]
            shares = [f"{number / max(len(merge.values), 1):.1%}" for number in (merge.clipped, merge.even)]
            rows.append([str(layer.student_layer), merge.label, *quantiles, *shares])
    columns = ["layer", "teacher heads", "5%", "25%", "median", "75%", "95%", "clipped", "exactly 1/2"]
    return {"text": text, "figures": figures, "table": Table("Quantiles of alpha", columns, rows, (1,))}


def _residuals(reader: CacheReader, evidence: Evidence | None) -> dict[str, Any]:
    """Every strategy beside the cache, or how to get that."""
    if evidence is None:
        why = "A cache does not hold the teacher's own maps, so what merging loses is not in it"
        how = "make this page with --teacher and --inputs to compare every strategy on some samples."
        return {"text": f"{why}: {how}", "table": None}
    series, layers = evidence.residuals, reader.manifest.attention.student_layers
    means = {name: float(np.mean(values)) for name, values in series.items()}
    by_layer = [*zip(*series.values(), strict=True), tuple(means.values())]
    rows = [
        [name, *(f"{value:.4f}" for value in values)]
        for name, values in zip((*map(str, layers), "mean"), by_layer, strict=True)
    ]
    best = {number: [1 + int(np.argmin(np.array(row[1:], float)))] for number, row in enumerate(rows)}
    change = means[CACHED] / means["constant"] - 1 if means["constant"] else 0.0
    text = (
        "Relative error of the attention output when the merged maps read the summed value outputs, on "
        f"{count_of(evidence.samples, 'sample')}, along this cache's plan. It loses {means[CACHED]:.4f}: "
        f"{abs(change):.1%} {'less' if change < 0 else 'more'} than the constant merge ({means['constant']:.4f})."
    )
    ratios = {
        name: [value / other if other else 1.0 for value, other in zip(values, series["constant"], strict=True)]
        for name, values in series.items()
        if name not in ("constant", "hard")
    }
    caption = "Relative error of the attention output, the least of each row marked"
    return {
        "text": text,
        "svg": residual_figure(layers, ratios),
        "label": "Relative error by student layer over that of the constant merge; the table below holds the numbers",
        "table": Table(caption, ["layer", *series], rows, best=best),
    }


def _maps(reader: CacheReader, content: CacheContent, evidence: Evidence | None) -> dict[str, Any]:
    """Maps of the example, beside the teacher's where they are at hand."""
    key = choose_example(reader) if evidence is None else evidence.example
    record, attention = (
        reader.read(key, logits=False, hidden=(), embeddings=False, exact=False),
        reader.manifest.attention,
    )
    text = (
        f"Sample {record.index}, {count_of(record.length, 'position')}: rows are queries, columns are keys, each "
        "picture is scaled to its largest entry and its root is drawn, so that small entries show. "
    )
    text += (
        "The teacher's maps are not in a cache: give --teacher and --inputs to see them beside the merged ones."
        if evidence is None
        else "Beside each merged map stand the teacher's maps it was made of"
        + ("." if "mixing" not in record.parts else ", with their weights.")
    )
    temperature = attention.bound_temperature
    if temperature not in (None, 1.0):
        text += f" Merged maps are softened with temperature {temperature:g}, the teacher's are not."
    layers, count = [], len(content.layers)
    for number in map(round, np.linspace(0, count - 1, min(_SHOWN_LAYERS, count))):
        student, groups = content.layers[number].student_layer, content.layers[number].groups[:_SHOWN_HEADS]
        teacher = None if evidence is None else evidence.maps.get(student)
        merged = reader.decode(record, student)
        heads = [_head(record, number, head, group, merged[head], teacher) for head, group in enumerate(groups)]
        rest = attention.num_student_heads - len(heads)
        more = f", and {rest} more heads that are not shown" if rest else ""
        layers.append({"title": f"Student layer {student}{more}", "heads": heads})
    return {"text": text, "layers": layers}


def _head(
    record: SampleRecord, number: int, head: int, group: Sequence[int], merged: Any, teacher: Any
) -> dict[str, Any]:
    """A merged map, and the maps of the teacher that it was made of, with their weights if they are one per map."""
    mixing = record.parts.get("mixing")
    weights = None if mixing is None or mixing.ndim != 3 else mixing[number, head]
    before = [
        {
            "uri": map_picture(teacher[member]),
            "alt": f"Map of teacher head {member}",
            "note": f"head {member}" + ("" if weights is None else f", {weights[member]:.2f}"),
        }
        for member in (() if teacher is None else group[:_SHOWN_MEMBERS])
    ]
    return {
        "title": f"Student head {head}, from teacher heads {' '.join(map(str, group))}",
        "before": before,
        "after": {"uri": map_picture(merged), "alt": f"Merged map of student head {head}", "note": "merged"},
    }


def _entropy(content: CacheContent) -> dict[str, Any]:
    """How diffuse the merged maps are."""
    layers = content.layers
    means = [float(np.mean(layer.entropy)) for layer in layers]
    low, high = min(means), max(means)
    text = (
        f"Mean entropy of a row, head by head, on {count_of(content.maps_read, 'sample')}: {low:.2f} to {high:.2f} "
        f"nats by layer, as if {math.exp(low):.0f} to {math.exp(high):.0f} keys shared the attention evenly."
    )
    columns = ["layer", *(f"head {head}" for head in range(len(layers[0].entropy))), "mean"]
    rows = [
        [str(layer.student_layer), *(f"{value:.2f}" for value in (*layer.entropy, mean))]
        for layer, mean in zip(layers, means, strict=True)
    ]
    return {
        "text": text,
        "svg": entropy_figure(layers),
        "label": f"Row entropy of every student head by layer; layer means {low:.2f} to {high:.2f} nats",
        "table": Table("Mean row entropy in nats", columns, rows),
    }


def _groups(layers: Sequence[LayerContent]) -> Table:
    groups = (" | ".join(" ".join(map(str, group)) for group in layer.groups) for layer in layers)
    rows = [
        [str(layer.student_layer), str(layer.teacher_layer), layer.site, heads]
        for layer, heads in zip(layers, groups, strict=True)
    ]
    columns = ["student layer", "teacher layer", "site", "teacher heads of each student head"]
    return Table("Which teacher heads each student head learns from", columns, rows, (2, 3))
