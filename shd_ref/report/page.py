"""The page about a cache: what it holds, its merge weights and maps; with its teacher, what merging loses.

Caches are untrusted: the template escapes, pictures hold none of their strings, and the page forbids scripts and
requests. Needs the extra ``report``.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.cache import Attention, CacheReader, Manifest, SampleRecord, list_cache
from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, merge_plan, merge_pool, plan_groups
from shd_ref.report.facts import listing_facts
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.study.recheck import rerun_teacher

try:
    import jinja2
    from markupsafe import Markup
except ImportError as error:
    message = f"shd report needs the package {error.name}: pip install '.[report]' (in a checkout)"
    raise ShdError("dependency-missing", message) from error

QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)

_ALONE: Final[dict[str, Any]] = {"logits": False, "hidden": (), "embeddings": False, "exact": False}
"""What to read of a record beside its attention: nothing."""
_EXAMPLE_CANDIDATES: Final = 64
_EXAMPLE_LENGTH: Final = 24
"""Shorter maps show little, longer ones make large pictures."""
_SHOWN_LAYERS, _SHOWN_HEADS, _SHOWN_MEMBERS = 3, 8, 8


@dataclass(frozen=True)
class MergeAlphas:
    """The finite alphas of one merge of a layer, before clipping; ``label`` is such as "0 1 + 2 3"."""

    label: str
    values: NDArray[np.float32]

    @property
    def quantiles(self) -> tuple[float, ...]:
        """At ``QUANTILES``; empty without values."""
        return tuple(np.quantile(self.values, QUANTILES).tolist()) if self.values.size else ()


@dataclass(frozen=True)
class LayerContent:
    """One student layer: the teacher heads behind each of its heads, and its merges in the order of the plan."""

    student_layer: int
    teacher_layer: int
    site: str
    groups: tuple[tuple[int, ...], ...]
    merges: tuple[MergeAlphas, ...]  # none of strategies without alphas


class Evidence(NamedTuple):
    """The teacher's maps ``(H_t, n, n)`` by student layer, of the sample whose key is ``example``."""

    example: str
    maps: dict[int, NDArray[Any]]


def read_content(reader: CacheReader, *, max_records: int = 512) -> tuple[LayerContent, ...]:
    """The layers of a cache, sealed or not, none without attention; their alphas are of its first records.

    Raises ``cache-incomplete`` where nothing is committed, ``plan-invalid``, and the codes of reading.
    """
    keys = list(dict.fromkeys(reader.keys()))[:max_records]
    if not keys:
        rule = f"{reader.folder} must hold at least one committed sample to be reported; got none"
        raise ShdError("cache-incomplete", rule, "CACHE-56")
    form = reader.manifest.find(Attention)
    if form is None:
        return ()
    alphas = np.stack([form.alphas(reader.read(key, (), **_ALONE)) for key in keys], axis=-1)
    layers = []
    for number, layer in enumerate(form.layers):
        # A manifest's plan is checked for its range alone.
        plan = merge_plan(layer.num_teacher_heads, form.num_student_heads, form.layer_plans[number])
        labels = merge_labels(plan, layer.num_teacher_heads)
        merges = tuple(
            MergeAlphas(label, values[np.isfinite(values)])
            for label, values in zip(labels, alphas[number], strict=False)
        )
        groups = plan_groups(plan, layer.num_teacher_heads)
        layers.append(LayerContent(layer.student_layer, layer.teacher_layer, layer.site, groups, merges))
    return tuple(layers)


def merge_labels(plan: MergePlan, num_teacher_heads: int) -> Iterator[str]:
    """The teacher heads on either side of every merge, in plan order."""
    pool: Sequence[tuple[int, ...]] = [(head,) for head in range(num_teacher_heads)]
    for one_round in plan:
        for p, q in one_round:
            yield " + ".join(" ".join(map(str, pool[side])) for side in (p, q))
        pool = merge_pool(pool, one_round)


def read_evidence(
    reader: CacheReader, teacher: str | Path, inputs: Source | Arrays, *, provider: str = "cpu"
) -> Evidence:
    """Run the cache's teacher on the example.

    Raises ``cache-mismatch`` for another teacher or other inputs, ``not-finite``, ``not-a-distribution``.
    """
    form = reader.manifest.find(Attention)
    if form is None:
        rule = f"{reader.folder} must hold attention to be shown beside its teacher's; it holds none"
        remedy = "leave --teacher and --inputs out, and let shd verify run the teacher again"
        raise ShdError("argument-value", f"{rule}: {remedy}", "CACHE-160")
    work = rerun_teacher(reader, teacher, inputs, provider=provider)
    index_of = {work.inputs.key(index): index for index in reversed(range(len(work.inputs)))}
    example = choose_example(reader, index_of)
    batch = work.inputs.batch([index_of[example]])  # alone: without padding, so that the maps are its own
    shapes = form.map_shapes(reader.read(example, (), **_ALONE).extent)
    maps = {}
    for number, (student_layer, _) in enumerate(work.graph.layers):
        rows, columns = shapes[number]
        ((_, probs, _),) = work.read_maps(number, [batch])
        maps[student_layer] = probs[0, :, :rows, :columns]
    return Evidence(example, maps)


