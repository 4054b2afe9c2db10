"""Outputs of a run of the squeezed teacher: arrays by layer, a view of one sample, and samples not finite."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Extent
from shd_ref.errors import ShdError
from shd_ref.teacher.graph.targets import LAST_ROLE, LOGITS, POOLED
from shd_ref.teacher.rewrite.squeeze import SqueezedLayer
from shd_ref.teacher.rewrite.tiles import TiledRows
from shd_ref.teacher.session import open_session

if TYPE_CHECKING:
    from shd_ref.teacher.run.teacher import TeacherRun


_OF_CHECKS: Final = ("probs", "values", "merged", "groups", "sums", "weights")


def _array(role: str) -> property:
    """The output of this role; ``KeyError`` where it was not requested."""
    return property(lambda outputs: outputs.arrays[role])


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """Outputs of a run for one layer, by role as in ``SqueezedLayer``. Indexed by samples.

    ``row_mask`` ``(B, L)``, None: every row counts; ``ahead`` ``(B,)`` is ``looks_ahead`` where checks are no longer
    held; ``rows`` makes the maps of a layer that ran in tiles.
    """

    layer: SqueezedLayer
    row_mask: NDArray[np.bool_] | None
    arrays: Mapping[str, NDArray[Any]]
    ahead: NDArray[np.bool_] | None = None
    rows: MapRows | None = None

    alphas, codes = _array("alphas"), _array("codes")
    queries, keys, spans = _array("queries"), _array("keys"), _array("spans")
    probs, values, merged, sums = _array("probs"), _array("values"), _array("merged"), _array("sums")

    @classmethod
    def read(
        cls,
        layer: SqueezedLayer,
        outputs: Mapping[str, NDArray[Any]],
        row_mask: NDArray[np.bool_] | None,
        rows: MapRows | None = None,
    ) -> LayerOutputs:
        arrays = {role: outputs[name] for role, name in layer.names.items() if name in outputs}
        return cls(layer, row_mask, arrays, rows=rows)

    def __getitem__(self, samples: int | slice | Sequence[int]) -> LayerOutputs:
        row_mask, ahead = (None if array is None else array[samples] for array in (self.row_mask, self.ahead))
        arrays = {role: array[samples] for role, array in self.arrays.items()}
        return LayerOutputs(self.layer, row_mask, arrays, ahead, None if self.rows is None else self.rows[samples])

    @property
    def stored_mask(self) -> NDArray[np.bool_] | None:
        """``row_mask`` of the stored rows; None of pooled maps too, whose rows without weight are empty."""
        return None if self.layer.rule.pooled else self.row_mask

    @property
    def has_check(self) -> bool:
        """Whether it has all that the reference needs to check the squeeze."""
        return "merged" in self.arrays or self.rows is not None

    def tiles(
        self, entries: int | None = None, seed: int = 0, shape: tuple[int, int] | None = None
    ) -> Iterator[tuple[slice, Mapping[str, NDArray[Any]]]]:
        """Some rows of ``probs`` and ``merged`` at a time: all, or of about so many entries of maps.

        ``shape`` says how many rows and keys there are without padding behind.
        """
        if self.rows is None:
            heads, rows, keys = self.probs.shape[-3:]
        else:
            heads, rows, keys = len(self.rows.rows.tiles.value_heads), self.sums.shape[-2], self.values.shape[-2]
        rows, keys = shape or (rows, keys)
        for tile in choose_rows(heads, rows, keys, entries, seed):
            if self.rows is None:
                yield tile, {role: self.arrays[role][..., tile, :] for role in ("probs", "merged")}
            else:
                yield tile, self.rows.read(tile)

    @property
    def looks_ahead(self) -> NDArray[np.bool_]:
        """``(B,)``: whether a merged row that counts gives mass to a later position."""
        if self.ahead is not None:
            return self.ahead
        # Codes of a layer that ran in tiles are whole, where there are any.
        whole = self.merged if self.rows is None else self.arrays.get("codes", np.zeros((len(self.alphas), 1, 1, 1)))
        ahead = [[np.triu(head, 1).any(axis=-1) for head in maps] for maps in whole]
        rows: NDArray[np.bool_] = np.any(ahead, axis=1)  # (B, L)
        # Rows of padding are not stored (CACHE-129), and often attend to all keys.
        mask = None if self.stored_mask is None or rows.shape != self.stored_mask.shape else self.stored_mask
        seen: NDArray[np.bool_] = np.any(rows if mask is None else rows & mask, axis=1)
        return seen

    def without_check(self) -> LayerOutputs:
        stored = {role: array for role, array in self.arrays.items() if role not in _OF_CHECKS}
        return replace(self, arrays=stored, ahead=self.looks_ahead, rows=None) if self.has_check else self

    @property
    def map_axes(self) -> tuple[int, int]:
        """Rows and keys of its maps, padding included."""
        if "codes" in self.arrays:
            return self.codes.shape[-2], self.codes.shape[-1]
        return self.queries.shape[-2], self.keys.shape[-2]


_TITLES: Final = {
    LOGITS: "its logits",
    POOLED: "the states that embeddings are pooled from",
    LAST_ROLE: "the states that its head reads",
}


@dataclass(frozen=True, eq=False)
class TargetOutputs:
    """Targets of a run by role, float32 with padding: logits ``(B, L, V)`` or ``(B, V)``, states ``(B, L, D)``."""

    arrays: Mapping[str, NDArray[np.float32]]
    row_mask: NDArray[np.bool_] | None = None

    def __getitem__(self, samples: int | Sequence[int]) -> TargetOutputs:
        mask = None if self.row_mask is None else self.row_mask[samples]
        return TargetOutputs({role: array[samples] for role, array in self.arrays.items()}, mask)

    @property
    def positions(self) -> int | None:
        """Rows of each sample, padding included; None of a classifier, and where nothing was requested."""
        return next((array.shape[-2] for array in self.arrays.values() if array.ndim == 3), None)


@dataclass(frozen=True, eq=False)
class BatchOutputs:
    """Outputs of a batch. Indexed by samples, by their numbers in it; arrays of a single one have no batch axis."""

    indices: tuple[int, ...]
    keys: tuple[str, ...]
    extents: tuple[Extent, ...]
    layers: tuple[LayerOutputs, ...]
    targets: TargetOutputs

    @classmethod
    def joined(cls, parts: Sequence[BatchOutputs]) -> BatchOutputs:
        """Of a batch that ran some layers at a time."""
        extents = tuple(
            replace(extents[0], shapes=tuple(shape for extent in extents for shape in extent.shapes))
            for extents in zip(*(outputs.extents for outputs in parts), strict=True)
        )
        layers = tuple(layer for outputs in parts for layer in outputs.layers)
        return replace(parts[0], extents=extents, layers=layers)

    def __getitem__(self, samples: int | Sequence[int]) -> BatchOutputs:
        numbers = [samples] if isinstance(samples, int) else samples
        return BatchOutputs(
            tuple(self.indices[number] for number in numbers),
            tuple(self.keys[number] for number in numbers),
            tuple(self.extents[number] for number in numbers),
            tuple(layer[samples] for layer in self.layers),
            self.targets[samples],
        )

    @property
    def index(self) -> int:
        return self.indices[0]

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def extent(self) -> Extent:
        return self.extents[0]


def check_finite(work: TeacherRun, outputs: BatchOutputs) -> None:
    """Refuse NaN and infinity on rows that count: ``not-finite``, naming the sample, its layer and head."""
    indices = outputs.indices
    suspect = np.zeros(len(indices), dtype=np.bool_)
    for column, layer in enumerate(outputs.layers):
        rows = np.array(True) if layer.stored_mask is None else layer.stored_mask[:, None, :]
        if layer.layer.rule.pooled:  # groups behind a sample's own are empty
            counts = np.array([extent.shapes[column][0] for extent in outputs.extents])
            rows = (np.arange(layer.map_axes[0]) < counts[:, None])[:, None]
        suspect |= ~np.isfinite(layer.alphas).reshape(len(indices), -1).all(axis=1)
        if "queries" in layer.arrays:
            for factor in (layer.queries, layer.keys):
                if not np.isfinite(factor).all():
                    suspect |= (~np.isfinite(factor).all(axis=-1) & rows).any(axis=(1, 2))
        else:
            suspect |= (_is_doubtful(layer.codes) & rows).any(axis=(1, 2))
    for number, index in enumerate(indices):
        reason, sample = None, outputs[number]
        if suspect[number]:  # only check outputs distinguish a fault from an empty row
            checked = bool(sample.layers) and sample.layers[0].has_check
            sample = sample if checked else work.squeeze(work.inputs.batch([index]), checked=True)[0]
            reason = _why_not_finite(sample)
        reason = reason or _target_not_finite(work, outputs[number])
        if reason is not None:
            where = f"sample {index} (key {outputs.keys[number]})"
            remedy = "check its inputs, or leave it out"
            raise ShdError("not-finite", f"{where}: the teacher gives NaN or infinity {reason}: {remedy}", "MAP-5")


def _target_not_finite(work: TeacherRun, sample: BatchOutputs) -> str | None:
    """The target that is not finite on a row that counts; classes that only pad the vocabulary may be."""
    mask = sample.targets.row_mask
    for role, array in sample.targets.arrays.items():
        rows = array[..., : work.options.vocab_size] if role == LOGITS else array
        by_position = mask is not None and rows.shape[:-1] == mask.shape  # others are refused for that
        if not np.isfinite(rows[mask] if by_position else rows).all():
            return f"in {_TITLES.get(role, role.replace('hidden-', 'hidden state '))}"
    return None


def _is_doubtful(codes: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows without mass, which NaN becomes in a graph's quantiser, and of float codes those with NaN or infinity."""
    if codes.dtype.kind == "u":
        empty: NDArray[np.bool_] = codes.max(axis=-1, initial=0) == 0
        return empty
    with np.errstate(invalid="ignore"):  # infinities of both signs
        sums: NDArray[Any] = codes.sum(axis=-1)
    unsure: NDArray[np.bool_] = ~np.isfinite(sums) | (sums == 0)
    return unsure


