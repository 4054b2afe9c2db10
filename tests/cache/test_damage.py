"""One changed byte anywhere is an error that names its file, and its record where it lies in a blob."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.makers import AVERAGED, FORMS, HIDDEN_OF_A_DECODER, KINDS, document, job, read_everything, write_cache
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, LayerPair, Manifest, Receipt, Record, SampleInputs, Teacher, verify_cache

FLIPS_PER_FILE = 12
WHAT = ("alphas", "mixing", "layer 1", "layer 2", "logits", "hidden layer 0", "hidden layer 11")
MANIFESTS = {
    "one sequence": job(**FORMS["topk"]),
    # The mean logits of three teachers and hidden states, a row for each position of the decoder.
    "decoder": job(codec="u4", **KINDS, logits=AVERAGED, hidden=HIDDEN_OF_A_DECODER),
    "skips": job(3, samples_per_shard=3, on_error="skip"),
    "seeds": job(inputs=SampleInputs(("input_ids",), None, "augmentation")),
}
SHARD = "shards/01/000001.safetensors"
EVERY_KIND = pytest.mark.parametrize("kind", ["one sequence", "decoder"])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pristine")
    return {kind: write_cache(folder / kind, manifest) for kind, manifest in MANIFESTS.items()}


@pytest.fixture
def kind() -> str:
    """Of the cache, where a test does not ask for every kind."""
    return "one sequence"


@pytest.fixture
def manifest(kind: str) -> Manifest:
    return MANIFESTS[kind]


@pytest.fixture
def folder(pristine: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    return shutil.copytree(pristine[kind], tmp_path / "cache")


def flips(size: int, seed: int) -> list[tuple[int, int]]:
    """Random positions and bits, and the first and last byte."""
    random = np.random.default_rng(seed)
    positions = [0, size - 1, *random.integers(size, size=FLIPS_PER_FILE - 2).tolist()]
    return [(position, int(random.integers(8))) for position in positions]


def flip(path: Path, position: int, bit: int) -> bytes:
    """Flip one bit in place; returns the bytes as they were."""
    data = path.read_bytes()
    path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
    return data


def start_of(record: Record, column: int) -> int:
    blob = record.blobs[2 + column]
    assert blob is not None
    return blob.start


@EVERY_KIND
def test_flipped_bit_in_a_blob(folder: Path, manifest: Manifest) -> None:
    path = folder / SHARD
    receipt = Receipt.read(folder, 1, manifest)
    owners = [
        (blob, record, what) for record in receipt.records for what, blob in zip(WHAT, record.blobs, strict=True)
    ]
    for blob, record, what in owners:
        assert blob is not None
        for offset, bit in flips(blob.end - blob.start, seed=blob.start)[:6]:
            data = flip(path, blob.start + offset, bit)
            reader = CacheReader(folder)
            with refusal("cache-corrupt", rf"000001\.safetensors: record {record.index} {what}: "):
                reader.read(record.key)
            blobs, whole = verify_cache(folder).problems
            assert (blobs.path, blobs.record, blobs.code) == (SHARD, record.index, "cache-corrupt")
            assert f"record {record.index} {what}" in blobs.message
            assert "XXH3-128 of the file" in whole.message
            path.write_bytes(data)


def test_reader_does_not_touch_damage_it_was_not_asked_for(folder: Path, manifest: Manifest) -> None:
    record = Receipt.read(folder, 1, manifest).records[0]
    flip(folder / SHARD, start_of(record, 1), 0)
    reader = CacheReader(folder)
    assert "L01" in reader.read(record.key, layers=[1]).parts
    with pytest.raises(ShdError, match="layer 2"):
        reader.read(record.key, layers=[2])


def test_all_problems_are_listed(folder: Path) -> None:
    (folder / "notes.txt").write_text("not ours")
    (folder / "receipts/000000.json").unlink()
    flip(folder / "receipts/000003.json", 40, 2)
    flip(folder / SHARD, 9, 0)
    (folder / "shards/02/000002.safetensors").unlink()
    report = verify_cache(folder)
    assert not report.ok
    assert [(problem.code, problem.path) for problem in report.problems] == [
        ("cache-incomplete", "receipts/000000.json"),
        ("cache-corrupt", SHARD),
        ("cache-corrupt", SHARD),
        ("cache-incomplete", "shards/02/000002.safetensors"),
        ("cache-corrupt", "receipts/000003.json"),
        ("cache-corrupt", "notes.txt"),
        ("cache-corrupt", "shards/00/000000.safetensors"),
    ]
    assert (report.shards, report.records) == (0, 0)
    for problem in report.problems:
        assert str(problem).startswith(f"{problem.code}: ")
        assert str(problem).count(problem.path) == 1


def test_verification_without_a_manifest(tmp_path: Path) -> None:
    (problem,) = verify_cache(tmp_path).problems
    assert (problem.code, problem.path) == ("cache-incomplete", "manifest.json")


def record(number: int = -1, **changes: Any) -> Callable[[dict[str, Any]], object]:
    """Other members of a record; None leaves one out."""

    def edit(receipt: dict[str, Any]) -> None:
        members = receipt["records"][number] | changes
        receipt["records"][number] = {name: value for name, value in members.items() if value is not None}

    return edit


def blob(place: int, change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], object]:
    """Another place or hash of a blob."""

    def edit(receipt: dict[str, Any]) -> None:
        blobs = receipt["records"][0]["blobs"]
        blobs[place] = change(blobs[place])

    return edit


def skip(*skipped: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda receipt: receipt.update(skipped=list(skipped))


def skip_a_record(receipt: dict[str, Any]) -> None:
    gone = receipt["records"].pop()
    receipt["skipped"] = [{"index": gone["index"], "key": gone["key"], "reason": ""}]


WRONG_BLOBS: dict[str, Callable[[list[Any]], Any]] = {
    "is a path": lambda blob: "/etc/passwd",
    "without hash": lambda blob: blob[:2],
    "hash of another form": lambda blob: [*blob[:2], "0X23456789ABCDEF"],
    "backwards": lambda blob: [blob[1], blob[0], blob[2]],
    "elsewhere": lambda blob: [0, blob[1] - blob[0], blob[2]],
    "beyond the file": lambda blob: [2**50, 2**50 + blob[1] - blob[0], blob[2]],
    "larger": lambda blob: [blob[0], blob[1] + 1, blob[2]],
    "smaller": lambda blob: [blob[0], blob[1] - 1, blob[2]],
    "missing": lambda blob: None,
}
GONE = {"index": 1, "key": "0" * 32, "reason": ""}
FORGED: dict[str, dict[str, Callable[[dict[str, Any]], object]]] = {
    "one sequence": {
        "index beyond the data set": record(index=7),
        "no length": record(length=0),
        "absurd length": record(length=2**40),
        "length that its blobs do not fit": record(length=2**22),
        "key is a path": record(key="../../../../../etc/passwd"),
        "unknown member": record(path="../x"),
        "no blobs": record(blobs=[]),
        "blobs are a path": record(blobs="/etc/passwd"),
        "padding in front of maps": record(first=1),
        "shapes the manifest rules out": record(shapes=[[1, 1], [1, 1]]),
        "positions of a decoder": record(decoder=2**40),
        "skipped without leave": skip_a_record,
        **{f"{WHAT[3]} {name}": blob(3, change) for name, change in WRONG_BLOBS.items()},
        **{f"{what} larger": blob(place, WRONG_BLOBS["larger"]) for place, what in enumerate(WHAT)},
    },
    "decoder": {
        "no positions of the decoder": record(decoder=0),
        "too few": record(decoder=1),
        "absurdly many": record(decoder=2**40),
        "not a number": record(decoder="4"),
        "no decoder": record(decoder=None),
        "no shapes": record(shapes=None),
        **{
            f"shapes {shapes}": record(shapes=shapes)
            for shapes in ([[1, 1]], [[1, 1], [1, 2**40]], [[2, 2], [2, 0]], [[90, 9], [9, 9]])
        },
        **{f"{WHAT[place]} larger": blob(place, WRONG_BLOBS["larger"]) for place in (4, 5)},
    },
    "skips": {
        "none, spelled out": skip(),
        "one too many": skip(GONE, GONE | {"index": 2}),
        "index beyond the data set": skip(GONE | {"index": 7}),
        "key is a path": skip(GONE | {"key": "../../../../etc/passwd"}),
        "no reason": skip({"index": 1, "key": "0" * 32}),
        "unknown member": skip(GONE | {"path": "../x"}),
    },
    "seeds": {f"seed {seed!r}": record(0, seed=seed) for seed in (None, -1, 1.5, 2**53, "7", True)},
}
"""By kind of cache what is forged in a receipt whose checksum is right."""


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in FORGED.items() for fault in faults])
def test_forged_receipts_are_refused(folder: Path, kind: str, fault: str) -> None:
    path = folder / "receipts/000000.json"
    members = json.loads(path.read_bytes())
    FORGED[kind][fault](members)
    path.write_bytes(document(members))
    (folder / "SEALED.json").unlink()
    tracemalloc.start()
    with refusal("cache-corrupt", r"receipts/000000\.json"):
        CacheReader(folder, allow_partial=True)
    assert tracemalloc.get_traced_memory()[1] < 2**22, "whatever it says of sizes"
    tracemalloc.stop()


def test_samples_in_another_order_are_reported(folder: Path) -> None:
    path = folder / "receipts/000001.json"
    members = json.loads(path.read_bytes())
    first, second = members["records"]
    first["index"], second["index"] = second["index"], first["index"]
    path.write_bytes(document(members))
    (folder / "SEALED.json").unlink()
    messages = [problem.message for problem in verify_cache(folder).problems]
    assert "its records are not the samples of this shard, in order" in messages


def test_names_in_a_manifest_are_never_paths(tmp_path: Path) -> None:
    """No string in a cache makes it read or write outside of its folder."""
    layers = (LayerPair(1, 2, "../../../outside", 4), LayerPair(2, 4, "/etc/passwd", 4))
    manifest = job(
        teacher=Teacher("ab" * 32, "../../teacher.onnx", "/provider", "../dtype"),
        layers=layers,
        inputs=SampleInputs(("../ids",), None, "../../seed"),
        strategy="../../strategy",
    )
    folder = write_cache(tmp_path / "a" / "b" / "cache", manifest)
    read_everything(CacheReader(folder))
    assert verify_cache(folder).ok
    assert {path for path in tmp_path.rglob("*") if folder not in (path, *path.parents)} == {
        tmp_path / "a",
        tmp_path / "a" / "b",
    }


@pytest.mark.parametrize("shard", [4, 999_999])
def test_receipt_beyond_the_plan_is_refused(folder: Path, shard: int) -> None:
    members = json.loads((folder / "receipts/000000.json").read_bytes())
    (folder / f"receipts/{shard:06d}.json").write_bytes(document(members | {"shard": shard}))
    (folder / "SEALED.json").unlink()
    with refusal("cache-corrupt", "below 4"):
        CacheReader(folder, allow_partial=True)
