"""The user's samples: read once, divided for calibration, training, choices and the final judgement, and batched."""

from __future__ import annotations

import hashlib
import statistics
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, inputs_invalid, need
from shd_ref.teacher.sources import TOO_LONG, ArraySource, Source, named_inputs, open_source
from shd_torch.shrink.folders import text_inputs

if TYPE_CHECKING:
    from torch import Tensor

Row: TypeAlias = dict[str, NDArray[Any]]
"""One sample: the model's inputs by name, without a batch axis and without padding; of a pair also ``QUERY``."""

QUERY: Final = "labels_query"
"""The number of a pair's first text ``()``: pairs with the same one are compared with each other.

``SHDTrainer`` keeps what begins with labels from the student.
"""
PAIR_COLUMN: Final = "text_pair"
LABEL_COLUMNS: Final = ("label", "score")
TOKENS: Final = ("input_ids", "attention_mask")
BATCH: Final = 32
"""Samples of a step of training."""
CALIBRATION: Final = 128
"""Samples from which students are made, the first of the training set."""
MOST_HELD: Final = 500
"""Samples for choices, and as many others for the final judgement: at most a tenth of the data each."""
LEAST: Final = 40
_TOGETHER: Final = 4  # pairs of one query that are next to each other in training


class Columns(NamedTuple):
    """Where the texts of a file are."""

    text: str = "text"
    pair: str | None = None  # of the second text; None: PAIR_COLUMN, where there is one and the model reads pairs
    reads_pairs: bool = False
    is_apart: bool = False  # each text of a pair is a sample

    def find(self, source: Source) -> tuple[str, ...]:
        """The one or two of a source; none of one that holds arrays."""
        is_named = self.pair is not None or self.text != TEXTS.text
        if not is_named and self.text not in source.columns:
            return ()
        has_pairs = self.reads_pairs and PAIR_COLUMN in source.columns
        pair = self.pair or (PAIR_COLUMN if has_pairs else None)
        return (self.text,) if pair is None else (self.text, pair)


TEXTS: Final = Columns()
"""Single texts in a column text."""


@dataclass(frozen=True)
class Samples:
    """Rows by their use; no row is in two of them, and no query of pairs."""

    train: list[Row]
    choices: list[Row]  # for comparing candidates
    held_out: list[Row]  # for the figures of the page
    digest: str  # of all of them, in order
    train_files: list[str] = field(default_factory=list)  # the file of each row, where there are several
    held_files: list[str] = field(default_factory=list)

    def calibration(self, most: int = CALIBRATION, pad_id: int = 0) -> dict[str, NDArray[Any]]:
        """The first rows of the training set, short ones first, padded, as ``shrink`` takes them."""
        return pad(sorted(map(inputs_of, self.train[:most]), key=length_of), pad_id)


def inputs_of(row: Mapping[str, NDArray[Any]]) -> Row:
    """The model's inputs in a row, or in a batch."""
    return {name: array for name, array in row.items() if name != QUERY}


def row_source(rows: Sequence[Row]) -> ArraySource:
    """Rows of any length, as ``shd precompute`` reads them."""
    arrays = {name: np.fromiter((row[name] for row in rows), object, len(rows)) for name in inputs_of(rows[0])}
    return ArraySource(arrays, "data")


def read_rows(
    path: Path,
    folder: Path,
    max_length: int | None,
    argument: str = "data",
    takes: Sequence[str] = (),
    most: int | None = None,
    columns: Columns = TEXTS,
) -> list[Row]:
    """The samples of a file: texts for the tokenizer in the model's folder, or arrays of what it ``takes``, none with
    more than ``most`` positions. Of pairs that are apart, first the first texts of all, then the second ones.

    Raises:
        ShdError: ``inputs-invalid``, ``argument-value``, ``dependency-missing``.
    """
    with named_inputs(argument):
        sources, names = open_rows(path, folder, max_length, argument, takes, columns)
        queries = [] if len(sources[0].made_from) < 2 else [columns.text]
        rows = []
        for row in (row for source in sources for row in source.rows([*names, *queries])):
            rows.append({name: np.asarray(row[name]) for name in names})
            for name in queries:  # 48 bits, which float64 holds too
                number = int.from_bytes(hashlib.blake2b(row[name].encode(), digest_size=6).digest())
                rows[-1][QUERY] = np.asarray(number, np.int64)
    for row in rows:
        for name, array in row.items():
            if array.dtype.kind in "iub":
                row[name] = array.astype(np.int64)
        if "input_ids" in row and (not takes or "attention_mask" in takes):  # which graphs ask for
            row.setdefault("attention_mask", np.ones_like(row["input_ids"]))
    rows = [_without_padding(row) for row in rows]
    lengths = map(length_of, rows) if most is not None else ()
    if (
        long := next(((row, length) for row, length in enumerate(lengths) if length > (most or 0)), None)
    ) is not None:
        raise inputs_invalid(f"{argument}, row {long[0]}: {TOO_LONG.format(most=most, got=long[1])}")
    return rows