def _why_not_finite(sample: BatchOutputs) -> str | None:
    """The first layer, and the head, that is not finite in a sample with check outputs."""
    for outputs in sample.layers:
        layer = outputs.layer
        counted = np.ones((1, 1), dtype=np.bool_) if outputs.row_mask is None else outputs.row_mask[None]  # (1, L)
        whole = [
            (np.isfinite(maps["probs"]).all(-1), np.isfinite(maps["merged"]).all(-1)) for _, maps in outputs.tiles()
        ]
        finite, merged = (np.concatenate(rows, axis=-1) for rows in zip(*whole, strict=True))
        sound = np.isfinite(outputs.values).all(axis=-1)
        # Values are those of the keys, which are the rows where the map is square.
        finite &= sound if sound.shape == finite.shape else sound.all(axis=-1, keepdims=True)
        heads = np.flatnonzero((~finite & counted).any(axis=-1))
        uncounted = False if outputs.layer.rule.pooled else ~counted
        if len(heads) or not (merged | uncounted).all() or not np.isfinite(outputs.alphas).all():
            what = f"head {heads[0]}" if len(heads) else "in what is made of its maps"
            return f"at layer {layer.student_layer} ({layer.site.name}), {what}"
    return None


TILE_BYTES: Final = 2**24
"""Maps of the teacher that are in float64 at once (but at least a row of every head)."""
COMPARED_ENTRIES: Final = 2**24
"""Entries of a layer's maps that are compared before anything is written, of a sample that ran in tiles. All
of one of 16,384 tokens took a minute; ``verify`` compares every row."""
MEASURED_ENTRIES: Final = 2**19
"""Entries of a layer's maps of which a sample's coding errors are measured: on half of a long sample's maps, in
float64, they took ten times the teacher's run."""


