"""Where a run is to write: what can be refused of it before a sample is read."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shd_ref
from shd_ref.cache import NO_ATTENTION, Manifest
from shd_ref.cache.storage.layout import MANIFEST_NAME
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.cache.storage.storage import write_errors
from shd_ref.cache.writer import check_free, other_job
from shd_ref.errors import ShdError
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.precompute.manifest import matching_of
from shd_ref.teacher.run.options import NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.session import PROVIDERS


def check_destination(folder: Folder, teacher: Path, options: PrecomputeOptions, run: RunOptions) -> None:
    """Refuse a place that cannot become this job's cache, as far as options tell; nothing is written.

    What the options leave open, such as the data set's fingerprint, is compared by ``CacheWriter``.

    Args:
        folder: the cache, a path or an address.
        teacher: the ``.onnx`` file; its name is compared, not its content.
        options: what to make of the teacher.
        run: how to run it.

    Raises:
        ShdError: ``cache-exists`` (it holds something else), ``cache-mismatch`` (a cache of another job),
            ``cache-corrupt``, ``write-failed`` (it cannot be made), ``argument-value`` (an address of no known kind).
    """
    storage = open_storage(folder)
    if isinstance(storage.root, Path):
        with write_errors(storage.root):
            _check_folder(storage.root)
    check_free(storage)
    if not storage.exists(MANIFEST_NAME):
        return
    found = Manifest.read(storage)
    known = _known_members(found, teacher, options, run)
    differences = [
        f"{name}: {old!r} -> {new!r}" for name, new in known.items() if (old := _member(found, name)) != new
    ]
    stored = NO_FORM if found.attention is NO_ATTENTION else found.attention.form
    if NO_FORM in (stored, options.form) and stored != options.form:
        differences.append(f"attention: {stored} -> {options.form}")
    names = [] if found.logits is None else [each.name for each in found.logits.with_teachers]
    asked = [path.name for path in options.with_teachers]
    if names != asked:
        differences.append(f"logits.with_teachers: {names} -> {asked}")
    if differences:
        raise other_job(storage.root, differences)


def _known_members(found: Manifest, teacher: Path, options: PrecomputeOptions, run: RunOptions) -> dict[str, Any]:
    """Members of the manifest that options decide, by dotted name."""
    known: dict[str, Any] = {
        "spec_version": shd_ref.SPEC_VERSION,
        "teacher.name": teacher.name,
        "teacher.provider": PROVIDERS.get(run.provider, run.provider),
        "logits.codec": None if options.logits == "none" else options.logits,
        "compression": options.compression,
        "on_error": options.on_error,
        "inputs.seed": options.seed_column,
        "shards.seed": run.seed,
    }
    if run.samples_per_shard is not None:
        known["shards.samples_per_shard"] = run.samples_per_shard
    if found.attention is NO_ATTENTION or not options.has_attention:
        return known
    known |= {
        "attention.form": options.form,
        "attention.num_student_heads": options.num_student_heads,
        "attention.strategy": options.strategy,
        "attention.alpha_rule": options.alpha_rule,
        "attention.alpha_per": options.alpha_per,
        "attention.codec": options.stored_codec,
    }
    if not options.is_factored:
        known["attention.temperature"] = float(options.temperature)
    matching = matching_of(options, run)
    if matching is None or found.attention.matching is None:
        known["attention.matching"] = matching
    else:
        known |= {f"attention.matching.{name}": value for name, value in asdict(matching).items()}
    if matching is None and options.plans is None:
        heads = min(options.num_student_heads, found.attention.num_teacher_heads)  # more are another job in any case
        known["attention.plan"] = merge_plan(found.attention.num_teacher_heads, heads, options.plan)
    return known


def _member(manifest: Manifest, name: str) -> Any:
    value: Any = manifest
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _check_folder(root: Path) -> None:
    """A folder, or a place where one can be made."""
    there = next(place for place in (root, *root.parents) if place.exists())
    if there == root and not root.is_dir():
        raise ShdError("cache-exists", f"{root} must be a folder; it is a file: name another --out", "CACHE-60")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written" if there.is_dir() else "is a file"
        raise ShdError("write-failed", f"{root} could not be written: {there} {reason}: name another --out")