def open_rows(
    path: Path,
    folder: Path,
    max_length: int | None,
    argument: str = "data",
    takes: Sequence[str] = (),
    columns: Columns = TEXTS,
) -> tuple[list[Source], Sequence[str]]:
    """The file, once or for each text of pairs that are apart, and what is read of it; its first row is looked at.

    Raises:
        ShdError: as ``read_rows``.
    """
    with named_inputs(argument):
        source = _open_array(path) if path.suffix == ".npy" else open_source(path)
        if texts := columns.find(source):
            read = partial(open_source, path, tokenizer=folder, max_length=max_length)
            pairs = [(text, None) for text in texts] if columns.is_apart else [(texts[0], *texts[1:], None)[:2]]
            sources = [read(text_column=text, pair_column=pair) for text, pair in pairs]
            return sources, [name for name in text_inputs(folder) if name in takes] if takes else TOKENS
        names = [name for name in source.columns if name not in ("labels", *LABEL_COLUMNS)]
        first = {name: np.asarray(array) for name, array in next(iter(source.rows(names)), {}).items()}
    if not first or any(array.dtype.kind not in "iufb" or not array.ndim for array in first.values()):
        rule = f"{argument} must hold texts in a column text, or arrays of the model's inputs"
        raise ShdError("inputs-invalid", f"{rule}; got the columns {', '.join(source.columns)} of {path}")
    if others := [name for name in names if takes and name not in takes]:
        rule = (
            f"{argument} must hold inputs of the model, and labels; got {', '.join(others)}: leave it out of {path}"
        )
        raise ShdError("inputs-invalid", rule)
    need(max_length is None, "argument-value", "max_length", "go with texts", f"{max_length} with {path}")
    return [source], names


def read_texts(path: Path, count: int, columns: Columns = TEXTS) -> list[tuple[str, ...]]:
    """The first texts of a file, or pairs of them if they are read together; none of one that holds arrays."""
    source = None if path.suffix == ".npy" else open_source(path)
    if source is None or not (names := columns.find(source)[: 1 if columns.is_apart else 2]):
        return []
    return [tuple(row[name] for name in names) for row in islice(source.rows(names), count)]


def _open_array(path: Path) -> ArraySource:
    """A .npy of token ids ``(N, L)``, or of pixels ``(N, C, H, W)``."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ShdError("inputs-invalid", f"inputs {path} must be a readable .npy: {error}") from error
    return ArraySource({"input_ids" if array.dtype.kind in "iu" else "pixel_values": array}, str(path))


def _without_padding(row: Row) -> Row:
    """Without what follows the last position that counts; rows of images are as they are."""
    mask = row.get("attention_mask")
    if mask is None or mask.all():
        return row
    end = max(int(mask.nonzero()[0].max(initial=-1)) + 1, 1)
    return {name: array[:end] if array.shape[:1] == mask.shape else array for name, array in row.items()}


def divide(
    rows: Sequence[Row], held_out: Sequence[Row] | None, seed: int, files: Sequence[str] | None = None
) -> Samples:
    """Distinct rows in an order that depends on their content and the seed, not on the file's order; whole queries.

    ``files``: the file of each row, where there are several; a row that two of them hold is of the first.

    Raises:
        ShdError: ``argument-value`` for too few.
    """
    entries = _distinct(rows, seed, files)
    judged = [] if held_out is None else _distinct(held_out, seed)
    known = {entry.digest for entry in judged}
    entries = [entry for entry in entries if entry.digest not in known]
    if len(entries) < LEAST or (held_out is not None and len(judged) < LEAST // 2):
        got = f"{len(entries)}" if held_out is None else f"{len(entries)}, and {len(judged)} held out"
        raise ShdError("argument-value", f"data must hold {LEAST} distinct samples or more; got {got}")
    content = b"".join(entry.digest + entry.file.encode() for entry in (*entries, *judged))
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    count = min(len(entries) // 10, MOST_HELD)
    choices, entries = _cut(entries, count)
    if held_out is None:
        judged, entries = _cut(entries, count)
    need(bool(entries), "argument-value", "data", "hold pairs of three first texts or more", "one or two")
    # By content again: the first rows of each part are then of many queries.
    parts = entries, choices, _cut(judged, MOST_HELD)[0]
    train, choice_rows, judged_rows = ([entry.row for entry in sorted(part)] for part in parts)
    if files is None:
        return Samples(train, choice_rows, judged_rows, digest)
    train_files, _, held_files = ([entry.file for entry in sorted(part)] for part in parts)
    held_files = held_files if held_out is None else []
    return Samples(train, choice_rows, judged_rows, digest, train_files, held_files)


@dataclass(frozen=True, order=True)
class _Entry:
    """A row by its content."""

    digest: bytes
    row: Row = field(compare=False)
    query: bytes = field(compare=False)  # by the content of a pair's first text; of other rows the digest
    file: str = field(compare=False)


def _cut(entries: list[_Entry], count: int) -> tuple[list[_Entry], list[_Entry]]:
    """So many and the others: fewer where a query would be cut in two, the whole first query at least."""
    ends = [end for end, (entry, following) in enumerate(pairwise(entries), 1) if entry.query != following.query]
    end = max((end for end in (*ends, len(entries)) if end <= count), default=(*ends, len(entries))[0])
    return entries[:end], entries[end:]


def _distinct(rows: Sequence[Row], seed: int, files: Sequence[str] | None = None) -> list[_Entry]:
    distinct: dict[bytes, _Entry] = {}
    for row, file in zip(rows, files or repeat(""), strict=False):
        digest = _digest(inputs_of(row), seed)
        query = _digest({QUERY: row[QUERY]}, seed) if QUERY in row else digest
        distinct.setdefault(digest, _Entry(digest, row, query, file))
    return sorted(distinct.values(), key=lambda entry: (entry.query, entry.digest))


def _digest(row: Row, seed: int) -> bytes:
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16)
    for name, array in sorted(row.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def pad(rows: Sequence[Row], pad_id: int = 0) -> dict[str, NDArray[Any]]:
    """A batch, padded on the right: token ids with the model's own id, all else with zeros."""
    batch = {}
    for name in rows[0]:
        arrays = [row[name] for row in rows]
        shape = tuple(map(max, zip(*(array.shape for array in arrays), strict=True)))
        batch[name] = np.full((len(rows), *shape), pad_id * (name == "input_ids"), arrays[0].dtype)
        for number, array in enumerate(arrays):
            place: tuple[Any, ...] = (number, *map(slice, array.shape))
            batch[name][place] = array
    return batch


