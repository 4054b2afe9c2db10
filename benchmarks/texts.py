"""Texts that the benchmarks of all-MiniLM-L6-v2 train and judge on, its embeddings, and their quality.

Sentences of WikiText-2 and of dolly, first lines of docstrings of Python's standard library, and pairs with human
scores (STS 2012 to 2016).
"""

from __future__ import annotations

import ast
import json
import platform
import random
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks import SHARED
from shd_torch import compare_embeddings

HELD = 500
LENGTH = 64
YEARS = (2012, 2013, 2014, 2016)
Run = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.float32]]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    return path


def wikitext(part: str) -> list[str]:
    lines = (line.strip() for line in (SHARED / "wikitext2" / f"{part}.txt").read_text().splitlines())
    kept = [line for line in lines if line and not line.startswith("=")]
    return [text for line in kept for text in re.split(r"(?<= [.!?]) ", line) if len(text) >= 40]


def dolly() -> list[str]:
    rows = map(json.loads, (SHARED / "dolly_pairs" / "dolly_pairs.jsonl").read_text().splitlines())
    texts = [row[name].replace("\n", " ") for row in rows for name in ("instruction", "response")]
    return [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s+", text) if len(sentence) >= 20]


def docstrings() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes()))]
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    lines = {
        (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        for node in nodes
        if isinstance(node, kinds)
    }
    return [line for line in lines if 30 < len(line) < 150]


def sample(texts: list[str], seed: int, count: int | None = None) -> list[str]:
    distinct = sorted(set(texts))
    random.Random(seed).shuffle(distinct)
    return distinct[:count]


def processor() -> str:
    """Its name, and what int8 products use of it."""
    path = Path("/proc/cpuinfo")
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line) if path.exists() else {}
    lines = {name.strip(): value.strip() for name, value in lines.items()}
    flags = lines.get("flags", "").split()
    kinds = [kind for kind in ("avx2", "avx_vnni", "avx512_vnni", "amx_int8") if kind in flags]
    return ", ".join([lines.get("model name", platform.machine()), *kinds])


def run_onnx(path: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda inputs: session.run(None, {name: inputs[name] for name in names})[0]  # type: ignore[no-any-return]


def tokenize(texts: list[str], tokenizer: Any) -> dict[str, NDArray[Any]]:
    rows = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="np")
    return {name: rows[name].astype(np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


def embed(run: Run, texts: list[str], tokenizer: Any, batch: int = 32) -> NDArray[np.float32]:
    """Normalised means over the positions of the mask; texts of like length share a batch."""
    order = np.argsort([len(text) for text in texts], kind="stable")
    vectors = np.empty((len(texts), 384), np.float32)
    for start in range(0, len(texts), batch):
        chosen = order[start : start + batch]
        rows = tokenize([texts[i] for i in chosen], tokenizer)
        mask = rows["attention_mask"][..., None]
        means = (run(rows) * mask).sum(1) / mask.sum(1)
        vectors[chosen] = means / np.linalg.norm(means, axis=1, keepdims=True)
    return vectors


def agree(teacher: torch.Tensor, vectors: NDArray[np.float32]) -> dict[str, float]:
    """Rank correlation of cosines, and the same ten nearest, among its own vectors and in the teacher's index."""
    found = compare_embeddings(teacher, torch.from_numpy(vectors))
    return {"spearman": found.spearman, "neighbours": found.neighbours or 0.0, "index": found.index or 0.0}


def judge_sts(run: Run, tokenizer: Any) -> dict[str, float]:
    scores: dict[str, float] = {}
    for year in YEARS:
        rows = [json.loads(line) for line in (SHARED / "sts" / f"sts{year}.jsonl").read_text().splitlines()]
        texts = sorted({row[side] for row in rows for side in ("a", "b")})
        vectors = dict(zip(texts, embed(run, texts, tokenizer), strict=True))
        cosines = [float(vectors[row["a"]] @ vectors[row["b"]]) for row in rows]
        scores[str(year)] = float(spearmanr(cosines, [row["score"] for row in rows])[0])
    return scores


def time_runs(runs: Mapping[str, Run], rounds: int) -> dict[str, dict[str, float]]:
    """Median over rounds of the float graph's processor time over each one's, at batch 1 and 32."""
    ratios: dict[str, dict[str, float]] = {name: {} for name in runs}
    for batch in (1, 32):
        ids = np.random.default_rng(0).integers(1000, 20000, (batch, LENGTH))
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                run(feed)
                turns = []
                until = time.perf_counter() + 1.0
                while len(turns) < 3 or time.perf_counter() < until:
                    started = time.process_time()
                    run(feed)
                    turns.append(time.process_time() - started)
                seconds[name].append(statistics.median(turns))
        base = seconds["float, fused"]
        for name, values in seconds.items():
            pairs = zip(base, values, strict=True)
            ratios[name][str(batch)] = statistics.median(first / second for first, second in pairs)
    return ratios
