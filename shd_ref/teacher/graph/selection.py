"""Which attention sites of a teacher are meant, by number or by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.find import AttentionSite


def select_sites(sites: Sequence[AttentionSite], wanted: str | None) -> tuple[AttentionSite, ...]:
    """The sites that a text such as ``0,2,4-7`` or ``encoder*`` names, in the order of the graph, each once.

    Args:
        sites: of a graph, from ``find_sites``.
        wanted: parts with commas between: numbers and ranges as ``shd inspect`` counts, names, patterns of names
            with ``*``, and the kinds ``self`` and ``cross``; all sites by default.

    Raises:
        ShdError: ``argument-value`` for a part that names no site.
    """
    if wanted is None:
        return tuple(sites)
    chosen: set[int] = set()
    for part in (part.strip() for part in wanted.split(",")):
        found = {site.layer for site in sites if _is_named(site, part)}
        if not found:
            raise ShdError(
                "argument-value",
                f"sites must name attention sites, by number from 0 to {len(sites) - 1}, range, name or kind (self, "
                f"cross), such as 0,2,4-7; got {part!r}, which names none: see shd inspect",
            )
        chosen |= found
    return tuple(site for site in sites if site.layer in chosen)


def _is_named(site: AttentionSite, part: str) -> bool:
    numbers = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
    if numbers is not None:
        first = int(numbers[1])
        return first <= site.layer <= int(numbers[2] or first)
    if part in ("self", "cross"):
        return site.cross is (part == "cross")
    return site.name == part or fnmatchcase(site.name, part)
