"""Reads a cache by the words of specs/cache-format.md alone: plain loops, nothing of ours (not a test itself)."""

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
    """Every sample by its index: key, length, alphas, mixing, maps per student layer, logits, hidden states."""
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

    def floats(place: list[Any] | None) -> list[float]:
        return list(struct.unpack(f"<{(place[1] - place[0]) // 4}f", blob(place))) if place else []

    attention, rest = manifest.get("attention", {"layers": []}), record["blobs"]
    layers = [layer["student_layer"] for layer in attention["layers"]]
    alphas, mixing, *rest = rest if layers else (None, None, *rest)
    codes, rest = rest[: len(layers)], rest[len(layers) :]
    logits, rest = rest[: "logits" in manifest], rest["logits" in manifest :]
    count = len(manifest.get("hidden", {}).get("layers", []))
    hidden, rest = rest[:count], rest[count:]
    embedding, last = rest[: "embeddings" in manifest], rest["embeddings" in manifest :]
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
        "logits": read_logits(manifest["logits"], blob(logits[0]), record) if logits else {},
        "hidden": {
            each["layer"]: read_hidden(manifest["hidden"]["codec"], each["width"], blob(place))
            for each, place in zip(manifest.get("hidden", {}).get("layers", []), hidden, strict=True)
        },
        "embedding": [
            read_hidden(manifest["embeddings"]["codec"], manifest["embeddings"]["width"], blob(place))
            for place in embedding
        ],
        "last": [
            row
            for place in last
            for row in read_hidden(manifest["exact"]["codec"], manifest["exact"]["width"], blob(place))
        ],
    }


def read_head(folder: Path) -> list[list[float]] | None:
    """The logits of states that are one unit vector each, by the head (CACHE-188 to CACHE-190)."""
    form = read_document(folder / "manifest.json").get("exact")
    if form is None:
        return None
    head, data = form["head"], (folder / "teacher_head.safetensors").read_bytes()
    assert head["xxh3_128"] == xxhash.xxh3_128_hexdigest(data)
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            letter = {"F32": "f", "F16": "e"}[about["dtype"]]
            first, end = about["data_offsets"]
            tensors[name] = struct.unpack(f"<{math.prod(about['shape'])}{letter}", data[start + first : start + end])
    width, made = form["width"], []
    for unit in range(width):
        state = [float(place == unit) for place in range(width)]
        mean = sum(state) / width
        var = sum((number - mean) ** 2 for number in state) / width
        spread = math.sqrt(var + head["norm"]["epsilon"])
        normed = [
            (state[i] - mean) / spread * tensors["norm.weight"][i] + tensors["norm.bias"][i] for i in range(width)
        ]
        rows = [tensors["weight"][number : number + width] for number in range(0, len(tensors["weight"]), width)]
        sums = [sum(w * x for w, x in zip(row, normed, strict=True)) for row in rows]
        raw = [head["scale"] * total + bias for total, bias in zip(sums, tensors["bias"], strict=True)]
        made.append([head["soft_cap"] * math.tanh(number / head["soft_cap"]) for number in raw])
    return made


def read_logits(form: dict[str, Any], blob: bytes, record: dict[str, Any]) -> dict[str, list[Any]]:
    """CACHE-160 to CACHE-169."""
    counts = {"positions": record["length"] - record.get("first", 0), "decoder": record.get("decoder"), "sample": 1}
    count = counts[form["rows"]]
    size = form["vocab_size"]
    if form["codec"] == "float16":
        numbers = struct.unpack(f"<{count * size}e", blob)
        return {"logits": [list(numbers[row * size : (row + 1) * size]) for row in range(count)]}
    assert len(blob) % count == 0
    head, bits = form["head"], form["value_bits"]
    found: dict[str, list[Any]] = {"ids": [], "log_probs": [], "log_tail": []}
    for row in range(count):
        data = blob[row * len(blob) // count : (row + 1) * len(blob) // count]
        (log_tail,), data = struct.unpack("<e", data[:2]), data[2:]
        values = -(-head * bits // 8)
        codes = [field(data[:values], bits, i) for i in range(head)]
        shares = [(code / (2**bits - 1)) ** 3 for code in codes]
        ids, data = read_ids(data[values:], head, size)
        assert data == b""
        found["ids"].append(ids)
        found["log_probs"].append([math.log(share / sum(shares) * (1 - math.exp(log_tail))) for share in shares])
        found["log_tail"].append(log_tail)
    return found


def field(data: bytes, width: int, number: int) -> int:
    """The number-th field of so many bits, from the lowest up."""
    return int.from_bytes(data, "little") >> (width * number) & ((1 << width) - 1)


def read_ids(data: bytes, count: int, size: int) -> tuple[list[int], bytes]:
    """The ids of CACHE-166, and the bytes behind them."""
    low = math.floor(math.log2(max(size // count, 1)))
    lower, high = -(-count * low // 8), -(-(count + (size - 1) // 2**low + 1) // 8)
    places = [place for place in range(8 * high) if field(data[lower : lower + high], 1, place)]
    assert len(places) == count
    ids = [((place - i) << low) + field(data[:lower], low, i) for i, place in enumerate(places)]
    return ids, data[lower + high :]


def read_hidden(codec: str, width: int, blob: bytes) -> list[list[float]]:
    """CACHE-177, CACHE-183."""
    rows = []
    if letter := {"float16": "e", "float32": "f"}.get(codec):
        numbers = struct.unpack(f"<{len(blob) // struct.calcsize(letter)}{letter}", blob)
        return [list(numbers[start : start + width]) for start in range(0, len(numbers), width)]
    for start in range(0, len(blob), width + 4):
        (step,) = struct.unpack("<f", blob[start : start + 4])
        codes = struct.unpack(f"<{width}b", blob[start + 4 : start + 4 + width])
        rows.append([code * step for code in codes])
    return rows


def read_map(attention: dict[str, Any], blob: bytes, length: int, num_keys: int) -> list[list[list[float]]]:
    """CACHE-110 to CACHE-119 and CACHE-125 to CACHE-130."""
    form = "f" if attention["codec"] == "float32" else "B"
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
    if codec == "u4":
        return 0.84375 / 15**3 if code == 1 else (code / 15) ** 3
    return 0.75 / 255**2 if code == 1 else (code / 255) ** 2
