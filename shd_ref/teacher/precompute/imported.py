"""A cache of exact targets from hidden states that a server wrote, joined by their tokens (CACHE-194)."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.cache import (
    CacheWriter,
    Dataset,
    Errors,
    Exact,
    HiddenError,
    Manifest,
    SampleInputs,
    SampleRecord,
    ShardPlan,
    Teacher,
    TeacherHead,
    dataset_fingerprint,
    sample_key,
)
from shd_ref.cache.codecs.distortion import merge_errors
from shd_ref.cache.storage.places import Folder
from shd_ref.errors import inputs_invalid
from shd_ref.teacher.precompute.manifest import LEAST_SHARDS, SHARD_BYTES
from shd_ref.teacher.sources import Source
from shd_ref.teacher.sources.server_files import predictions, read_hf_head, read_sample, server_files

TELLING: Final = 8.0
"""Standard errors by which states of a typical file tell next tokens from others, to judge one of its length."""
TOLD: Final = 4.0
"""Standard errors of a file that is judged, at least: one whose states are another's has about none."""
ENOUGH: Final = 256
"""Rows of all files together over which states of a trained teacher predict their tokens far better than chance."""


def import_hidden(
    folder: Path,
    source: Source,
    teacher: Path,
    out: Folder,
    *,
    layer: int = -1,
    before_norm: bool = True,
    codec: str = "float16",
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Manifest, str | None]:
    """Write a cache of exact targets from a server's files; the same call resumes.

    Args:
        folder: with a ``.safetensors`` file for each text: ``token_ids`` and ``hidden_states``.
        source: the texts, tokenised: ``input_ids`` of each.
        teacher: its Hugging Face folder, from which the head is taken.
        out: the cache.
        layer: which of a file's layers is the last one.
        before_norm: whether its states come before the final norm, as vLLM's do.
        codec: ``"float32"``, ``"float16"`` or ``"int8"``.
        on_progress: called with files done and in all.

    Returns:
        The manifest, and what should be known of the states; None for nothing.

    Raises:
        ShdError: ``inputs-invalid`` and ``not-finite`` naming the file, or the text that has none; what
            ``CacheWriter`` raises.
    """
    head = read_hf_head(teacher, before_norm=before_norm)
    named = f"hidden_states[{layer}] of a server, {'before' if before_norm else 'after'} the final norm"
    form, pieces = Exact.of_head(head, codec, "positions", named)
    texts = [np.asarray(row["input_ids"], np.int64) for row in source.rows(["input_ids"])]
    paths, remark = _join(server_files(folder), texts, layer, head, on_progress)
    keys = [_key_of(tokens) for tokens in texts]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.data)
    count = len(texts)
    mean = max(1, sum(map(len, texts)) // count)
    size = max(1, min(SHARD_BYTES // (mean * form.row_sizes[0]), math.ceil(count / LEAST_SHARDS)))
    manifest = Manifest(
        spec_version=shd_ref.SPEC_VERSION,
        created_by=f"squeezing-heads {shd_ref.__version__}",
        teacher=Teacher(digest.hexdigest(), teacher.name, "imported", form.head.dtype),
        forms=(form,),
        inputs=SampleInputs(names=("attention_mask", "input_ids"), mask="attention_mask"),
        dataset=Dataset(dataset_fingerprint(keys), count),
        shards=ShardPlan(size, 0, math.ceil(count / size)),
    )
    writer = CacheWriter(out, manifest)
    writer.write_file(form.files[0], pieces)
    for shard in writer.missing_shards():
        records, errors = [], []
        for index in manifest.shard_samples(shard):
            states = read_sample(paths[keys[index]], layer, head).states
            codes = form.encode(states)
            errors.append(form.measure(states, codes))
            records.append(SampleRecord(index, keys[index], len(states), {"last": codes}))
        writer.write_shard(shard, records, Errors(exact=merge_errors(HiddenError, errors)))
    writer.seal()
    return manifest, remark


def _key_of(tokens: NDArray[np.int64]) -> str:
    return sample_key({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})


def _join(
    files: Sequence[Path],
    texts: Sequence[NDArray[np.int64]],
    layer: int,
    head: TeacherHead,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Path], str | None]:
    """The file of each text by its key, every file read and checked."""
    numbers = {_key_of(tokens): number for number, tokens in reversed(list(enumerate(texts)))}
    paths: dict[str, Path] = {}
    judged: list[tuple[float, int, Path]] = []
    for done, path in enumerate(files, start=1):
        sample = read_sample(path, layer, head)
        key = _key_of(sample.tokens)
        if key not in numbers:
            start = sample.tokens[:8].tolist()
            rule = f"{path}: token_ids must be those of one of the {len(texts)} texts; got {len(sample.tokens)}"
            raise inputs_invalid(f"{rule} others, first {start}: tokenise as the server did", "CACHE-194")
        if key in paths and not np.array_equal(read_sample(paths[key], layer, head).states, sample.states):
            raise inputs_invalid(f"{path} must hold the states of {paths[key]}, as it has its tokens", "CACHE-194")
        paths.setdefault(key, path)
        judged.append((*predictions(sample, head), path))
        if on_progress is not None:
            on_progress(done, len(files))
    missing = [number for key, number in numbers.items() if key not in paths]
    if missing:
        rule = f"a file must hold each of the {len(texts)} texts; {len(missing)} have none"
        raise inputs_invalid(f"{rule}, first text {min(missing)}", "CACHE-194")
    return paths, _judge(judged)


def _judge(judged: Sequence[tuple[float, int, Path]]) -> str | None:
    """Refuse a file whose states predict its tokens worse than those of other files, or all of them; or a remark."""
    usual = statistics.median(effect for effect, _, _ in judged)
    for effect, rows, path in judged:
        if usual * math.sqrt(rows) >= TELLING and effect * math.sqrt(rows) < TOLD:
            raise inputs_invalid(
                f"{path}: its hidden_states must predict its next tokens as those of the other files do "
                f"({usual * math.sqrt(rows):.1f} standard errors for {rows} rows); got "
                f"{effect * math.sqrt(rows):.1f}: they belong to other tokens or another layer, or are shifted",
                "CACHE-194",
            )
    rows = sum(rows for _, rows, _ in judged)
    if usual * math.sqrt(rows) >= TOLD:
        return None
    problem = f"predict their next tokens with this head no better than chance, over {rows} rows"
    if rows >= ENOUGH:
        raise inputs_invalid(
            f"{judged[0][2]} and all other files: their hidden_states {problem}: give the folder of the model that "
            "was served (--teacher), check --layer and --states; a model without training cannot be imported",
            "CACHE-194",
        )
    return f"the states {problem}, which are too few to tell: check --teacher, --layer and --states"
