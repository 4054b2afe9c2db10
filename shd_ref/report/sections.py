"""The parts of the page that show something: text, figures and tables, ready for the template."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shd_ref.cache import CacheReader, StoredRecord
from shd_ref.merging.plans import plan_groups
from shd_ref.report.content import CacheContent, choose_example
from shd_ref.report.figures import alpha_figure, entropy_figure, map_picture, residual_figure
from shd_ref.report.packages import Markup

if TYPE_CHECKING:
    from shd_ref.report.evidence import Evidence

_SHOWN_LAYERS = 3
_SHOWN_HEADS = 8
_SHOWN_MEMBERS = 8
_SHOWN_SHARDS = 8


@dataclass(frozen=True)
class Table:
    """A table of the page; ``best`` marks cells by row and column."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: tuple[int, ...] = ()
    best: Mapping[int, Iterable[int]] = field(default_factory=dict)


def alphas_section(content: CacheContent) -> dict[str, Any]:
    """The distribution of alpha, layer by layer."""
    manifest, layers = content.manifest, content.layers
    if not any(layer.merges for layer in layers):
        return {
            "text": f"The strategy {manifest.attention.strategy} has no pairwise weights.",
            "figures": [],
            "table": None,
        }
    per = "row" if manifest.attention.alpha_per == "row" else "map"
    text = (
        f"Alpha is the weight of the first of two merged heads, one a {per}, before it is clipped to [0, 1]: bars "
        f"hold the middle half and lines the middle nine tenths of {count_of(content.records_read, 'sample')}; the "
        "dot is the median. A spread-out alpha is what a constant merge would throw away."
    )
    figures = []
    for layer in layers:
        medians = [merge.quantiles[2] for merge in layer.merges if merge.quantiles]
        note = f"median {min(medians):.2f} to {max(medians):.2f}" if medians else "no finite weight"
        figures.append(
            {
                "svg": Markup(alpha_figure(layer, f"alpha{layer.student_layer}")),
                "title": f"Layer {layer.student_layer}",
                "note": f"{note}, {layer.total('clipped') / max(layer.total('count'), 1):.1%} clipped",
                "label": f"Merge weights of student layer {layer.student_layer}: {note}, {len(layer.merges)} merges",
            }
        )
    rows = [
        [
            str(layer.student_layer),
            merge.label,
            *(f"{q:.3f}" for q in merge.quantiles or (math.nan,) * 5),
            f"{merge.clipped / max(merge.count, 1):.1%}",
            f"{merge.even / max(merge.count, 1):.1%}",
        ]
        for layer in layers
        for merge in layer.merges
    ]
    columns = ["layer", "teacher heads", "5%", "25%", "median", "75%", "95%", "clipped", "exactly 1/2"]
    return {"text": text, "figures": figures, "table": Table("Quantiles of alpha", columns, rows, (1,))}


def residuals_section(evidence: Evidence | None) -> dict[str, Any]:
    """Every strategy beside the cache, or how to get that."""
    if evidence is None:
        return {
            "text": "A cache does not hold the teacher's own maps, so what merging loses is not in it: make this "
            "page with --teacher and --inputs to compare every strategy on some samples.",
            "table": None,
        }
    names = list(evidence.layers[0].residuals)
    series = {"this cache": [layer.cached for layer in evidence.layers]}
    series |= {name: [layer.residuals[name] for layer in evidence.layers] for name in names}
    means = {name: float(np.mean(values)) for name, values in series.items()}
    columns = ["layer", *series]
    rows = [
        [str(layer.student_layer), *(f"{values[number]:.4f}" for values in series.values())]
        for number, layer in enumerate(evidence.layers)
    ]
    rows.append(["mean", *(f"{value:.4f}" for value in means.values())])
    best = {
        number: [min(range(1, len(row)), key=lambda column, row=row: float(row[column]))]  # type: ignore[misc]
        for number, row in enumerate(rows)
    }
    against = means["this cache"] / means["constant"] - 1 if means["constant"] else 0.0
    text = (
        "Relative error of the attention output when the merged maps read the summed value outputs, on "
        f"{count_of(evidence.samples, 'sample')}, along this cache's plan. It loses {means['this cache']:.4f}: "
        f"{abs(against):.1%} {'less' if against < 0 else 'more'} than the constant merge ({means['constant']:.4f}); "
        f"the best convex weights of whole groups reach {means['simplex']:.4f} by map and "
        f"{means['simplex per row']:.4f} by row."
    )
    drawn = {name: values for name, values in series.items() if name not in ("constant", "hard")}
    ratios = {
        name: [value / other if other else 1.0 for value, other in zip(values, series["constant"], strict=True)]
        for name, values in drawn.items()
    }
    return {
        "text": text,
        "svg": Markup(residual_figure([layer.student_layer for layer in evidence.layers], ratios, "residual")),
        "label": "Relative error by student layer over that of the constant merge; the table below holds the numbers",
        "table": Table(
            "Relative error of the attention output, the least of each row marked", columns, rows, best=best
        ),
    }


