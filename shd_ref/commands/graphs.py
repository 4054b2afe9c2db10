"""``shd inspect``: the attention sites and inputs of a teacher's graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from shd_ref.cache.audit import spans
from shd_ref.commands.options import TeacherPath
from shd_ref.commands.program import Document, Failed
from shd_ref.commands.terminal import console, marked, messages, narrow_table

if TYPE_CHECKING:
    from shd_ref.teacher.graph.find import AttentionSite
    from shd_ref.teacher.graph.inputs import InputSpec

REPORT_VERSION: Final = 1
"""Of the JSON; ``specs/schemas/inspect.schema.json`` describes it. Members may be added under the same number."""

_ROUNDING_NOTE: Final = (
    "quantised: maps are those of {}; a session with other outputs, optimisations or version may round otherwise. "
    "A cache names its own, and is resumed by the same."
)

_FIELDS: Final = """layer name op_type num_heads num_kv_heads d_k d_v d_model dtype layout cross row_sums supported
reason"""


def inspect(teacher: TeacherPath, /, *, sites: str | None = None) -> Document:
    """List the attention sites of a teacher graph, whether they can be squeezed, and the graph's inputs.

    shd inspect teacher.onnx

    The search follows the data flow, so names in the graph do not matter. Exit code 1 if no site can be squeezed.

    Args:
        sites: Sites by number, name or kind: 0,2,4-7, encoder*, self, cross. Default: all.
    """
    from shd_ref.teacher.graph.find import find_kinds, find_sites, select_sites
    from shd_ref.teacher.graph.inputs import input_specs
    from shd_ref.teacher.opening.load import load_teacher
    from shd_ref.teacher.opening.model import rounds_in_run
    from shd_ref.teacher.session import describe_session

    model = load_teacher(teacher)
    all_sites, specs = find_sites(model), input_specs(model)
    chosen = select_sites(all_sites, sites)
    decoder = find_kinds(all_sites, specs).decoder_inputs
    console.print(_table(teacher, chosen))
    for reason in _reasons(chosen):
        console.print(reason, highlight=False)
    if rounds_in_run(model):
        console.print(_ROUNDING_NOTE.format(describe_session()), highlight=False)
    console.print()
    console.print(_inputs_table(specs, decoder))
    document = report_sites(teacher, chosen, specs, decoder)
    if not any(site.supported for site in chosen):
        if not chosen:
            messages.print("no attention found: export the model with eager attention (shd-torch export does)")
        raise Failed(document)
    return document


def report_sites(
    teacher: Path, sites: Sequence[AttentionSite], specs: Sequence[InputSpec], decoder: Collection[str]
) -> dict[str, Any]:
    """The document of ``shd inspect --json``."""
    from shd_ref.teacher.graph.inputs import SUPPLIED

    entries = [{field: getattr(site, field) for field in _FIELDS.split()} for site in sites]
    inputs = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "part": spec.part,
            "decoder": spec.name in decoder,
            "supplied": spec.part in SUPPLIED,
        }
        for spec in specs
    ]
    return {"report_version": REPORT_VERSION, "teacher": str(teacher), "sites": entries, "inputs": inputs}


def _table(teacher: Path, sites: Sequence[AttentionSite]) -> Table:
    table = narrow_table(f"{teacher.name}: {len(sites)} attention site{'s' * (len(sites) != 1)}")
    for title in ("layer", "kind", "heads", "kv\nheads", "d_k", "d_v", "D", "squeeze"):
        table.add_column(title, justify="left" if title in ("kind", "squeeze") else "right")
    table.add_column("name", overflow="fold")
    for site in sites:
        kind = {True: "cross", False: "self", None: "?"}[site.cross]
        sizes = (site.num_heads, site.num_kv_heads, site.d_k, site.d_v, site.d_model)
        shown = ("?" if size is None else str(size) for size in sizes)
        verdict = marked("yes", "green") if site.supported else marked("no", "red")
        table.add_row(str(site.layer), kind, *shown, verdict, site.name)
    return table


def _reasons(sites: Sequence[AttentionSite]) -> list[str]:
    """Why sites cannot be squeezed."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        if site.reason:
            layers.setdefault(site.reason, []).append(site.layer)
    reasons = []
    for reason, numbers in layers.items():
        runs = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in spans(numbers))
        reasons.append(f"layer{'s' * (len(numbers) > 1)} {runs}: {reason}")
    return reasons


def _inputs_table(specs: Sequence[InputSpec], decoder: Collection[str]) -> Table:
    """The inputs of a run; the keys and values of the past, of which there may be a hundred, in one row."""
    table = narrow_table("inputs")
    table.add_column("name", overflow="fold")
    for title in ("dtype", "shape", "comes from"):
        table.add_column(title)
    past = [spec for spec in specs if spec.part == "past"]
    for spec in specs:
        if spec in past[1:]:
            continue
        more = f" and {len(past) - 1} more" if spec in past and len(past) > 1 else ""
        shape = ", ".join("?" if axis is None else str(axis) for axis in spec.shape)
        table.add_row(spec.name + more, spec.dtype, f"({shape})", _origin(spec, spec.name in decoder))
    return table


def _origin(spec: InputSpec, is_decoder: bool) -> str:
    """Where an input comes from, in words."""
    defaults = {"past": "an empty past", "positions": "counted from the mask", "types": "zeros", "branch": "false"}
    if spec.part in defaults:
        return spec.past_problem or f"shd: {defaults[spec.part]}, unless the data hold it"
    return "the data" + ", for the decoder" * is_decoder + " (mask of padding)" * (spec.part == "mask")