def choose_example(reader: CacheReader, known: Container[str] | None = None) -> str:
    """The key of a ``known`` sample whose maps can be looked at: of the first, the shortest of some length."""
    keys = [key for key in dict.fromkeys(reader.keys()) if known is None or key in known][:_EXAMPLE_CANDIDATES]
    if not keys:
        rule = f"the inputs must hold a sample of {reader.folder}; they hold none: they are others"
        raise ShdError("sample-missing", rule)
    lengths = {key: reader.read(key, (), **_ALONE).length for key in keys}
    return min(keys, key=lambda key: (lengths[key] < _EXAMPLE_LENGTH, abs(lengths[key] - _EXAMPLE_LENGTH)))


class Table(NamedTuple):
    """A table of the page; columns of text are not aligned as numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: tuple[int, ...] = ()


def render_page(reader: CacheReader, layers: Sequence[LayerContent], evidence: Evidence | None) -> str:
    """The whole page as HTML; ``evidence`` where the teacher was at hand."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("shd_ref.report").joinpath("page.html").read_text(encoding="utf-8")
    listing, manifest = list_cache(reader.folder), reader.manifest
    shards = f"{len(listing.written)} of {manifest.shards.num_shards}"
    sections: dict[str, Any] = {}
    if layers:
        maps = _maps(reader, layers, evidence)
        sections = {"alphas": _alphas(layers, manifest), "maps": maps, "groups": _groups(layers)}
    subjects = " and ".join(form.SUBJECT for form in manifest.forms)
    return environment.from_string(source).render(
        sections,
        title=f"Supervision cache of {manifest.teacher.name}",
        lead=f"{subjects.capitalize()}: {listing.samples:,} samples, each found by a hash of its inputs.",
        warning=None if listing.sealed else f"This cache is not complete: {shards} shards are committed.",
        facts=list(listing_facts(listing)),
        footer=f"Made by squeezing-heads {shd_ref.__version__}. This file asks for nothing from anywhere.",
    )


def _alphas(layers: Sequence[LayerContent], manifest: Manifest) -> dict[str, Any]:
    """The distribution of alpha, layer by layer."""
    if not any(layer.merges for layer in layers):
        text = f"The strategy {manifest.attention.strategy} has no pairwise weights."
        return {"text": text, "figures": [], "table": None}
    text = (
        "Alpha is the weight of the first of two merged heads, one per map, before it is clipped to [0, 1]: bars "
        f"hold the middle half and lines the middle nine tenths of {len(layers[0].merges[0].values):,} samples; the "
        "dot is the median. A spread-out alpha is what a constant merge would throw away."
    )
    figures, rows = [], []
    for layer in layers:
        medians = [merge.quantiles[2] for merge in layer.merges if merge.quantiles]
        note = f"median {min(medians):.2f} to {max(medians):.2f}" if medians else "no finite weight"
        label = f"Merge weights of student layer {layer.student_layer}: {note}, {len(layer.merges)} merges"
        title = f"Layer {layer.student_layer}"
        figures.append({"svg": alpha_figure(layer), "title": title, "note": note, "label": label})
        for merge in layer.merges:
            quantiles = [f"{q:.3f}" for q in merge.quantiles or (np.nan,) * len(QUANTILES)]
            clipped = ((merge.values < 0) | (merge.values > 1)).sum() / max(len(merge.values), 1)
            rows.append([str(layer.student_layer), merge.label, *quantiles, f"{clipped:.1%}"])
    columns = ["layer", "teacher heads", "5%", "25%", "median", "75%", "95%", "clipped"]
    return {"text": text, "figures": figures, "table": Table("Quantiles of alpha", columns, rows, (1,))}