def collate(rows: Sequence[Row], pad_id: int = 0) -> dict[str, Tensor]:
    """A batch for PyTorch."""
    import torch  # here, as the command opens files before it imports PyTorch

    return {name: torch.from_numpy(array) for name, array in pad(rows, pad_id).items()}


def collate_with_labels(rows: Sequence[Row], pad_id: int = 0) -> dict[str, Tensor]:
    """The same with the tokens as labels, those of padding left out."""
    batch = collate(rows, pad_id)
    mask = batch.get("attention_mask", batch["input_ids"].new_ones(()))
    return batch | {"labels": batch["input_ids"].masked_fill(mask == 0, -100)}


def add_crops(rows: Sequence[Row], seed: int) -> list[Row]:
    """Every second text again as 3 to 15 of its tokens between its first and last: a student of sentences alone is
    worse on the short texts of other domains.
    """
    generator, crops = np.random.default_rng(seed), []
    for row in rows[::2]:
        count = len(row["input_ids"]) - 2
        if count > 5:
            size = int(generator.integers(3, min(count, 16)))
            start = int(generator.integers(1, count - size + 2))
            positions = [0, *range(start, start + size), count + 1]
            crops.append({name: array[positions] for name, array in row.items()})
    return [*rows, *crops]


def length_of(row: Row) -> int:
    """The longest axis that can vary."""
    return max((len(array) for array in row.values() if array.dtype.kind == "i" and array.ndim), default=1)


def batches(rows: Sequence[Row], size: int = 32, pad_id: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
    """All rows in batches of similar length; the order of rows is the same for every model."""
    ordered = sorted(rows, key=length_of)
    return (pad(ordered[start : start + size], pad_id) for start in range(0, len(ordered), size))


def typical_batch(rows: Sequence[Row], size: int) -> list[Row]:
    """Samples around the mean length: batches of training hold similar ones, so have little padding too."""
    rows = sorted(rows, key=length_of)
    lengths = [length_of(row) for row in rows]
    middle = min(bisect(lengths, statistics.fmean(lengths)), len(rows) - size // 2)
    return rows[max(middle - size // 2, 0) :][:size]


def training_order(rows: Sequence[Row], steps: int, size: int, seed: int) -> list[int]:
    """Indices of ``steps`` batches, which hold samples of similar length: less padding, in a random order.

    Pairs of one query, by fours, are as long as their mean, so that a batch has several to compare.
    """
    generator = np.random.default_rng(seed)
    lengths = np.array([length_of(row) for row in rows], np.float64)
    order: list[int] = []
    while len(order) < steps * size:
        shuffled = generator.permutation(len(rows))
        if QUERY in rows[0]:
            groups = _group(rows, shuffled)
            shuffled = np.array([index for group in generator.permutation(len(groups)) for index in groups[group]])
            for group in groups:
                lengths[group] = np.mean([length_of(rows[index]) for index in group])
        for start in range(0, len(rows), 50 * size):
            pool = shuffled[start : start + 50 * size]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            starts = range(0, len(pool) - size + 1, size)
            batches = [pool[start : start + size] for start in starts] or [np.resize(pool, size)]
            order += [int(index) for batch in generator.permutation(len(batches)) for index in batches[batch]]
    return order[: steps * size]


def _group(rows: Sequence[Row], order: NDArray[np.int64]) -> list[list[int]]:
    """Indices of rows in an order, those of one query in groups."""
    groups: list[list[int]] = []
    open_group: dict[int, list[int]] = {}
    for index in order.tolist():
        group = open_group.setdefault(int(rows[index][QUERY]), [])
        if not group:
            groups.append(group)
        group.append(index)
        if len(group) == _TOGETHER:
            del open_group[int(rows[index][QUERY])]
    return groups
