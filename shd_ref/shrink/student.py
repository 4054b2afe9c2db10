"""Heads, layers and plans of a student in ``shrink.json``, for its training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError
from shd_ref.layers import layer_map
from shd_ref.merging.plans import MergePlan, check_plan

FORMAT: Final = 1
_COUNTS: Final = (("num_attention_heads", "n_head", "n_heads"), ("num_hidden_layers", "n_layer", "n_layers"))


@dataclass(frozen=True)
class ShrunkStudent:
    """A student as its teaching sees it; layers are attention calls, zero-based."""

    num_heads: int  # H_s
    num_layers: int  # how many attention calls it makes
    layer_pairs: tuple[tuple[int, int], ...]  # (student, teacher), one for each student layer, in order
    plans: tuple[MergePlan, ...]  # the rounds of merges of each student layer


class _UntaughtError(Exception):
    """The report is whole, and describes a student that maps do not fit."""


def read_student(source: str | os.PathLike[str] | Mapping[str, Any]) -> ShrunkStudent:
    """Sizes and plans of a student, from the folder of ``shd-torch shrink``, its ``shrink.json`` or the report."""
    report, name = (source, "the report") if isinstance(source, Mapping) else _read(Path(source))
    try:
        if report["format"] != FORMAT:
            raise ValueError(f"format {report['format']!r}, of which this release reads {FORMAT}")
        heads, teacher = report["student"]["heads"], report["teacher"]
        if "stack" in report or isinstance(heads, list | tuple):
            raise _UntaughtError
        attending = [layer for layer in report["layers"] if layer["case"] != "dropped"]
        pairs = layer_map(teacher["layers"], len(attending), report["layer_map"])
        plans = tuple(check_plan(layer["plan"], teacher["heads"], heads) for layer in attending)
    except _UntaughtError:
        rule = (
            f"maps cannot be merged for {name}: it is one stack of two, or its layers have different numbers of heads"
        )
        advice = "name heads and layers of a stack yourself, or store logits, hidden states or embeddings"
        raise ShdError("shrink-unsupported", f"{rule}; {advice} (--no-attention)") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # ShdError is a ValueError
        raise ShdError("read-failed", f"{name} must say how a student was shrunk: {error!r}") from error
    if [student for student, _ in pairs] != list(range(len(attending))):
        raise ShdError("read-failed", f"{name} must pair every student layer; got {pairs}")
    return ShrunkStudent(heads, len(attending), pairs, plans)


def read_counts(folder: Path) -> tuple[int | None, int | None]:
    """Attention heads and layers of a Hugging Face folder, where its ``config.json`` has one of their usual names."""
    try:
        config = read_json(folder / "config.json")
        if config.get("is_encoder_decoder"):  # each kind of attention has its own
            return None, None
        heads, layers = (next((n for name in names if type(n := config.get(name)) is int), None) for names in _COUNTS)
    except (OSError, ValueError, AttributeError):
        return None, None
    return heads, layers


def _read(path: Path) -> tuple[Any, str]:
    file = path / "shrink.json" if path.is_dir() else path
    try:
        return read_json(file), str(file)
    except (OSError, ValueError) as error:
        rule = "student must be a folder of shd-torch shrink, or of a model whose config.json has heads and layers"
        message = f"{rule}; got {str(path)!r}: {error}: give --student-heads and --student-layers instead"
        raise ShdError("read-failed", message) from error
