"""The seal: states that a cache is complete (CACHE-55, CACHE-56)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shd_ref.cache.documents.keys import dataset_fingerprint
from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.documents.receipts import Receipt
from shd_ref.cache.storage.documents import build, encode_document, parse_members, read_document
from shd_ref.cache.storage.layout import SEAL_NAME
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.errors import ShdError


@dataclass(frozen=True)
class Seal:
    """States that every shard is committed (CACHE-55).

    Attributes:
        manifest: id of the cache.
        num_samples: samples in all shards.
        receipts: the checksum member of every receipt, by shard number.
    """

    manifest: str
    num_samples: int
    receipts: tuple[str, ...]

    @classmethod
    def read(cls, folder: Folder, manifest: Manifest) -> Seal | None:
        """The seal of a cache, or None.

        Raises:
            ShdError: ``cache-corrupt``, ``cache-mismatch``.
        """
        storage = open_storage(folder)
        path = storage.locate(SEAL_NAME)
        try:
            data = read_document(storage, SEAL_NAME)
        except FileNotFoundError:
            return None
        seal = build(cls, parse_members(data, path), path)
        if seal.manifest != manifest.id:
            message = f"{path} must belong to manifest {manifest.id}; got {seal.manifest}"
            raise ShdError("cache-mismatch", message + ": it was copied from another cache", "CACHE-52")
        if (seal.num_samples, len(seal.receipts)) != (manifest.dataset.num_samples, manifest.shards.num_shards):
            message = (
                f"{path} must count {manifest.dataset.num_samples} samples in {manifest.shards.num_shards} shards"
            )
            raise ShdError("cache-corrupt", message, "CACHE-55")
        return seal

    def to_bytes(self) -> bytes:
        """The seal file."""
        return encode_document(self)


def check_fingerprint(folder: object, manifest: Manifest, receipts: Iterable[Receipt]) -> None:
    """Refuse a set of receipts whose keys, by sample index, are not the data set's (CACHE-37)."""
    keys = np.zeros((manifest.dataset.num_samples, 16), dtype=np.uint8)
    held = np.zeros(len(keys), dtype=np.bool_)
    for receipt in receipts:
        for index, key in receipt.sample_keys().items():
            keys[index] = np.frombuffer(bytes.fromhex(key), dtype=np.uint8)
            held[index] = True
    found = dataset_fingerprint(key.tobytes().hex() for key in keys)
    expected = manifest.dataset.fingerprint
    if found != expected or not held.all():
        raise ShdError(
            "cache-mismatch",
            f"{folder}: the fingerprint of its {held.sum()} sample keys must be {expected}, as in the manifest; "
            f"got {found}: the data set or the tokenizer changed while the cache was written; start over "
            "in another folder",
            "CACHE-37",
        )
