"""Members of the manifest that no form owns: teacher, inputs, data set, shard plan (CACHE-20, CACHE-22, CACHE-26)."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.forms.form import SHA256, require
from shd_ref.cache.storage.checksums import xxh3_64
from shd_ref.cache.storage.documents import MAX_INTEGER, optional
from shd_ref.cache.storage.layout import MAX_SAMPLES, MAX_SHARDS

_require: Final = functools.partial(require, spec_id="CACHE-22")


@dataclass(frozen=True)
class Teacher:
    """The model that was squeezed.

    Attributes:
        sha256: of the teacher's file, 64 hex digits.
        name: for people.
        provider: the onnxruntime provider, such as ``CPUExecutionProvider``.
        dtype: of its attention, such as ``float32``.
    """

    sha256: str
    name: str
    provider: str
    dtype: str

    def __post_init__(self) -> None:
        _require(bool(SHA256.fullmatch(self.sha256)), "teacher.sha256 must be 64 hex digits", self.sha256)


@dataclass(frozen=True)
class SampleInputs:
    """The inputs of a sample key: names in alphabetical order, and the name of the mask, if any.

    ``seed`` names the column that holds each sample's augmentation seed, if any; it is not part of the key.
    ``decoder`` names the inputs of the sequence whose positions are the query rows of decoder and cross attention,
    and ``decoder_mask`` their mask, if any: they are cut by it, and all others by ``mask`` (CACHE-33).
    """

    names: tuple[str, ...]
    mask: str | None
    seed: str | None = optional(None)
    decoder: tuple[str, ...] = optional(())
    decoder_mask: str | None = optional(None)

    def __post_init__(self) -> None:
        names, decoder = list(self.names), list(self.decoder)
        valid = decoder == sorted(set(decoder)) and set(decoder) <= set(names) and self.mask not in decoder
        _require(valid, f"inputs.decoder must be some of {names}, sorted, without the mask", decoder)
        _require(
            self.decoder_mask in (*decoder, None), f"inputs.decoder_mask must be one of {decoder}", self.decoder_mask
        )
        _require(bool(names) and names == sorted(set(names)), "inputs.names must be sorted and distinct", names)
        _require(self.mask in (*names, None), f"inputs.mask must be one of {names} or None", self.mask)


@dataclass(frozen=True)
class Dataset:
    """The samples in order: ``dataset_fingerprint`` of their keys, and how many."""

    fingerprint: str
    num_samples: int

    def __post_init__(self) -> None:
        check_key(self.fingerprint)
        samples = self.num_samples
        _require(1 <= samples <= MAX_SAMPLES, f"num_samples must be 1 to {MAX_SAMPLES}", samples)


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of samples to shards; ``num_shards`` is ``ceil(num_samples / samples_per_shard)``."""

    samples_per_shard: int
    seed: int
    num_shards: int

    def __post_init__(self) -> None:
        size = self.samples_per_shard
        _require(1 <= size <= MAX_INTEGER, f"samples_per_shard must be 1 to {MAX_INTEGER}", size)
        _require(0 <= self.seed <= MAX_INTEGER, f"seed must be 0 to {MAX_INTEGER}", self.seed)
        _require(1 <= self.num_shards <= MAX_SHARDS, f"num_shards must be 1 to {MAX_SHARDS}", self.num_shards)


@functools.lru_cache(maxsize=2)
def sample_order(num_samples: int, seed: int) -> NDArray[np.int64]:
    """Sample indices sorted by the seeded XXH3-64 of each, so that any language can repeat it (CACHE-26).

    A library's shuffle is not used: its stream of random numbers may change from release to release.
    """
    hashes = (xxh3_64(struct.pack("<Q", index), seed) for index in range(num_samples))
    return np.argsort(np.fromiter(hashes, dtype=np.uint64, count=num_samples), kind="stable")
