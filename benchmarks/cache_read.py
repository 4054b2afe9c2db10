"""How fast does a training loop get its maps? Read and checked through a DataLoader, beside raw float16.

The rival is what most people write: one array of float16 maps on disk, ``numpy.memmap``, nothing checked. Both give
the sample's tokens too. Batches are shuffled. "codes" is what reaches the training process, to be decoded on its
device; "maps" adds decoding to float32 on one thread of this CPU, tile by tile as attention_kl does it, and the
rival's cast in the same tiles. Both lie in the page cache. "cold" is "codes" from the disk, as where the data are
larger than memory: the kernel is told to drop the files before every round (Linux). Rounds are interleaved, figures
are medians. Prints a table and writes ``results/cache_read.json``.

    python -m benchmarks.cache_read [--samples 192] [--length 128] [--rounds 15]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import machine, result_path, save
from shd_ref.cache import (
    CacheWriter,
    CodecError,
    Errors,
    LayerPair,
    Manifest,
    Maps,
    SampleInputs,
    SampleRecord,
    ShardPlan,
    Teacher,
    dataset_fingerprint,
    encode,
    sample_key,
)
from shd_ref.cache import Dataset as CachedData
from shd_torch import SupervisedDataset
from shd_torch.supervision.supervision import tile_entries

RESULT = result_path(__file__)
TARGET = 2.0
LAYERS, HEADS, BATCH = 6, 6, 16


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + self.length)}


class RawMaps(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    def __init__(self, path: Path, shape: tuple[int, ...], tokens: Tokens) -> None:
        self.path, self.shape, self.tokens = path, shape, tokens
        self.open()

    def open(self) -> None:
        """Map the file again: the kernel drops no page that is mapped."""
        self.maps = np.memmap(self.path, np.float16, "r", shape=self.shape)

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return self.tokens[index], torch.from_numpy(np.array(self.maps[index]))


def drop(folder: Path, raw: RawMaps) -> None:
    """Take all files of a folder out of the page cache."""
    del raw.maps
    gc.collect()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    raw.open()


def make_maps(index: int, length: int, support: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``(LAYERS, HEADS, L, L)`` rows with about 40 effective keys, as merged maps of real encoders have."""
    rng = np.random.default_rng(index)
    logits = rng.normal(0, 1.2, (LAYERS, HEADS, length, length)).astype(np.float32)
    if support == "causal":
        logits = np.where(np.tri(length, dtype=bool), logits, -np.inf).astype(np.float32)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def write_both(folder: Path, samples: int, length: int, support: str, codec: str) -> int:
    """A cache and the array of float16; returns the bytes of the cache's shards."""
    keys = [sample_key({"input_ids": np.arange(i, i + length)}) for i in range(samples)]
    manifest = Manifest(
        spec_version="1.0",
        created_by="benchmark",
        teacher=Teacher("00" * 32, "benchmark", "CPUExecutionProvider", "float32"),
        forms=(
            Maps(
                num_student_heads=HEADS,
                layers=tuple(LayerPair(layer, layer, f"site {layer}", HEADS) for layer in range(LAYERS)),
                plan=(),
                strategy="shd",
                alpha_rule="least_squares",
                temperature=1.0,
                support=support,
                codec=codec,
            ),
        ),
        inputs=SampleInputs(("input_ids",), None),
        dataset=CachedData(dataset_fingerprint(keys), samples),
        shards=ShardPlan(64, 0, -(-samples // 64)),
    )
    writer = CacheWriter(folder / "cache", manifest)
    raw = np.memmap(folder / "raw", np.float16, "w+", shape=(samples, LAYERS, HEADS, length, length))
    size, error = 0, CodecError(0.0, 0.0, 0.0, samples)  # not measured: reading never looks at it
    for shard in writer.missing_shards():
        records = []
        for index in manifest.shard_samples(shard):
            maps = make_maps(index, length, support)
            raw[index] = maps
            parts = {f"L{number:02d}": encode(codec, layer) for number, layer in enumerate(maps)}
            records.append(SampleRecord(index, keys[index], length, parts))
        size += writer.write_shard(shard, records, Errors(attention=error)).size
    writer.seal()
    raw.flush()
    return size


def read_cached(joined: SupervisedDataset, workers: int, *, decode: bool) -> Callable[[], int]:
    loader = DataLoader(
        joined, BATCH, shuffle=True, num_workers=workers, collate_fn=joined.collate, persistent_workers=workers > 0
    )

    def run() -> int:
        done = 0
        for _, supervision in loader:
            done += len(supervision.lengths)
            for coded in supervision.supervise() if decode else ():
                for part, _, rows in coded.tiles():
                    part.probs(rows, part.key_range(rows))
        return done

    return run


def read_raw(data: RawMaps, workers: int, *, decode: bool) -> Callable[[], int]:
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def run() -> int:
        done = 0
        for _, batch in loader:
            done += len(batch)
            for layer in batch.unbind(1) if decode else ():
                entries = layer[0].numel()
                for tile in layer.split(max(1, tile_entries(layer.device) // entries)):
                    tile.float()
        return done

    return run


def measure(
    readers: dict[str, Callable[[], int]], samples: int, rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Samples a second of each reader: medians of interleaved rounds, after one that warms up."""
    seconds: dict[str, list[float]] = {kind: [] for kind in readers}
    for round_number in range(rounds + 1):
        for kind, run in readers.items():
            before()
            started = time.perf_counter()
            if run() != samples:
                raise SystemExit(f"{kind} did not give {samples} samples")
            if round_number:
                seconds[kind].append(time.perf_counter() - started)
    return {kind: samples / statistics.median(taken) for kind, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples, length = arguments.samples, arguments.length
    report: dict[str, Any] = {"machine": machine(torch.get_num_threads()), "samples": samples, "length": length}
    report |= {"layers": LAYERS, "heads": HEADS, "cases": []}
    print(f"{'':34}{'MB':>14}{'codes/s':>18}{'':7}{'maps/s':>18}{'':7}{'cold codes/s':>18}")
    print(
        f"{'support':9}{'codec':16}{'workers':>9}"
        + f"{'raw':>8}{'cache':>6}"
        + f"{'raw':>9}{'cache':>9}{'ratio':>7}" * 3
    )
    for support, codec in (("causal", "sqrt8-row"), ("full", "sqrt8-row"), ("causal", "u4")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            size = write_both(folder, samples, length, support, codec)
            tokens = Tokens(samples, length)
            joined = SupervisedDataset(tokens, folder / "cache")
            raw = RawMaps(folder / "raw", (samples, LAYERS, HEADS, length, length), tokens)
            megabytes = {"raw": (folder / "raw").stat().st_size / 1e6, "cache": size / 1e6}
            for workers in (0, 2):
                case: dict[str, Any] = {"support": support, "codec": codec}
                case |= {"workers": workers, "megabytes": megabytes}
                line = f"{support:9}{codec:16}{workers:9}"
                line += f"{megabytes['raw']:8.0f}{megabytes['cache']:6.0f}"
                for what in ("codes", "maps", "cold"):
                    if what == "cold" and workers:
                        continue  # workers would keep the files mapped
                    readers = {
                        "raw": read_raw(raw, workers, decode=what == "maps"),
                        "cache": read_cached(joined, workers, decode=what == "maps"),
                    }
                    before = partial(drop, folder, raw) if what == "cold" else lambda: None
                    rates = measure(readers, samples, arguments.rounds, before)
                    case[what] = rates | {"ratio": rates["cache"] / rates["raw"]}
                    line += f"{rates['raw']:9.0f}{rates['cache']:9.0f}{case[what]['ratio']:7.2f}"
                report["cases"].append(case)
                print(line, flush=True)
    for what in ("codes", "maps", "cold"):
        ratios = [case[what]["ratio"] for case in report["cases"] if what in case]
        met = sum(ratio >= TARGET for ratio in ratios)
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{what}: {TARGET}x raw float16 met in {met} of {len(ratios)} cases, {span}")
    save(report, RESULT)


if __name__ == "__main__":
    main()