def _maps(reader: CacheReader, layers: Sequence[LayerContent], evidence: Evidence | None) -> dict[str, Any]:
    """Maps of the example, beside the teacher's where they are at hand."""
    key = choose_example(reader) if evidence is None else evidence.example
    record, attention = reader.read(key, **_ALONE), reader.manifest.attention
    text = (
        f"Sample {record.index}, {record.length} positions: rows are queries, columns are keys, each picture is "
        "scaled to its largest entry and its root is drawn, so that small entries show. "
    )
    sources = "Each merged map stands with the teacher's maps that it was made of, and their weights."
    text += (
        "A cache lacks the teacher's maps: give --teacher and --inputs to see them." if evidence is None else sources
    )
    if attention.bound_temperature not in (None, 1.0):
        temperature = f"{attention.bound_temperature:g}"
        text += f" Merged maps are softened with temperature {temperature}, the teacher's are not."
    shown = []
    for number in map(round, np.linspace(0, len(layers) - 1, min(_SHOWN_LAYERS, len(layers)))):
        student, groups = layers[number].student_layer, layers[number].groups[:_SHOWN_HEADS]
        teacher = None if evidence is None else evidence.maps.get(student)
        merged = reader.decode(record, student)
        heads = [_head(record, number, head, group, merged[head], teacher) for head, group in enumerate(groups)]
        rest = attention.num_student_heads - len(heads)
        more = f", and {rest} more heads that are not shown" if rest else ""
        shown.append({"title": f"Student layer {student}{more}", "heads": heads})
    return {"text": text, "layers": shown}


def _head(
    record: SampleRecord, number: int, head: int, group: Sequence[int], merged: Any, teacher: Any
) -> dict[str, Any]:
    """A merged map, and the maps of the teacher that it was made of, with their weights."""
    weights = record.parts["mixing"][number, head] if "mixing" in record.parts else {}
    before = [
        {
            "uri": map_picture(teacher[member]),
            "alt": f"Map of teacher head {member}",
            "note": f"head {member}" + (f", {weights[member]:.2f}" if len(weights) else ""),
        }
        for member in (() if teacher is None else group[:_SHOWN_MEMBERS])
    ]
    return {
        "title": f"Student head {head}, from teacher heads {' '.join(map(str, group))}",
        "before": before,
        "after": {"uri": map_picture(merged), "alt": f"Merged map of student head {head}", "note": "merged"},
    }


def _groups(layers: Sequence[LayerContent]) -> Table:
    rows = []
    for layer in layers:
        groups = " | ".join(" ".join(map(str, group)) for group in layer.groups)
        rows.append([str(layer.student_layer), str(layer.teacher_layer), layer.site, groups])
    columns = ["student layer", "teacher layer", "site", "teacher heads of each student head"]
    return Table("Which teacher heads each student head learns from", columns, rows, (2, 3))


_PLACE: Final = 24
"""Width of a merge in its layer's figure; between alphas of 0 and 1 there are a hundred."""


def alpha_figure(layer: LayerContent) -> Markup:
    """The distribution of alpha for every merge of a layer, as an SVG element: the style sheet has its colours."""
    width, drawn = 30 + _PLACE * len(layer.merges), []

    def line(kind: str, x: float, first: float, end: float, last: float) -> str:
        return (
            f'<line class="{kind}" x1="{x:g}" y1="{125 - 100 * first:.4g}" x2="{end:g}" y2="{125 - 100 * last:.4g}"/>'
        )

    for level in (0, 0.5, 1):
        drawn += [line("level", 28, level, width, level), f'<text x="0" y="{129 - 100 * level:g}">{level}</text>']
    for number, merge in enumerate(layer.merges):
        if merge.quantiles:
            # Alphas beyond are drawn at the edge: they are counted as clipped anyway.
            low, lower, middle, upper, high = np.clip(merge.quantiles, -0.25, 1.25)
            x = 28 + _PLACE * (number + 0.5)
            drawn += [line("range", x, low, x, high), line("half", x, lower, x, upper)]
            drawn.append(f'<circle cx="{x:g}" cy="{125 - 100 * middle:.4g}" r="4"/>')
    # The page names the figure; a reader need not hear its labels.
    return Markup(f'<svg viewBox="0 0 {width} 150" aria-hidden="true">{"".join(drawn)}</svg>')


def map_picture(probs: NDArray[Any]) -> str:
    """One map ``(n, n)`` as the data URI of a PNG, a pixel an entry; the root shows small entries too."""
    sound = np.clip(np.nan_to_num(probs.astype(np.float64), posinf=1.0), 0.0, 1.0)  # a file may hold anything
    pixels = np.rint(255 * np.sqrt(sound / (sound.max(initial=0.0) or 1.0))).astype(np.uint8)
    rows = np.pad(pixels, ((0, 0), (1, 0))).tobytes()  # each begins with its filter, none
    size = struct.pack(">IIBBBBB", probs.shape[1], probs.shape[0], 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", size), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")
