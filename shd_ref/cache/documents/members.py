"""Parts of the manifest: teacher, layers, inputs, data set and shard plan (CACHE-20, CACHE-21, CACHE-25)."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.storage.checksums import xxh3_64
from shd_ref.cache.storage.documents import MAX_INTEGER, optional
from shd_ref.cache.storage.layout import MAX_LAYERS, MAX_SAMPLES, MAX_SHARDS
from shd_ref.errors import ShdError

MAX_HEADS: Final = 10_000
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def require(holds: bool, rule: str, value: object) -> None:
    """Refuse a value: ``argument-value`` unless the rule holds."""
    if not holds:
        raise ShdError("argument-value", f"{rule}; got {value!r}", "CACHE-21")


@dataclass(frozen=True)
class Teacher:
    """The model that was squeezed.

    Attributes:
        sha256: of the teacher's file, 64 hex digits.
        name: for people.
        provider: what ran it, such as ``CPUExecutionProvider``.
        dtype: of its attention, such as ``float32``.
    """

    sha256: str
    name: str
    provider: str
    dtype: str

    def __post_init__(self) -> None:
        require(bool(_SHA256.fullmatch(self.sha256)), "teacher.sha256 must be 64 hex digits", self.sha256)


@dataclass(frozen=True)
class LayerPair:
    """A student layer and the teacher's attention site that supervises it."""

    student_layer: int
    teacher_layer: int
    site: str
    num_teacher_heads: int

    def __post_init__(self) -> None:
        layer, heads, teacher = self.student_layer, self.num_teacher_heads, self.teacher_layer
        require(0 <= teacher <= MAX_INTEGER, f"teacher_layer must be 0 to {MAX_INTEGER}", teacher)
        require(0 <= layer < MAX_LAYERS, f"student_layer must be 0 to {MAX_LAYERS - 1}", layer)
        require(1 <= heads <= MAX_HEADS, f"num_teacher_heads must be 1 to {MAX_HEADS}", heads)


KINDS: Final = ("encoder", "decoder", "cross")
"""Attention of one model that is told apart, in the order in which student layers are numbered (CACHE-115)."""


@dataclass(frozen=True)
class KindLayers:
    """How many attention calls of one kind the student was meant to make (CACHE-115)."""

    kind: str
    num_student_layers: int

    def __post_init__(self) -> None:
        require(self.kind in KINDS, f"kind must be one of {KINDS}", self.kind)
        count = self.num_student_layers
        require(1 <= count <= MAX_LAYERS, f"num_student_layers must be 1 to {MAX_LAYERS}", count)


@dataclass(frozen=True)
class Matching:
    """How the plans were chosen on the data set itself (CACHE-18).

    Attributes:
        by: ``"residual"`` or ``"similarity"``; the cache only compares it.
        samples: how many samples the pairs were chosen on.
        seed: of the choice of these samples.
    """

    by: str
    samples: int
    seed: int

    def __post_init__(self) -> None:
        require(1 <= self.samples <= MAX_INTEGER, f"matching.samples must be 1 to {MAX_INTEGER}", self.samples)
        require(0 <= self.seed <= MAX_INTEGER, f"matching.seed must be 0 to {MAX_INTEGER}", self.seed)


@dataclass(frozen=True)
class SampleInputs:
    """What a sample key is made of: input names in order of the alphabet, and which is the mask, if any.

    ``seed`` names the column that holds each sample's augmentation seed, if any; it is no part of the key.
    ``decoder`` names the inputs of the sequence whose positions are the query rows of decoder and cross attention,
    and ``decoder_mask`` their mask, if any: they are cut by it, and all others by ``mask`` (CACHE-117).
    """

    names: tuple[str, ...]
    mask: str | None
    seed: str | None = optional(None)
    decoder: tuple[str, ...] = optional(())
    decoder_mask: str | None = optional(None)

    def __post_init__(self) -> None:
        names, decoder = list(self.names), list(self.decoder)
        valid = decoder == sorted(set(decoder)) and set(decoder) <= set(names) and self.mask not in decoder
        require(valid, f"inputs.decoder must be some of {names}, sorted, without the mask", decoder)
        require(
            self.decoder_mask in (*decoder, None), f"inputs.decoder_mask must be one of {decoder}", self.decoder_mask
        )
        require(bool(names) and names == sorted(set(names)), "inputs.names must be sorted and distinct", names)
        require(self.mask in (*names, None), f"inputs.mask must be one of {names} or None", self.mask)


@dataclass(frozen=True)
class Dataset:
    """The samples in order: ``dataset_fingerprint`` of their keys, and how many."""

    fingerprint: str
    num_samples: int

    def __post_init__(self) -> None:
        check_key(self.fingerprint)
        samples = self.num_samples
        require(1 <= samples <= MAX_SAMPLES, f"num_samples must be 1 to {MAX_SAMPLES}", samples)


@dataclass(frozen=True)
class ShardPlan:
    """How samples are dealt to shards; ``num_shards`` is ``ceil(num_samples / samples_per_shard)``."""

    samples_per_shard: int
    seed: int
    num_shards: int

    def __post_init__(self) -> None:
        size = self.samples_per_shard
        require(1 <= size <= MAX_INTEGER, f"samples_per_shard must be 1 to {MAX_INTEGER}", size)
        require(0 <= self.seed <= MAX_INTEGER, f"seed must be 0 to {MAX_INTEGER}", self.seed)
        require(1 <= self.num_shards <= MAX_SHARDS, f"num_shards must be 1 to {MAX_SHARDS}", self.num_shards)


@functools.lru_cache(maxsize=2)
def sample_order(num_samples: int, seed: int) -> NDArray[np.int64]:
    """Sample indices sorted by the seeded XXH3-64 of each, so that any language can repeat it (CACHE-25).

    A library's shuffle is not used: its stream of random numbers may change from release to release.
    """
    hashes = (xxh3_64(struct.pack("<Q", index), seed) for index in range(num_samples))
    return np.argsort(np.fromiter(hashes, dtype=np.uint64, count=num_samples), kind="stable")
