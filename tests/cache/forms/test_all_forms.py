"""Logits and hidden states beside attention: every tool of the cache takes them."""

import copy
import hashlib
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.makers import ALONE, FORMS, document, job, key_of, read_everything, write_cache
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import Attention, CacheReader, list_cache, verify_cache


@pytest.mark.parametrize("layers", [None, [2, 1], [1], []], ids=str)
def test_a_batch_is_its_records_in_one_buffer(tmp_path: Path, layers: list[int] | None) -> None:
    """In the order asked for, not that of the shards; a sample that is asked for twice is there twice."""
    reader = CacheReader(write_cache(tmp_path, job(11, **FORMS["topk"])))
    keys = [key_of(index) for index in (7, 0, 3, 7, 1)]
    asked: list[NDArray[np.uint8]] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        asked.append(np.zeros(size, np.uint8))
        return asked[-1]

    batch = reader.read_batch(keys, layers, hidden=[11, 0], allocate=allocate)
    names = [f"L{layer:02d}" for layer in ([1, 2] if layers is None else layers)] + ["logits", "H11", "H00"]
    parts = [record.parts[name] for name in names for record in batch]
    (buffer,) = asked
    assert buffer.tobytes() == b"".join(part.tobytes() for part in parts)
    assert all(part.base is buffer for part in parts)
    for key, record in zip(keys, batch, strict=True):
        alone = reader.read(key, layers)
        assert (record.key, record.index, record.length) == (key, alone.index, alone.length)
        assert list(record.parts) == ["alphas", "mixing", *names]
        for name in record.parts:
            np.testing.assert_array_equal(record.parts[name], alone.parts[name])
    assert reader.read_batch([]) == []


def test_a_cache_without_attention_says_so(tmp_path: Path) -> None:
    manifest = job(**ALONE["topk"])
    reader = pickle.loads(pickle.dumps(CacheReader(write_cache(tmp_path, manifest))))
    assert reader.manifest.find(Attention) is None
    assert copy.deepcopy(reader.manifest) == manifest
    assert b"attention" not in manifest.to_bytes()
    record = reader.read(key_of(2))
    assert (list(record.parts), record.first) == (["logits", "H00", "H11"], 1)
    assert len(reader.decode_hidden(record, 11)) == record.length - 1
    uses: dict[str, Callable[[], object]] = {
        "maps": lambda: reader.decode(record, 1),
        "layers": lambda: reader.manifest.attention.student_layers,
    }
    for use in uses.values():
        with refusal("argument-value", "must hold attention for this; it holds logits, hidden"):
            use()
    with pytest.raises(ShdError, match=r"layers must be among \[\]; got 1"):
        reader.read(key_of(2), layers=[1])


def test_a_listing_counts_each_form(tmp_path: Path) -> None:
    manifest = job(**FORMS["topk"])
    reader = CacheReader(write_cache(tmp_path, manifest))
    records = [reader.read(key) for key in reader]
    listing = list_cache(tmp_path)
    sizes = {
        name: sum(part.nbytes for record in records for key, part in record.parts.items() if key[:1] in letters)
        for name, letters in {"attention": "L", "logits": "l", "hidden": "H"}.items()
    }
    assert listing.coded_by_form == sizes
    assert listing.coded_bytes == sum(sizes.values())
    positions = sum(record.length for record in records)
    assert listing.float32_by_form["logits"] == 4 * 37 * positions
    assert listing.float32_by_form["hidden"] == 4 * (4 + 7) * positions
    shown = json.loads(json.dumps(listing.to_json()))
    assert shown["bytes"]["forms"]["logits"] == {
        "coded": sizes["logits"],
        "as_float32": 4 * 37 * positions,
        "rows": positions,
        "row_of": "position",
    }
    assert shown["logits"]["codec"] == "topk"
    assert shown["errors"].keys() == {"attention", "logits", "hidden"}
    assert list_cache(write_cache(tmp_path / "plain", job())).to_json()["errors"].keys() == {"attention"}


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "a whole head of a huge vocabulary": ("logits", {"vocab_size": 2**24, "head": 2**24, "padded_vocab_size": None}),
    "a huge vocabulary": ("logits", {"vocab_size": 2**24 - 1, "padded_vocab_size": 2**24}),
    "a vocabulary beyond all": ("logits", {"vocab_size": 2**53 - 1, "padded_vocab_size": None}),
    "a wide layer": ("hidden", {"layers": [{"layer": 0, "tensor": "x", "width": 2**20}]}),
    "many layers": ("hidden", {"layers": [{"layer": k, "tensor": "x", "width": 2**20} for k in range(1001)]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_forged_sizes_take_no_memory(tmp_path: Path, name: str) -> None:
    member, changes = HOSTILE[name]
    folder = write_cache(tmp_path, job(**FORMS["topk"]))
    members = json.loads((folder / "manifest.json").read_bytes())
    members[member] |= changes
    if changes.get("padded_vocab_size", 0) is None:
        del members[member]["padded_vocab_size"]
    (folder / "manifest.json").write_bytes(document(members))
    forged = document(members)
    for path in [*(folder / "receipts").iterdir(), folder / "SEALED.json"]:
        receipt = json.loads(path.read_bytes())
        path.write_bytes(document(receipt | {"manifest": hashlib.sha256(forged).hexdigest()}))
    (folder / "SEALED.json").unlink()
    tracemalloc.start()
    with refusal("cache-corrupt"):
        read_everything(CacheReader(folder, allow_partial=True))
    report = verify_cache(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {problem.code for problem in report.problems} >= {"cache-corrupt"}
    assert peak < 2**22
