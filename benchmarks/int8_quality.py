"""Which int8 of all-MiniLM-L6-v2 should one deploy on a CPU? Ours, onnxruntime's own, or OpenVINO's with NNCF.

Calibrated on 128 sentences of WikiText-2 valid and of dolly. Judged by the rank correlation of cosines and the ten
nearest neighbours with the float model's, over 500 sentences of WikiText-2 test and 500 first lines of docstrings
(another domain), by human scores (STS 2012 to 2016, Spearman), and by the cosine of a sentence alone to itself in a
padded batch. Speed: processor time of one thread at 64 tokens, all by turns, over the float graph's.

Prints a table and writes ``results/int8_quality.json``. OpenVINO and NNCF are left out, with a word, where they are
not installed (pip install openvino nncf).
    python -m benchmarks.int8_quality [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from numpy.typing import NDArray

from benchmarks import minilm_folder, result_path, save
from benchmarks.texts import (
    HELD,
    Run,
    agree,
    docstrings,
    dolly,
    embed,
    judge_sts,
    processor,
    run_onnx,
    sample,
    time_runs,
    tokenize,
    wikitext,
)
from shd_torch.deploy import quantize_graph
from shd_torch.export import example_inputs, export_student, load_hf_model

RESULT = result_path(__file__)
CALIBRATION = 128


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    from transformers import AutoTokenizer

    model = minilm_folder()
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
            rho = ", ".join(f"{of['spearman']:.4f} {of['neighbours']:.3f}" for of in result[name]["quality"].values())
            times = " / ".join(f"{value:.2f}" for value in speed[name].values())
            sts = statistics.fmean(result[name]["sts"].values())
            print(f"{name:24} {times:12} {rho}  STS {sts:.4f}  alone {result[name]['alone']:.4f}", flush=True)
    packages = {"onnxruntime": onnxruntime.__version__}
    packages |= {name: version(name) for name in ("openvino", "nncf") if find_spec(name)}
    about = {"processor": processor(), "rounds": rounds, "versions": packages}
    save(about | {"models": result}, RESULT)


if __name__ == "__main__":
    main()
