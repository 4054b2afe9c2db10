"""The queries and keys of a batch as the cache stores them, in one buffer, and the supervision made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shd_ref.cache import Factors, LayerFactors, Manifest, SampleRecord
from shd_ref.cache.forms.attention import blob_name
from shd_ref.merging.plans import plan_groups
from shd_torch.supervision.coded import check_length
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.stored_rows import CachedBatch, find_firsts, find_rows, row_blobs
from shd_torch.supervision.taught_layers import taught_layers

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FactoredCodes(CachedBatch):
    """The supervision of a batch from a cache of queries and keys; see ``CachedBatch``.

    The buffer holds the mixing matrices and steps of all layers and samples, then their codes.

    Attributes:
        factors: how each layer's queries and keys make its maps.
        groups: the teacher heads merged into each student head, by layer; None where all are.
        num_teacher_heads: H_t.

    Raises:
        ShdError: not when it is made, from records that the reader has checked; see ``supervise`` and ``decode``.

    Source: CACHE-140.
    """

    factors: tuple[LayerFactors, ...]
    groups: tuple[Groups | None, ...]
    num_teacher_heads: int

    def supervise(self, length: int | None = None, dtype: torch.dtype = torch.float32) -> list[Factored]:
        """What ``attention_kl`` takes: one ``Factored`` a layer, on the buffer's device; no map is formed.

        Args:
            length: L to pad to, as for ``CodedSupervision``; padded rows do not count, and padded keys are masked.
            dtype: of queries and keys.
        """
        size = check_length(self.lengths, length)
        mixing, steps, codes = self._sections()
        present = self.query_mask(size)
        padded = any(self.firsts) or any(n != size for n in self.lengths)
        row_mass = present[:, None].float().expand(-1, self.num_teacher_heads, -1) if padded else None
        supervision = []
        for number, (factors, groups) in enumerate(zip(self.factors, self.groups, strict=True)):
            heads = self.num_teacher_heads + factors.num_key_heads
            values = self._spread(codes[number], heads, factors.width, size)
            if steps is not None:
                values *= self._spread(steps[number], heads, 1, size)
            queries, keys = torch.split(values.to(dtype), [self.num_teacher_heads, factors.num_key_heads], dim=1)
            supervision.append(
                Factored(
                    queries,
                    keys,
                    mixing[number],
                    scale=factors.scale,
                    attn_mask=present[:, None, None] if padded else None,
                    is_causal=self.support == "causal",
                    window=factors.window,
                    groups=groups,
                    row_mass=row_mass,
                )
            )
        return supervision

    def decode(
        self, length: int | None = None, dtype: torch.dtype = torch.float32, *, temperature: float = 1.0
    ) -> list[Tensor]:
        """The merged maps, one tensor ``(B, H_s, L, L)`` a layer, at the T_a that the loss will be called with."""
        return [layer.probs(temperature=temperature).to(dtype) for layer in self.supervise(length)]

    def _sections(self) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
        """Mixing ``(layers, B, H_s, H_t)``, and the steps and codes of each layer."""
        shape = (len(self.layers), len(self.lengths), self.num_student_heads, self.num_teacher_heads)
        vectors = [(self.num_teacher_heads + layer.num_key_heads) * sum(self.counts) for layer in self.factors]
        # Numbers of four bytes come first, so that every section is aligned.
        start = 4 * shape[0] * shape[1] * shape[2] * shape[3]
        mixing = self.buffer[:start].view(torch.float32).view(shape)
        steps = None
        if self.codec == "int8":
            end = start + 4 * sum(vectors)
            steps = torch.split(self.buffer[start:end].view(torch.float32), vectors)
            start = end
        codes = self.buffer[start : self.start].view(torch.int8 if self.codec == "int8" else torch.float16)
        sizes = [n * layer.width for n, layer in zip(vectors, self.factors, strict=True)]
        return mixing, steps, torch.split(codes, sizes)

    def _spread(self, packed: Tensor, heads: int, width: int, size: int) -> Tensor:
        """Numbers, sample by sample, as float32 ``(B, heads, size, width)``, padded with zeros."""
        if all(n == size for n in self.counts):
            return packed.view(len(self.lengths), heads, size, width).to(torch.float32, copy=True)
        spread = torch.zeros(len(self.lengths), heads, size, width, device=packed.device)
        parts = torch.split(packed, [heads * n * width for n in self.counts])
        for target, block, n, count in zip(spread, parts, self.lengths, self.counts, strict=True):
            target[:, n - count : n].copy_(block.view(heads, count, width))
        return spread


def pack_factored(records: Sequence[SampleRecord], manifest: Manifest, layers: Sequence[int]) -> FactoredCodes:
    """Put the records of a batch into one buffer, so that it crosses processes and devices once."""
    form = manifest.need(Factors, "queries and keys")
    columns = [form.column(layer) for layer in layers]
    factors = tuple(form.factors[column] for column in columns)
    mixing, steps, codes = [], [], []
    for layer, column, layer_factors in zip(layers, columns, factors, strict=True):
        for record in records:
            vectors = (form.num_teacher_heads + layer_factors.num_key_heads) * (record.length - record.first)
            end = 4 * vectors if form.codec == "int8" else 0
            mixing.append(np.ascontiguousarray(record.parts["mixing"][column]).reshape(-1).view(np.uint8))
            steps.append(record.parts[blob_name(layer)][:end])
            codes.append(record.parts[blob_name(layer)][end:])
    heads = form.num_teacher_heads
    merges_all = form.strategy == "mean"
    blobs = [*mixing, *steps, *codes]
    return FactoredCodes(
        buffer=torch.from_numpy(np.concatenate([*blobs, *row_blobs(records, manifest)])),
        lengths=tuple(record.length for record in records),
        layers=taught_layers(manifest, layers),
        factors=factors,
        groups=tuple(None if merges_all else plan_groups(form.layer_plans[column], heads) for column in columns),
        num_student_heads=form.num_student_heads,
        num_teacher_heads=heads,
        codec=form.codec,
        support=form.support,
        **find_firsts(records) | find_rows(records, manifest, sum(map(len, blobs))),
    )