def maps_section(reader: CacheReader, evidence: Evidence | None) -> dict[str, Any]:
    """Maps of the example, beside the teacher's where they are at hand."""
    key = choose_example(reader) if evidence is None else evidence.example
    record, manifest = reader.read(key, logits=False, hidden=()), reader.manifest
    before = {} if evidence is None else {layer.student_layer: layer.maps for layer in evidence.layers}
    students = manifest.attention.student_layers
    shown = [students[round(place)] for place in np.linspace(0, len(students) - 1, min(_SHOWN_LAYERS, len(students)))]
    text = (
        f"Sample {record.index}, {count_of(record.length, 'position')}: rows are queries, columns are keys, each "
        "picture is scaled to its largest entry and its root is drawn, so that small entries show. "
    )
    text += (
        "Beside each merged map stand the teacher's maps it was made of"
        + ("." if record.mixing is None else ", with their weights.")
        if before
        else "The teacher's maps are not in a cache: give --teacher and --inputs to see them beside the merged ones."
    )
    temperature = manifest.attention.bound_temperature
    if temperature not in (None, 1.0):
        text += f" Merged maps are softened with temperature {temperature:g}, the teacher's are not."
    layers = []
    for student in shown:
        number = students.index(student)
        merged = reader.decode(record, student)
        groups = plan_groups(manifest.attention.layer_plans[number], manifest.attention.num_teacher_heads)[
            :_SHOWN_HEADS
        ]
        heads = [
            _head_pictures(record, number, head, group, merged[head], before.get(student))
            for head, group in enumerate(groups)
        ]
        rest = manifest.attention.num_student_heads - len(heads)
        more = f", and {rest} more heads that are not shown" if rest else ""
        layers.append({"title": f"Student layer {student}{more}", "heads": heads})
    return {"text": text, "layers": layers}


def _head_pictures(
    record: StoredRecord, number: int, head: int, group: Sequence[int], merged: Any, teacher: Any
) -> dict[str, Any]:
    before = []
    for member in group[:_SHOWN_MEMBERS] if teacher is not None else ():
        by_map = record.mixing is not None and record.mixing.ndim == 3
        weight = f", {record.mixing[number, head, member]:.2f}" if by_map and record.mixing is not None else ""
        before.append(
            {
                "uri": map_picture(teacher[member]),
                "alt": f"Map of teacher head {member}",
                "note": f"head {member}{weight}",
            }
        )
    return {
        "title": f"Student head {head}, from teacher heads {' '.join(map(str, group))}",
        "before": before,
        "after": {"uri": map_picture(merged), "alt": f"Merged map of student head {head}", "note": "merged"},
    }


def entropy_section(content: CacheContent) -> dict[str, Any]:
    """How diffuse the merged maps are."""
    layers = content.layers
    means = [float(np.mean(layer.entropy)) for layer in layers]
    text = (
        f"Mean entropy of a row, head by head, on {count_of(content.maps_read, 'sample')}: {min(means):.2f} to "
        f"{max(means):.2f} nats by layer, as if {math.exp(min(means)):.0f} to {math.exp(max(means)):.0f} keys shared "
        "the attention evenly."
    )
    heads = [f"head {head}" for head in range(content.manifest.attention.num_student_heads)]
    rows = [
        [str(layer.student_layer), *(f"{value:.2f}" for value in layer.entropy), f"{mean:.2f}"]
        for layer, mean in zip(layers, means, strict=True)
    ]
    return {
        "text": text,
        "svg": Markup(entropy_figure(layers, "entropy")),
        "label": f"Row entropy of every student head by layer; layer means {min(means):.2f} to {max(means):.2f} nats",
        "table": Table("Mean row entropy in nats", ["layer", *heads, "mean"], rows),
    }


def codec_section(content: CacheContent) -> dict[str, Any]:
    """The errors of the codes, as the writer measured them."""
    errors = sorted(content.shard_errors, key=lambda error: -error.kl_mean)
    rows_measured = sum(error.rows for error in errors)
    tv = sum(error.tv_mean * error.rows for error in errors) / max(rows_measured, 1)
    text = (
        f"The codec {content.manifest.attention.codec} costs {mean_kl(content):.2g} nats of KL divergence and "
        f"{tv:.2%} of total variation a row, measured by the writer on {count_of(rows_measured, 'row')}."
    )
    rows = [
        [f"{e.shard:06d}", f"{e.kl_mean:.2e}", f"{e.kl_max:.2e}", f"{e.tv_mean:.3%}", f"{e.rows:,}"]
        for e in errors[:_SHOWN_SHARDS]
    ]
    caption = (
        "The shards with the largest error" if len(errors) > _SHOWN_SHARDS else "All shards, largest error first"
    )
    return {
        "text": text,
        "table": Table(caption, ["shard", "KL mean", "KL max", "total variation", "rows measured"], rows),
    }


def forms_section(content: CacheContent) -> dict[str, Any]:
    """What each form is, takes and costs."""
    measured = content.errors.measured()
    rows = []
    for form in content.manifest.forms:
        coded, plain = content.coded_by_form[form.SUBJECT], content.float32_by_form[form.SUBJECT]
        (_, what), (_, codec) = form.describe()
        each = f"{coded / content.rows_by_form[form.SUBJECT]:.1f} B a {form.unit}"
        size = each, f"{coded / content.samples:,.0f} B", f"{plain / max(coded, 1):.1f}×"
        rows.append([form.SUBJECT, what, codec, *size, measured[form.SUBJECT].describe()])
    columns = ["form", "what", "codec", "a row", "a sample", "smaller than float32", "error"]
    names = [row[0] for row in rows]
    text = f"A record holds {', '.join(names[:-1]) + ' and ' * (len(names) > 1) + names[-1]}."
    return {"text": text, "table": Table("What each form takes and costs", columns, rows, (1, 2, 6))}


def mean_kl(content: CacheContent) -> float:
    """KL divergence of a coded row, in nats, over all that was measured."""
    rows = sum(error.rows for error in content.shard_errors)
    return sum(error.kl_mean * error.rows for error in content.shard_errors) / max(rows, 1)


def count_of(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
