"""Model inputs: checked against the graph, trimmed, keyed and batched without changing results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import sample_key, trim_inputs
from shd_ref.errors import ShdError, inputs_invalid, need
from shd_ref.teacher.graph.inputs import SUPPLIED, TYPES, InputSizes, InputSpec
from shd_ref.teacher.sources import TOO_LONG, Arrays, ArraySource, IndexedSource, Row, Source
from shd_ref.teacher.sources.files import Spool
from shd_ref.teacher.sources.text import TOKEN_COLUMNS


def group_samples(
    indices: Iterable[int],
    lengths: NDArray[np.int64],
    batch_size: int,
    *,
    batch_tokens: int | None = None,
    equal: NDArray[np.int64] | None = None,
) -> Iterator[tuple[int, ...]]:
    """Batches of samples, longest first, as an inference arena grows to its largest batch and never shrinks.

    ``batch_tokens`` bounds samples times the longest of them; samples whose rows of ``equal`` ``(N, k)`` differ run
    apart.
    """
    chosen = np.fromiter(indices, dtype=np.int64)
    columns = [] if equal is None else [-equal[chosen, column] for column in reversed(range(equal.shape[1]))]
    ordered = chosen[np.lexsort((chosen, *columns, -lengths[chosen]))]
    start = 0
    while start < len(ordered):
        longest = max(int(lengths[ordered[start]]), 1)
        size = batch_size if batch_tokens is None else max(1, batch_tokens // longest)
        batch = ordered[start : start + size]
        if equal is not None:
            same = (equal[batch] == equal[batch[0]]).all(axis=1)
            batch = batch[: len(batch) if same.all() else int(same.argmin())]
        yield tuple(batch.tolist())
        start += len(batch)


def share_shards(num_shards: int, part: int, parts: int) -> range:
    """One of equal parts of a job's shards: neighbours, as they share batches and folders."""
    got = f"{part}/{parts}: count from 0"
    need(0 <= part < parts, "argument-value", "shards", "be i/n with 0 <= i < n", got)
    return range(part * num_shards // parts, (part + 1) * num_shards // parts)


_FOREIGN: Final = "take the teacher's own tokenizer (--tokenizer), and no labels in place of tokens"
Sample = dict[str, NDArray[Any]]
MASK_NAMES: tuple[str, ...] = ("attention_mask", "input_mask")
"""Inputs taken for the attention mask when none is named."""


@dataclass(frozen=True)
class Batch:
    """Samples that run together: indices, lengths of both sequences, arrays (with more rows for a fixed batch)."""

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    arrays: dict[str, NDArray[Any]]
    decoder_lengths: tuple[int, ...] = ()


def check_supplied(spec: InputSpec) -> None:
    """Refuse an input that does not follow from the others."""
    if spec.past_problem is not None:
        raise inputs_invalid(f"inputs must hold {spec.name}: {spec.past_problem}")
    if spec.part == "positions" and len(spec.shape) != 2:
        rule = f"inputs must hold {spec.name}, since only (B, L) follows from the mask, and the graph takes it"
        raise inputs_invalid(f"{rule} with {len(spec.shape)} axes: give it as a column")


def supply(specs: Sequence[InputSpec], rows: int, length: int, mask: NDArray[Any] | None) -> Sample:
    """Inputs that are fed besides the data: an empty past, ``position_ids`` by the mask, types of 0, no cache branch.

    Of a batch of ``rows`` samples; ``mask`` is ``(B, L)``, None where all are tokens.
    """
    tokens = np.ones((rows, length), np.int64) if mask is None else mask.astype(np.int64)
    shapes = InputSizes(rows, length).shapes(specs)
    return {
        spec.name: ((tokens.cumsum(axis=1) - 1) * tokens).astype(spec.dtype)
        if spec.part == "positions"
        else np.zeros(shapes[spec.name], spec.dtype)
        for spec in specs
    }


class ModelInputs:
    """A data set of model inputs, read once from beginning to end when this is made, and by number afterwards.

    In memory stay 32 bytes per sample (and 8 more where the source is spooled), never the data.

    Args:
        source: the rows, or arrays by name with first axis N; columns that the graph does not take are ignored.
        specs: the graph's inputs; ``rows`` says of some how many rows their table has, see ``count_rows``.
        mask: name of the attention mask ``(L,)`` of 0 and 1, 1 = a real token; by default one of ``MASK_NAMES``,
            if the graph has one. Where no row is padded, a mask that the source lacks is made.
        seed_column: an integer column that is kept per sample, besides the inputs.
        names: the inputs that the data must give, as a manifest lists them; by default all that they can.
        decoder: inputs of a second sequence, whose padding is not the mask's.
        decoder_mask: which of them is its mask, if any; without one, samples of different lengths run apart.
        pads: the padding of inputs that are not padded with 0.
        groups: which input holds the groups of a sample's tokens; padded with -1 on all axes.

    Attributes:
        names, supplied: inputs that the data give, which make a key; those that follow, see ``supply``.
        keys: ``(N, 16)`` uint8, the sample keys; ``seeds`` ``(N,)``, or None.
        lengths, decoder_lengths: ``(N,)`` positions of both sequences, by mask or axis; 0 where there is none.
        firsts: ``(N,)`` positions of padding in front of each sample; 0 without a mask.

    Raises:
        ShdError: ``inputs-invalid``, naming the sample and input, what the graph takes and what was found.
    """

    def __init__(
        self,
        source: Source | Arrays,
        specs: Sequence[InputSpec],
        mask: str | None = None,
        seed_column: str | None = None,
        on_read: Callable[[int, int], None] | None = None,
        names: Collection[str] | None = None,
        decoder: Collection[str] = (),
        decoder_mask: str | None = None,
        rows: Mapping[str, int] | None = None,
        pads: Mapping[str, int] | None = None,
        groups: str | None = None,
    ) -> None:
        self._rows, self._pads = dict(rows or {}), dict(pads or {}) | ({} if groups is None else {groups: -1})
        self._groups = groups
        self._source = source if isinstance(source, Source) else ArraySource(source)
        self._reading = threading.Lock()  # a file has one position, and a source need not be safe for threads
        columns = self._source.columns if names is None else names
        self._supplied = [spec for spec in specs if spec.part in SUPPLIED and spec.name not in columns]
        for spec in self._supplied:
            check_supplied(spec)
        self.supplied = tuple(sorted(spec.name for spec in self._supplied))
        self._specs = {spec.name: spec for spec in specs if spec.name not in self.supplied}
        self.names = tuple(sorted(self._specs))
        self.decoder = tuple(name for name in self.names if name in decoder)
        self.decoder_mask = decoder_mask if decoder_mask in self.decoder else None
        first_specs = {name: spec for name, spec in self._specs.items() if name not in self.decoder}
        pairs = [name for name, spec in first_specs.items() if len(spec.shape) == 2]
        rule = f"be one of the graph's (B, L) inputs {pairs}"
        need(mask is None or mask in pairs, "inputs-invalid", "mask", rule, repr(mask))
        self.mask = next((name for name in MASK_NAMES if name in pairs), None) if mask is None else mask
        self.ignored = tuple(sorted(set(self._source.columns) - set(self.names)))
        self._unread = [name for name in (TYPES,) if name in self.ignored]
        self._sequences = [name for name in self.names if len(self._specs[name].shape) > 1]
        # Those that are as long as their mask, always.
        self._padded = set(self._sequences) - set(self.decoder) if self.mask is not None else set()
        has_mask = self.decoder_mask is not None
        self._padded_decoder = set(self._sequences) & set(self.decoder) if has_mask else set()
        # Those whose length the graph leaves open, as it does the mask's where there is one.
        free = [name for name in self._sequences if not isinstance(self._specs[name].shape[1], int)]
        self._free = [name for name in free if name not in self.decoder]
        self._free_decoder = [name for name in free if name in self.decoder]
        self._columns = self._choose_columns()
        self.seed_column = seed_column
        if seed_column is not None and seed_column not in self._source.columns:
            raise self._source.refuse(
                f"must hold the seed column {seed_column}; found {', '.join(self._source.columns)}"
            )
        batch_axes = {s.shape[0] for s in self._specs.values() if s.shape and isinstance(s.shape[0], int)}
        self.fixed_batch: int | None = batch_axes.pop() if batch_axes else None
        dtypes = {name: np.dtype(self._specs[name].dtype) for name in self.names}
        self._spool = None if isinstance(self._source, IndexedSource) else Spool(dtypes)
        count = len(self._source)
        self.keys = np.empty((count, 16), dtype=np.uint8)
        self.lengths, self.decoder_lengths, self.firsts = np.zeros((3, count), dtype=np.int64)
        self.seeds = None if seed_column is None else np.empty(count, dtype=np.int64)
        self._read_all(on_read)
        self._fixed_length, self._fixed_decoder_length = (
            max((axis for name in names if isinstance(axis := self._specs[name].shape[1], int)), default=0)
            for names in (self._padded, self._padded_decoder)
        )

    def __len__(self) -> int:
        return len(self.keys)

    def spec(self, name: str) -> InputSpec:
        """The graph's specification of one of ``names``."""
        return self._specs[name]

    @property
    def remark(self) -> str | None:
        """Columns that the graph does not take, and notes of the source, such as how many texts were cut."""
        unused = sorted({*self.ignored} - {*TOKEN_COLUMNS, *self._source.made_from, self.seed_column})
        ignored = f"left out, as the graph does not take them: {', '.join(unused)}" if unused else None
        return "; ".join(filter(None, (ignored, self._source.remark))) or None

    def key(self, index: int) -> str:
        return bytes(self.keys[index]).hex()

    def seed(self, index: int) -> int | None:
        return None if self.seeds is None else int(self.seeds[index])

    def sample(self, index: int) -> Sample:
        """One sample as its key sees it, in the graph's types and without padding."""
        with self._reading:
            if self._spool is not None:
                return self._spool.read(index)
            assert isinstance(self._source, IndexedSource)
            return self._trim(self._source.row(index, self._columns), index)

    def batches(self, indices: Iterable[int], batch_size: int, batch_tokens: int | None = None) -> Iterator[Batch]:
        """The samples in batches of similar length, longest first; deterministic for the same indices."""
        for chosen in self.groups(indices, batch_size, batch_tokens):
            yield self.batch(chosen)

    def groups(
        self, indices: Iterable[int], batch_size: int, batch_tokens: int | None = None
    ) -> Iterator[tuple[int, ...]]:
        """The same without the arrays."""
        return group_samples(
            indices,
            self.lengths,
            self.fixed_batch or batch_size,
            batch_tokens=None if self.fixed_batch else batch_tokens,
            equal=self._equal_lengths,
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples with a batch axis, padded where there is a mask."""
        samples = [self.sample(index) for index in indices]
        for index, sample in zip(indices, samples, strict=True) if self._spool is None else ():
            if sample_key(sample) != self.key(index):
                raise self._source.refuse("it changed while it was read: leave the file alone, then run again", index)
        # A graph with a fixed batch axis gets its last batch filled up by repeating a sample.
        rows = samples + samples[-1:] * ((self.fixed_batch or 0) - len(samples))
        lengths = tuple(int(self.lengths[index]) for index in indices)
        longest = max(self._fixed_length, *lengths)
        decoder_lengths = tuple(int(self.decoder_lengths[index]) for index in indices)
        decoder_longest = max(self._fixed_decoder_length, *decoder_lengths, 0)
        arrays = {
            name: self._stack(name, rows, decoder_longest if name in self.decoder else longest) for name in self.names
        }
        second = decoder_lengths if self.decoder_mask is not None else ()
        return Batch(tuple(indices), lengths, self.with_supplied(arrays), second)

    def shortest(self) -> Batch:
        """One sample, of the fewest positions."""
        return self.batch([int(self.lengths.argmin())])

    def unmasked(self, batch: Batch) -> Batch:
        """The same batch with every position counted, padding too."""
        if self.mask is None:
            return batch
        arrays = batch.arrays | {self.mask: np.ones_like(batch.arrays[self.mask])}
        return replace(batch, arrays=self.with_supplied(arrays))

    def with_supplied(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays of ``names`` among these, and those that follow from them."""
        data = {name: arrays[name] for name in self.names}
        mask = None if self.mask is None else data[self.mask]
        lengths = [data[name].shape[1] for name in self._free] if mask is None else [mask.shape[1]]
        return data | supply(self._supplied, len(data[self.names[0]]), max(lengths, default=0), mask)

    @property
    def _equal_lengths(self) -> NDArray[np.int64] | None:
        """Lengths that samples must share to run together, as nothing may be padded; None: any may."""
        parts = [] if self.mask is not None else [self.lengths]
        if self._free_decoder and self.decoder_mask is None:
            parts.append(self.decoder_lengths)
        return np.stack(parts, axis=1) if parts else None

    def longest_axis(self, indices: Sequence[int] | None = None) -> int:
        """Positions of the longer of both sequences, in a batch of these samples; None: of all."""
        chosen = slice(None) if indices is None else list(indices)
        longest = (int(lengths[chosen].max(initial=0)) for lengths in (self.lengths, self.decoder_lengths))
        return max(self._fixed_length, self._fixed_decoder_length, *longest)

    def _read_all(self, on_read: Callable[[int, int], None] | None) -> None:
        count = 0
        columns = [*dict.fromkeys([*self._columns, *self._unread, *filter(None, [self.seed_column])])]
        for index, row in enumerate(self._source.rows(columns)):
            if index >= len(self.keys):
                raise self._source.refuse(f"must hold {len(self.keys)} samples; it grew while it was read")
            if any(np.any(row[name] != 0) for name in self._unread):
                rule = f"{TYPES} must be 0 where the graph does not take them, as the model would without"
                remedy = "export the model with its tokenizer in its folder (shd-torch export), or drop the column"
                raise self._source.refuse(f"{rule}; got others: {remedy}", index)
            sample = self._trim(row, index)
            self.keys[index] = np.frombuffer(bytes.fromhex(sample_key(sample)), dtype=np.uint8)
            if self.seeds is not None:
                seed = row[self.seed_column or ""]
                if isinstance(seed, str) or seed.ndim or seed.dtype.kind not in "iu" or not 0 <= seed < 2**53:
                    rule = f"{self.seed_column} must be an integer from 0 to 2^53 - 1; got {seed}"
                    raise self._source.refuse(rule, index)
                self.seeds[index] = int(seed)
            if self._spool is not None:
                self._spool.append(sample)
            count += 1
            if on_read is not None:
                on_read(count, len(self.keys))
        if count < len(self.keys):
            raise self._source.refuse(f"must hold {len(self.keys)} samples; it ends after {count}")

    def _choose_columns(self) -> list[str]:
        missing = sorted(set(self.names) - set(self._source.columns))
        if self._source.ragged:  # no row is padded, so every position is a token
            masks = ((self.mask, self._free), (self.decoder_mask, self._free_decoder))
            missing = [name for name in missing if not any(name == mask and len(free) > 1 for mask, free in masks)]
        if missing:
            raise self._source.refuse(
                f"must hold {', '.join(self.names)}; missing {', '.join(missing)}, "
                f"found {', '.join(sorted(self._source.columns)) or 'nothing'}{self._remedy(missing)}"
            )
        return [name for name in self.names if name in self._source.columns]

    def _remedy(self, missing: Sequence[str]) -> str:
        """The remedy for missing columns: a tokenizer where the data hold text, or another name, or a mask of 1."""
        specs = [self._specs[name] for name in missing if len(self._specs[name].shape) == 2]
        tokens = any(np.dtype(spec.dtype).kind == "i" for spec in specs)
        for column in self._source.columns if tokens else ():
            try:
                value = next(iter(self._source.rows([column])), {}).get(column)
            except ShdError:  # a column of another kind, which is not needed
                continue
            if isinstance(value, str):
                named = "" if column == "text" else f" with --text-column {column}"
                return f". Column {column} holds text: give the teacher's tokenizer (--tokenizer FOLDER){named}"
        if missing == [self._groups]:
            return ": give the student's tokenizer too (--student-tokenizer FOLDER), or this column"
        if missing == [self.mask]:
            return f": add {self.mask}, 1 for tokens and 0 for padding"
        return ": name the columns as the graph names its inputs (shd inspect)"

    def _trim(self, row: Row, index: int) -> Sample:
        sample = {name: self._check_input(row[name], name, index) for name in self._columns}
        pairs = ((self.mask, self._free, self._padded), (self.decoder_mask, self._free_decoder, self._padded_decoder))
        for mask, free, padded in pairs:
            if mask is None:
                continue
            if mask not in sample:
                length = max(len(sample[name]) for name in free if name in sample)
                sample[mask] = np.ones(length, dtype=self._specs[mask].dtype)
            self._check_mask(mask, sample[mask], index)
            padded -= {name for name in padded if len(sample[name]) != len(sample[mask])}
        lengths = [max((len(sample[name]) for name in free), default=0) for _, free, _ in pairs]
        try:
            sample, *counted = trim_inputs(sample, self.mask, self.decoder, self.decoder_mask)
        except ShdError as error:
            raise self._source.refuse(str(error), index) from error
        self.lengths[index], self.decoder_lengths[index] = (
            length if cut is None else cut for length, cut in zip(lengths, counted, strict=True)
        )
        if self.mask is not None:
            self.firsts[index] = np.flatnonzero(sample[self.mask])[0]
        self._check_length(sample, index)
        self._check_rows(sample, index)
        self._check_groups(sample, index)
        return sample

    def _check_groups(self, sample: Sample, index: int) -> None:
        """Groups of a sample are of its tokens, and no more than them: they are memory that a file demands."""
        if self._groups is None:
            return
        groups, tokens = sample[self._groups], len(sample[self._groups if self.mask is None else self.mask])
        by_number = groups.ndim == 1
        count = int(groups.max()) + 1 if by_number else groups.shape[1]
        if len(groups) != tokens or not 1 <= count <= 2 * tokens + 64 or (not by_number and groups.min() < 0):
            rule = f"{self._groups} must name a group for each of {tokens} tokens, or hold weights of at least 0"
            raise self._source.refuse(
                f"{rule}; got shape {groups.shape}, {count} groups, least {groups.min()}", index
            )

    def _check_rows(self, sample: Sample, index: int) -> None:
        """Numbers of rows must be those of a table: ONNX counts negative ones from its end, and PyTorch refuses."""
        for name in self._rows.keys() & sample.keys():
            array, rows = sample[name], self._rows[name]
            if array.size and (array.min() < 0 or array.max() >= rows):
                position = np.argwhere((array < 0) | (array >= rows))[0].tolist()
                raise self._source.refuse(
                    f"{name} must be 0 to {rows - 1}, as the teacher's table has {rows} rows; got "
                    f"{array[tuple(position)]} at position {', '.join(map(str, position)) or 0}: {_FOREIGN}",
                    index,
                )
        tables = [self._rows[name] for name in self.supplied if name in self._rows and name != TYPES]  # of positions
        length = int(self.lengths[index] if self.mask is None else np.count_nonzero(sample[self.mask]))
        if tables and length > min(tables):
            raise self._source.refuse(TOO_LONG.format(most=min(tables), got=length), index)

    def _check_length(self, sample: Sample, index: int) -> None:
        """A length that the graph fixes holds for every sample; padding fills shorter ones where there is a mask."""
        for name in self._sequences:
            fixed, length = self._specs[name].shape[1], len(sample[name])
            padded = name in self._padded | self._padded_decoder
            if isinstance(fixed, int) and (length > fixed or (length != fixed and not padded)):
                tokens = padded or len(self._specs[name].shape) == 2
                what = (
                    f"positions, since the graph fixes its length at {fixed}" if tokens else "rows, as the graph says"
                )
                raise self._source.refuse(
                    f"{name} must have {'at most ' * padded}{fixed} {what}; got {length}: cut the samples"
                    f"{'' if padded else ' or pad them'}, or re-export the graph with this axis open",
                    index,
                )

    def _check_input(self, value: Any, name: str, index: int) -> NDArray[Any]:
        spec = self._specs[name]
        if isinstance(value, str):
            raise self._source.refuse(
                f"{name} must be {spec.dtype}; got text: give a tokenizer (--tokenizer FOLDER)", index
            )
        if not value.size and spec.part != "past":
            raise self._source.refuse(f"{name} must hold at least one number; got none: leave the sample out", index)
        array = as_dtype(value, np.dtype(spec.dtype))
        if array is None:
            raise self._source.refuse(f"{name} must be {spec.dtype}; got {value.dtype}: convert it", index)
        if array.ndim != len(spec.shape) - 1:
            raise self._source.refuse(f"{name} must have {len(spec.shape) - 1} axes; got {array.shape}", index)
        return array

    def _check_mask(self, name: str, mask: NDArray[Any], index: int) -> None:
        """Tokens or additive masks, taken for a mask, would count every position as one to learn from."""
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.size:
            raise self._source.refuse(
                f"{name} must hold 0 and 1 alone, as it is the attention mask; got {wrong[0]}: name another", index
            )

    def _stack(self, name: str, samples: Sequence[Sample], longest: int) -> NDArray[Any]:
        arrays = [sample[name] for sample in samples]
        if name in self._padded | self._padded_decoder:
            axes = [(0, 0)] * (arrays[0].ndim - 1)
            edges = [[(0, max(longest - len(array), 0)), *axes] for array in arrays]
            value = self._pads.get(name, 0)
            arrays = [np.pad(array, edge, constant_values=value) for array, edge in zip(arrays, edges, strict=True)]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1 and name == self._groups and arrays[0].ndim == 2:  # as many columns as student tokens
            width = max(array.shape[1] for array in arrays)
            edges = [[(0, 0), (0, width - array.shape[1])] for array in arrays]
            arrays = [np.pad(array, edge, constant_values=-1) for array, edge in zip(arrays, edges, strict=True)]
            shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise self._source.refuse(f"{name} must have one shape in samples that run together; got {shapes}")
        return np.stack(arrays)


def as_dtype(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The array in the graph's dtype where no value changes its meaning; otherwise None."""
    if array.dtype == dtype:
        return array
    both_integer = array.dtype.kind in "iub" and dtype.kind in "iub"
    both_float = array.dtype.kind == "f" and dtype.kind == "f"
    if not both_integer and not both_float:
        return None
    converted = array.astype(dtype)
    return None if both_integer and not np.array_equal(converted, array) else converted


def run_batch(session: Any, names: Sequence[str], batch: Batch) -> dict[str, NDArray[Any]]:
    """Some outputs of a session on a batch of samples, by name; a fixed batch axis keeps its fill."""
    fed = {value.name for value in session.get_inputs()}
    feeds = {name: array for name, array in batch.arrays.items() if name in fed}
    try:
        values = session.run(list(names), feeds)
    except Exception as error:  # onnxruntime's errors share no base class but Exception
        lengths = map(max, batch.lengths, batch.decoder_lengths or batch.lengths)
        longest, row = max(zip(lengths, batch.indices, strict=True))
        foreign = "indices element out of data bounds" in str(error)
        raise inputs_invalid(
            f"inputs must be what the teacher can run on; samples {list(batch.indices)[:8]} and their batch of "
            f"{len(batch.indices)} failed: {error}: if the longest, row {row} of {longest} positions, is too long "
            "for the model, cut texts with --max-length" + f"; or {_FOREIGN}" * foreign
        ) from error
    return dict(zip(names, values, strict=True))
