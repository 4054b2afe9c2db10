"""Reads a cache by the words of specs/cache-format.md alone: plain loops, nothing of ours (not a test itself)."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import xxhash


def read_document(path: Path) -> dict[str, Any]:
    """CACHE-11 and CACHE-13."""
    members: dict[str, Any] = json.loads(path.read_bytes())
    assert spelled(members) == path.read_bytes()
    checksum = members.pop("checksum")
    assert checksum == xxhash.xxh3_128_hexdigest(spelled(members))
    return members | {"checksum": checksum}


def spelled(members: dict[str, Any]) -> bytes:
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def read_cache(folder: Path) -> dict[int, dict[str, Any]]:
    """Every sample by its index: key, length, alphas, mixing, and decoded maps per student layer."""
    manifest, seal = read_document(folder / "manifest.json"), read_document(folder / "SEALED.json")
    identity = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert seal["manifest"] == identity
    samples, skipped = {}, 0
    for number, checksum in enumerate(seal["receipts"]):
        receipt = read_document(folder / f"receipts/{number:06d}.json")
        data = (folder / f"shards/{number % 100:02d}/{number:06d}.safetensors").read_bytes()
        assert (receipt["checksum"], receipt["manifest"], receipt["size"]) == (checksum, identity, len(data))
        assert receipt["xxh3_128"] == xxhash.xxh3_128_hexdigest(data)
        for record in receipt["records"]:
            samples[record["index"]] = read_record(manifest, data, record)
        skipped += len(receipt.get("skipped", []))
    assert len(samples) + skipped == seal["num_samples"]
    return samples


def read_record(manifest: dict[str, Any], data: bytes, record: dict[str, Any]) -> dict[str, Any]:
    def blob(place: list[Any]) -> bytes:
        start, end, checksum = place
        assert xxhash.xxh3_64_hexdigest(data[start:end]) == checksum
        return data[start:end]

    def floats(place: list[Any]) -> list[float]:
        return list(struct.unpack(f"<{(place[1] - place[0]) // 4}f", blob(place)))

    attention = manifest["attention"]
    layers = [layer["student_layer"] for layer in attention["layers"]]
    alphas, mixing, *codes = record["blobs"]
    square = [[record["length"]] * 2] * len(layers)
    return {
        "key": record["key"],
        "length": record["length"],
        "seed": record.get("seed"),
        "alphas": floats(alphas),
        "mixing": floats(mixing),
        "maps": {
            layer: read_factored(attention, column, blob(place), floats(mixing), record)
            if attention["form"] == "factored"
            else read_map(attention, blob(place), *record.get("shapes", square)[column])
            for column, (layer, place) in enumerate(zip(layers, codes, strict=True))
        },
    }


def read_map(attention: dict[str, Any], blob: bytes, length: int, num_keys: int) -> list[list[list[float]]]:
    """CACHE-110 to CACHE-119 and CACHE-125 to CACHE-130."""
    form = {"float32": "f", "bf16": "H"}.get(attention["codec"], "B")
    numbers = struct.unpack(f"<{len(blob) // struct.calcsize(form)}{form}", blob)
    if attention["codec"] == "u4":
        numbers = tuple(half for byte in numbers for half in (byte % 16, byte // 16))
    codes = iter(numbers)
    heads = []
    for _ in range(attention["num_student_heads"]):
        rows = []
        for query in range(length):
            keys = num_keys if attention["support"] == "full" else query + 1
            row = [value_of(attention["codec"], next(codes)) for _ in range(keys)] + [0.0] * (num_keys - keys)
            mass = 1.0 if attention["codec"] == "float32" else sum(row)
            rows.append([value / mass if mass else 0.0 for value in row])
        heads.append(rows)
    assert next(codes, 0) == 0  # behind an odd number of half-byte codes lies a zero, otherwise nothing
    assert next(codes, None) is None
    return heads


def read_factored(
    attention: dict[str, Any], column: int, blob: bytes, mixing: list[float], record: dict[str, Any]
) -> list[list[list[float]]]:
    """CACHE-141 to CACHE-153."""
    first = record.get("first", 0)
    length = record["length"] - first
    layer = attention["factors"][column]
    teachers, students, width = (
        attention["layers"][0]["num_teacher_heads"],
        attention["num_student_heads"],
        layer["width"],
    )
    vectors = (teachers + layer["num_key_heads"]) * length
    if attention["codec"] == "int8":
        steps: tuple[float, ...] = struct.unpack(f"<{vectors}f", blob[: 4 * vectors])
        codes: tuple[float, ...] = struct.unpack(f"<{vectors * width}b", blob[4 * vectors :])
    else:
        steps, codes = (1.0,) * vectors, struct.unpack(f"<{vectors * width}e", blob)
    rows = [[code * steps[i] for code in codes[i * width : (i + 1) * width]] for i in range(vectors)]
    window = layer.get("window", length)
    mixed = [[[0.0] * record["length"] for _ in range(record["length"])] for _ in range(students)]
    for head in range(teachers):
        key_head = teachers + head // (teachers // layer["num_key_heads"])
        for i in range(length):
            seen = range(max(0, i - window + 1), i + 1)
            if attention["support"] == "full":
                seen = range(seen.start, min(length, i + window))
            query, keys = rows[head * length + i], [rows[key_head * length + j] for j in seen]
            powers = [math.exp(layer["scale"] * sum(q * k for q, k in zip(query, key, strict=True))) for key in keys]
            for student in range(students):
                weight = mixing[(column * students + student) * teachers + head]
                for j, power in zip(seen, powers, strict=True):
                    mixed[student][first + i][first + j] += weight * power / sum(powers)
    return mixed


def value_of(codec: str, code: Any) -> float:
    if codec == "float32":
        return float(code)
    if codec == "bf16":
        return float(struct.unpack("<f", struct.pack("<I", code << 16))[0])
    if codec == "u4":
        return 0.84375 / 15**3 if code == 1 else (code / 15) ** 3
    return 0.75 / 255**2 if code == 1 else (code / 255) ** 2