@dataclass(frozen=True, eq=False)
class MapRows:
    """The maps of a batch at one layer: made again from ``arrays``, of which ``samples`` are read."""

    rows: TiledRows
    arrays: Mapping[str, NDArray[Any]]
    provider: str
    num_threads: int | None
    samples: int | slice | Sequence[int]

    def __getitem__(self, samples: int | slice | Sequence[int]) -> MapRows:
        chosen = np.arange(len(self.arrays["values"]))[self.samples][samples]
        return replace(self, samples=int(chosen) if np.ndim(chosen) == 0 else chosen.tolist())

    def read(self, rows: slice) -> dict[str, NDArray[Any]]:
        """``probs`` ``(B, H_t, rows, S)`` and ``merged`` ``(B, H_s, rows, S)``, without B of a single sample."""
        feeds = {role: self.arrays[role] for role in self.rows.sources}
        feeds |= {"start": np.array([rows.start]), "stop": np.array([rows.stop])}
        maps = self._session.run(["probs", "merged"], feeds)
        return {role: array[self.samples] for role, array in zip(("probs", "merged"), maps, strict=True)}

    def products(self, sums: NDArray[Any], heads: Sequence[int], other: int) -> NDArray[Any]:
        """From sums ``(H, L, W)`` those of some heads' maps with the values of another ``(heads, L, d_v)``."""
        of_other, width = self.rows.tiles.value_heads[other], self.arrays["values"].shape[-1]
        places = [self.rows.slots[head].index(of_other) * width for head in heads]
        return np.stack([sums[head, :, at : at + width] for head, at in zip(heads, places, strict=True)])

    @functools.cached_property
    def _session(self) -> Any:
        graph = self.rows.graph({role: self.arrays[role].dtype for role in self.rows.sources})
        return open_session(graph, provider=self.provider, num_threads=self.num_threads, keeps_memory=False)


def choose_rows(heads: int, rows: int, keys: int, entries: int | None, seed: int) -> list[slice]:
    """Tiles of rows, all of them; or of as many entries, the first, the last, and others that a seed chooses."""
    row = heads * max(keys, 1)
    size = max(1, TILE_BYTES // (8 * row) if entries is None else min(TILE_BYTES // 8, entries // 8) // row)
    tiles = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    most = len(tiles) if entries is None else max(2, entries // (size * row))
    if len(tiles) <= most:
        return tiles
    between = np.random.default_rng(seed).choice(np.arange(1, len(tiles) - 1), most - 2, replace=False).tolist()
    return [tiles[number] for number in (0, *sorted(between), len(tiles) - 1)]
