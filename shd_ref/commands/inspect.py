"""``shd inspect``: the attention of a teacher graph, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from shd_ref.commands.options import AsJson, TeacherPath
from shd_ref.commands.terminal import console, marked, messages
from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import Shown

if TYPE_CHECKING:
    from shd_ref.teacher.graph.factors import SiteFactors
    from shd_ref.teacher.graph.find import AttentionSite
    from shd_ref.teacher.packages import onnx

REPORT_VERSION: Final = 1
"""Of the JSON; ``specs/schemas/inspect.schema.json`` describes it. Members may be added under the same number."""

_FIELDS: Final = (
    "layer",
    "name",
    "op_type",
    "num_heads",
    "num_kv_heads",
    "d_k",
    "d_v",
    "d_model",
    "dtype",
    "layout",
    "cross",
    "row_sums",
    "supported",
    "reason",
    "note",
)


def inspect(
    teacher: TeacherPath,
    sites: Annotated[
        str | None, Shown("Sites by number, name or kind: 0,2,4-7, encoder*, self, cross. Default: all.")
    ] = None,
    factored: Annotated[
        bool,
        typer.Option("--factored", help="Also run the graph once on tiny inputs, to find queries and keys."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List every attention site of a teacher graph, and what can be squeezed.

    shd inspect teacher.onnx

    The graph is walked along its data flow, so the exporter's naming does not matter. Exit code 1 when no site
    can be squeezed.
    """
    from shd_ref.teacher.graph.find import find_sites
    from shd_ref.teacher.graph.selection import select_sites
    from shd_ref.teacher.opening.load import load_teacher

    model = load_teacher(teacher)
    found = select_sites(find_sites(model), sites)
    factors = _find_factors(model, found) if factored else ()
    if as_json:
        print(json.dumps(report_sites(teacher, found, factors)))
    else:
        console.print(_table(teacher, found, factors))
    if not any(site.supported for site in found):
        if not found:
            messages.print("no attention found: export the model with eager attention (shd-torch export does)")
        raise typer.Exit(1)


def report_sites(
    teacher: Path, sites: Sequence[AttentionSite], factors: Sequence[SiteFactors] = ()
) -> dict[str, Any]:
    """What ``shd inspect --json`` prints.

    Args:
        teacher: the graph's file.
        sites: from ``find_sites``.
        factors: of these sites, from ``find_factors``; none where they were not asked for.
    """
    entries = []
    for number, site in enumerate(sites):
        entry = {field: getattr(site, field) for field in _FIELDS}
        one = factors[number] if factors else None
        entry["factored"] = one and {
            "supported": one.supported,
            "reason": one.reason,
            "num_kv_heads": one.num_kv_heads if one.supported else None,
            "d": one.d if one.supported else None,
            "scale": one.scale if one.supported else None,
        }
        entries.append(entry)
    return {"report_version": REPORT_VERSION, "teacher": str(teacher), "sites": entries}


def _find_factors(model: onnx.ModelProto, sites: Sequence[AttentionSite]) -> tuple[SiteFactors, ...]:
    from shd_ref.teacher.graph.factors import SiteFactors, find_factors

    try:
        return find_factors(model, sites)
    except ShdError as error:  # a graph that does not run can still be listed
        return tuple(SiteFactors(site, reason=str(error)) for site in sites)


def _table(teacher: Path, sites: Sequence[AttentionSite], factors: Sequence[SiteFactors]) -> Table:
    table = Table(title=f"{teacher.name}: {len(sites)} attention site{'s' * (len(sites) != 1)}", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("name", overflow="fold")
    table.add_column("kind")
    for title in ("heads", "kv heads", "d_k", "d_v", "D"):
        table.add_column(title, justify="right")
    table.add_column("squeeze", overflow="fold")
    if factors:
        table.add_column("queries and keys", overflow="fold")
    for number, site in enumerate(sites):
        kind = {True: "cross", False: "self", None: "?"}[site.cross]
        sizes = (site.num_heads, site.num_kv_heads, site.d_k, site.d_v, site.d_model)
        verdicts = [_verdict(site.supported, site.reason or site.note)]
        verdicts += [_verdict(one.supported, one.reason) for one in factors[number : number + 1]]
        table.add_row(str(site.layer), site.name, kind, *("?" if n is None else str(n) for n in sizes), *verdicts)
    return table


def _verdict(supported: bool, reason: str | None = None) -> Text:
    rest = "" if reason is None else f": {reason}"
    return marked("yes", "green", rest) if supported else marked("no", "red", rest)
