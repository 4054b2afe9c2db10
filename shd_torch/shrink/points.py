"""The points of MAP's predictor (chapter PRED): how good is a student that keeps so many parts of each kind?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shd_ref.cache.storage.drafts import drafting
from shd_ref.cache.storage.outputs import output_file
from shd_ref.cache.storage.strict_json import read_json
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_torch.checks import check_finite
from shd_torch.shrink.dropped import Dropped
from shd_torch.shrink.families import family_of
from shd_torch.shrink.gates import Ranking
from shd_torch.shrink.sizes import count_parameters, sizes_of
from shd_torch.shrink.student import shrink

FORMAT = 1
Split = tuple[int, int]
Point = tuple[float, float, float]


def choose_splits(num_layers: int) -> list[Split]:
    """Splits to measure, as the second source chose its 22 of 12 layers.

    All kept; each kind alone down to a third; both together, by turns, down to three quarters.

    Args:
        num_layers: L of the teacher.

    Returns:
        Numbers of kept ``(attention, activations)``.
    """
    count = check_integer("num_layers", num_layers, 1, None, "PRED-3")
    fewer = range(count - 1, max(1, -(-count // 3)) - 1, -1)
    steps = range(2, 2 * (count - max(1, -(-3 * count // 4))) + 1)
    both = [(count - step // 2, count - (step + 1) // 2) for step in steps]  # activations go first
    return [(count, count), *((few, count) for few in fewer), *((count, few) for few in fewer), *both]


def measure_splits(
    teacher: nn.Module,
    data: Mapping[str, Any],
    ranking: Ranking,
    splits: Sequence[Split],
    quality: Callable[[Any], float],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    **sizes: Any,
) -> list[Point]:
    """A student for each split, and what a function of yours says it is worth, usually after a short fine-tune.

    Points are written one by one: started again with the same arguments, it goes on after the last one.

    Args:
        teacher: as in ``shrink``.
        data: the calibration set, as in ``shrink``.
        ranking: which parts go first, within each kind: from ``rank_layers``.
        splits: numbers of kept ``(attention, activations)``; see ``choose_splits``.
        quality: takes the student, in evaluation mode and its own from then on, and returns a finite number, the
            more the better. PyTorch's seed is set before each call, so that a point does not depend on the others.
        out: a JSON file, new or from an earlier run.
        seed: of every call.
        progress: gets a line a split.
        **sizes: more of ``shrink``: ``heads``, ``layers`` left out, and so on; the same for every split.

    Returns:
        Rows ``(attention ratio, activation ratio, quality)`` in the order of the splits, ratios of what is kept:
        what ``shd_ref.shrink.predictor.fit_predictor`` takes.

    Raises:
        ShdError: what ``shrink`` raises; ``argument-value`` for a split, a quality, or points of other arguments;
            ``read-failed``, ``write-failed``.

    Source: MAP of the second source.
    """
    place = output_file(out)
    num_layers = sizes_of(teacher.config).layers
    if len(ranking.attention) != num_layers:
        raise ShdError(
            "argument-value",
            f"ranking must be of the teacher's {num_layers} layers; got one of {len(ranking.attention)}",
            "DEPTH-9",
        )
    gated = family_of(teacher).is_gated
    wanted = [_drop(ranking, split, num_layers, gated) for split in splits]
    head = {
        "format": FORMAT,
        "teacher": sizes_of(teacher.config).__dict__ | {"parameters": count_parameters(teacher)},
        "options": json.loads(json.dumps(sizes, default=str)),
        "seed": check_integer("seed", seed, 0, None, "PRED-3"),
    }
    measured = _read_points(place, head)
    for number, (split, dropped) in enumerate(zip(splits, wanted, strict=True)):
        key = json.dumps(_lists(dropped))
        if key not in measured:
            student = shrink(
                teacher, data, drop_attention=dropped.attention, drop_activations=dropped.activations, **sizes
            ).student
            torch.manual_seed(seed)
            measured[key] = check_finite("quality", quality(student), "PRED-3")
            points = [{"dropped": json.loads(name), "quality": value} for name, value in measured.items()]
            with drafting(place) as draft:  # a run that is killed leaves the last one
                draft.write_text(json.dumps(head | {"points": points}, indent=1) + "\n", encoding="utf-8")
        if progress is not None:
            progress(
                f"split {number + 1} of {len(splits)}: {split[0]} attention blocks, {split[1]} activations: "
                f"{measured[key]:g}"
            )
    qualities = [measured[json.dumps(_lists(dropped))] for dropped in wanted]
    return [(a / num_layers, t / num_layers, found) for (a, t), found in zip(splits, qualities, strict=True)]


def _drop(ranking: Ranking, split: Split, num_layers: int, gated: bool) -> Dropped:
    attention, activations = split
    if not gated:
        return ranking.drop(attention=attention, activations=activations)
    if activations != num_layers:
        raise ShdError(
            "shrink-unsupported",
            f"splits must keep all {num_layers} activations where FFNs are gated; got {split}",
            "FFN-3",
        )
    return Dropped(ranking.drop(attention=attention).attention)


def _lists(dropped: Dropped) -> list[list[int]]:
    return [list(dropped.attention), list(dropped.activations)]


def _read_points(place: Path, head: dict[str, Any]) -> dict[str, float]:
    """Qualities by what was dropped, from an earlier run with the same arguments."""
    if not place.exists():
        return {}
    try:
        found = read_json(place)
        stored = {name: found[name] for name in head}
        points = {json.dumps(point["dropped"]): float(point["quality"]) for point in found["points"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ShdError(
            "read-failed", f"out must be new, or points of measure_splits; got {str(place)!r}: {error!r}"
        ) from error
    other = [name for name, value in head.items() if stored[name] != value]
    if other:
        raise ShdError(
            "argument-value",
            f"out must be new, or hold points of the same {other[0]}; got {stored[other[0]]} in {str(place)!r}, and "
            f"now {head[other[0]]}: name another file",
        )
    return points
