"""The page: every number as text, every figure in its place. Needs jinja2.

Everything that comes from a cache is untrusted: the template escapes it, figures never hold its strings, and the
page's own policy forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

import shd_ref
from shd_ref.cache import FORMAT_VERSION, NO_ATTENTION, CacheReader, Manifest
from shd_ref.report.content import CacheContent, LayerContent
from shd_ref.report.packages import jinja2
from shd_ref.report.sections import (
    Table,
    alphas_section,
    codec_section,
    count_of,
    entropy_section,
    forms_section,
    maps_section,
    mean_kl,
    residuals_section,
)

if TYPE_CHECKING:
    from shd_ref.report.evidence import Evidence

_SECTIONS = (
    ("alphas", "Merge weights"),
    ("residuals", "Residuals"),
    ("maps", "Maps"),
    ("entropy", "Entropy"),
    ("codec", "Codec"),
    ("forms", "Forms"),
    ("sizes", "Sizes"),
    ("job", "How it was made"),
)
_OF_ANY_CACHE = ("forms", "sizes", "job")


def render_page(reader: CacheReader, content: CacheContent, evidence: Evidence | None) -> str:
    """The whole page as HTML.

    Args:
        reader: of the cache, for the example's maps.
        content: what the cache holds.
        evidence: what the teacher told, where it was at hand.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("shd_ref.report").joinpath("page.html").read_text(encoding="utf-8")
    manifest = content.manifest
    about_attention: dict[str, Any] = {}
    if manifest.attention is not NO_ATTENTION:
        about_attention = {
            "alphas": alphas_section(content),
            "residuals": residuals_section(evidence),
            "maps": maps_section(reader, evidence),
            "entropy": entropy_section(content),
            "codec": codec_section(content),
            "groups": _groups(content.layers),
        }
    return environment.from_string(source).render(
        about_attention,
        title=f"Supervision cache of {manifest.teacher.name}",
        lead=f"{_lead(manifest)}: {count_of(content.samples, 'sample')}, each found by a hash of its inputs.",
        warning=None
        if content.sealed
        else f"This cache is not complete: {content.shards} of {manifest.shards.num_shards} shards are committed.",
        sections=[(name, title) for name, title in _SECTIONS if name in about_attention or name in _OF_ANY_CACHE],
        tiles=_tiles(content),
        forms=forms_section(content),
        sizes=_sizes(content),
        job=_job(content),
        footer=f"Made by squeezing-heads {shd_ref.__version__}. This file asks for nothing from anywhere.",
    )


def _lead(manifest: Manifest) -> str:
    attention = manifest.attention
    if attention is NO_ATTENTION:
        return " and ".join("hidden states" if form.SUBJECT == "hidden" else "Logits" for form in manifest.forms)
    heads = f"{attention.num_teacher_heads} heads to {attention.num_student_heads}"
    return f"Attention of {count_of(len(attention.layers), 'layer')}, squeezed from {heads}"


def _tiles(content: CacheContent) -> list[dict[str, str]]:
    tiles = [
        ("samples", f"{content.samples:,}", "complete" if content.sealed else "partial"),
        ("stored codes", _bytes(content.coded_bytes), f"{_ratio(content):.1f}× smaller than float32"),
    ]
    if content.manifest.attention is not NO_ATTENTION:
        tiles += _attention_tiles(content)
    return [{"name": name, "value": value, "note": note} for name, value, note in tiles]


def _attention_tiles(content: CacheContent) -> list[tuple[str, str, str]]:
    attention = content.manifest.attention
    count, clipped, even = (
        sum(layer.total(name) for layer in content.layers) for name in ("count", "clipped", "even")
    )
    worst = max((error.kl_max for error in content.shard_errors), default=0.0)
    tiles = [
        (
            "heads",
            f"{attention.num_teacher_heads} → {attention.num_student_heads}",
            f"{attention.strategy}, by {attention.alpha_per}",
        ),
        ("layers", str(len(attention.layers)), "of the student"),
        ("codec error", f"{mean_kl(content):.2g}", f"nats a row, at most {worst:.2g}"),
    ]
    if count:
        tiles.append(("clipped weights", f"{clipped / count:.1%}", f"{even / count:.1%} without preference"))
    return tiles


