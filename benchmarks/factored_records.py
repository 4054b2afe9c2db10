"""Queries and keys or maps: how large are records of a pretrained encoder, how exact, and how fast are they read?

Heads of a MiniLM (12 -> 6) on real text, at several lengths. Records of queries and keys (int8, float16) beside maps
in sqrt8-row, judged by maps in float32 of the same teacher: bytes of a sample's codes; KL of a row; error of the
gradient of the KL with respect to a student's logits, ``A_student - A~``, over its size, for a student at a KL of
about 0.03 nats; and samples a second through ``SupervisedDataset`` and a ``DataLoader``, up to what ``attention_kl``
takes: queries and keys are decoded by then, codes of maps only in the loss. Forms are read in turn, round after
round, so that a busy machine hits them alike; rates are medians of the rounds. Prints a table and writes
``results/factored_records.json``.

    python -m benchmarks.factored_records [--lengths 128 256 384] [--texts 8] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks import SHARED, machine, minilm_folder, result_path, save
from benchmarks.codec_rate import gradient_error, near_student
from benchmarks.squeeze_overhead import export
from shd_ref.cache import CacheReader, CodecError, codec_error
from shd_ref.cache.codecs.codecs import merge_errors
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset

RESULT = result_path(__file__)
TEXT = SHARED / "wikitext2" / "valid.txt"
STUDENT_HEADS = 6
BATCH = 8
EXACT, RIVAL = "maps, float32", "maps, sqrt8-row"
FORMS = {
    EXACT: {"codec": "float32"},
    RIVAL: {"codec": "sqrt8-row"},
    "factored, int8": {"form": "factored", "factored_codec": "int8"},
    "factored, float16": {"form": "factored", "factored_codec": "float16"},
}


class Tokens(Dataset[dict[str, Tensor]]):
    """Tokenised texts."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.inputs.items()}


def read_texts(folder: Path, texts: int, length: int) -> dict[str, Tensor]:
    """``texts`` passages of ``length`` tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = TEXT.read_text(encoding="utf-8").split()
    step = 2 * length
    batch = [" ".join(words[start : start + step]) for start in range(0, texts * step, step)]
    inputs = tokenizer(batch, return_tensors="pt", truncation=True, max_length=length, padding=True)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def judge(exact: CacheReader, reader: CacheReader) -> dict[str, float]:
    """Error of a cache's maps, and of the gradient that they give."""
    errors, gradients = [], []
    for key in exact:
        wanted, record = exact.read(key), reader.read(key)
        for layer in exact.manifest.attention.student_layers:
            maps, found = exact.decode(wanted, layer), reader.decode(record, layer)
            errors.append(codec_error(maps, found))
            gradients.append(gradient_error(maps, found, near_student(maps)))
    merged = merge_errors(CodecError, errors)
    return {"kl_mean": merged.kl_mean, "kl_max": merged.kl_max, "gradient_error": float(np.mean(gradients))}


def read_all(joined: SupervisedDataset, loader: Any) -> float:
    """Samples a second, one pass."""
    started = time.perf_counter()
    for _, codes in loader:
        codes.supervise()
    return len(joined) / (time.perf_counter() - started)


def measure(teacher: Path, folder: Path, inputs: dict[str, Tensor], rounds: int, threads: int) -> dict[str, Any]:
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    figures: dict[str, Any] = {}
    readers = {}
    for form, options in FORMS.items():
        cache = folder / form.replace(", ", "-")
        run = RunOptions(batch_size=BATCH, num_threads=threads)
        stored = PrecomputeOptions(STUDENT_HEADS, **options)  # type: ignore[arg-type]
        summary = precompute(teacher, arrays, cache, stored, run)
        readers[form] = CacheReader(cache)
        figures[form] = {"bytes_a_sample": round(summary.coded_bytes / summary.samples)}
    joined = {form: SupervisedDataset(Tokens(inputs), reader.folder) for form, reader in readers.items()}
    loaders = {form: DataLoader(each, batch_size=BATCH, collate_fn=each.collate) for form, each in joined.items()}
    rates: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(rounds + 1):  # the first warms up
        for form in FORMS:
            rates[form].append(read_all(joined[form], loaders[form]))
    for form, row in figures.items():
        ratios = [own / other for own, other in zip(rates[form][1:], rates[RIVAL][1:], strict=True)]
        row |= judge(readers[EXACT], readers[form])
        row["bytes_over_sqrt8_row"] = round(row["bytes_a_sample"] / figures[RIVAL]["bytes_a_sample"], 3)
        row["samples_a_second"] = round(statistics.median(rates[form][1:]), 1)
        row["rate_over_sqrt8_row"] = round(statistics.median(ratios), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 384])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = minilm_folder()
    report: dict[str, Any] = {"machine": machine(arguments.threads), "texts": arguments.texts, "lengths": {}}
    with tempfile.TemporaryDirectory() as scratch:
        teacher = Path(scratch) / "teacher.onnx"
        model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager")
        teacher.write_bytes(export(model).SerializeToString())
        for length in arguments.lengths:
            inputs = read_texts(source, arguments.texts, length)
            figures = measure(teacher, Path(scratch) / str(length), inputs, arguments.rounds, arguments.threads)
            report["lengths"][str(length)] = figures
            print(
                f"\n{length} positions\n{'':20}{'bytes':>10}{'ratio':>8}{'KL':>10}{'largest':>10}{'gradient':>10}"
                f"{'samples/s':>11}{'ratio':>8}"
            )
            for form, row in figures.items():
                print(
                    f"{form:20}{row['bytes_a_sample']:10}{row['bytes_over_sqrt8_row']:8.2f}{row['kl_mean']:10.1e}"
                    f"{row['kl_max']:10.1e}{row['gradient_error']:10.2%}{row['samples_a_second']:11.0f}"
                    f"{row['rate_over_sqrt8_row']:8.2f}"
                )
            save(report, RESULT)


if __name__ == "__main__":
    main()