def _sizes(content: CacheContent) -> list[tuple[str, str]]:
    lengths = np.array(content.lengths)
    per_sample = content.coded_bytes / content.samples
    facts = [
        ("samples", f"{content.samples:,}, {int(lengths.sum()):,} positions; {content.skipped:,} more were skipped"),
        ("length", f"median {np.median(lengths):.0f}, from {lengths.min()} to {lengths.max()}"),
        ("codes", f"{_bytes(content.coded_bytes)}, {_ratio(content):.2f}× smaller than float32"),
        ("a sample", f"{_bytes(per_sample)}, {_bytes(content.coded_bytes / int(lengths.sum()))} a position"),
        ("shard files", f"{_bytes(content.shard_bytes)} in {count_of(content.shards, 'shard')}"),
        (
            "beside the codes",
            f"{_bytes(content.shard_bytes - content.coded_bytes)}: weights, mixing matrices, headers",
        ),
    ]
    if content.maps_read:
        rate, each = content.read_bytes_per_second, content.coded_by_form["attention"] / content.samples
        words = f"{_bytes(rate)} of maps a second, checked and decoded by one process, while this page was made"
        facts.append(("read rate", f"{words} ({rate / each:,.0f} samples a second)"))
    return facts


def _job(content: CacheContent) -> list[tuple[str, str]]:
    manifest = content.manifest
    teacher, attention = manifest.teacher, manifest.attention
    mask = manifest.inputs.mask
    squeeze = []
    if attention is not NO_ATTENTION:
        strategy = f"{attention.strategy}, alpha rule {attention.alpha_rule}, one weight a {attention.alpha_per}"
        squeeze = [("strategy", strategy), ("plans", _plans(manifest))]
    return [
        ("teacher", f"{teacher.name}, SHA-256 {teacher.sha256}"),
        ("run by", f"{teacher.provider}, in {teacher.dtype}"),
        *squeeze,
        *(fact for form in manifest.forms for fact in form.describe()),
        ("compression", manifest.compression),
        (
            "inputs",
            ", ".join(manifest.inputs.names) + (f"; attention mask {mask}" if mask else "; no attention mask"),
        ),
        ("data set", f"{manifest.dataset.num_samples:,} samples, fingerprint {manifest.dataset.fingerprint}"),
        (
            "shards",
            f"{manifest.shards.num_shards:,} of {manifest.shards.samples_per_shard:,} samples, "
            f"seed {manifest.shards.seed}",
        ),
        (
            "written by",
            f"{manifest.created_by}, specification {manifest.spec_version}, format {FORMAT_VERSION}",
        ),
        ("cache id", manifest.id),
    ]


def _plans(manifest: Manifest) -> str:
    attention = manifest.attention
    layers = "the same for every layer" if attention.plans is None else "every layer has its own"
    how = attention.matching
    if how is None:
        return layers
    return f"{layers}; matched by {how.by} on {count_of(how.samples, 'sample')}, seed {how.seed}"


def _groups(layers: Sequence[LayerContent]) -> Table:
    rows = [
        [
            str(layer.student_layer),
            str(layer.teacher_layer),
            layer.site,
            " | ".join(" ".join(map(str, group)) for group in layer.groups),
        ]
        for layer in layers
    ]
    columns = ["student layer", "teacher layer", "site", "teacher heads of each student head"]
    return Table("Which teacher heads each student head learns from", columns, rows, (2, 3))


def _ratio(content: CacheContent) -> float:
    return content.float32_bytes / max(content.coded_bytes, 1)


def _bytes(number: float) -> str:
    return decimal(int(number))
