"""What does ``shd-torch compress`` make of all-MiniLM-L6-v2, and what is it worth beside the teacher in int8?

Texts: sentences of WikiText-2 valid and of dolly, and those of --more, without labels. Judged on 500 sentences of
WikiText-2 test, 500 first lines of docstrings of Python's standard library, and texts of --judge, which no student
saw; and by human scores (STS 2012 to 2016). Teacher, its int8 of every maker, students in int8 and the static table
are timed by turns in plain loops: processor time of one thread at 64 tokens, over the float graph's.

Prints a table and writes ``results/compress_minilm.json``. OpenVINO is left out where it is not installed.
    python -m benchmarks.compress_minilm --keep FOLDER [--faster 4.6,6.8] [--minutes 60] [--more FILE,FILE]
        [--judge FILE] [--again]

With --quick 3: three seeds of ``--quick --kept-layers`` in place of an hour, the student next to kept layers of the
teacher that are trained as long, at the speed that these reach; written to ``compress_quick.json``:
    python -m benchmarks.compress_minilm --keep FOLDER --faster 5 --quick 3 [--more FILE,FILE] [--judge FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from benchmarks import minilm_folder, result_path, save
from benchmarks.int8_quality import CALIBRATION, make_models
from benchmarks.study.analysis import paired_gain
from benchmarks.texts import (
    HELD,
    LENGTH,
    YEARS,
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
    write_texts,
)

RESULT = result_path(__file__)


def compress(home: Path, arguments: argparse.Namespace, out: str, extent: list[str]) -> dict[str, float]:
    """Make the students by one command, as a user does; a killed run resumes in the folder."""
    train = write_texts(home / "texts.jsonl", sample(wikitext("valid") + dolly(), 0))
    data = ",".join([str(train), *arguments.more])
    words = ["shd-torch", "compress", str(home / "teacher"), "--data", data, "--faster", arguments.faster, *extent]
    words += ["--length", str(LENGTH), "--out", str(home / out)]
    started, before = time.monotonic(), os.times()
    subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True)
    after = os.times()
    processor_minutes = (after[2] + after[3] - before[2] - before[3]) / 60
    return {"minutes": (time.monotonic() - started) / 60, "processor_minutes": processor_minutes}


def judge(home: Path, others: list[str], out: str = "student") -> dict[str, Any]:
    """Every model by its loops, its agreement with the teacher by kind of text, and human scores."""
    from transformers import AutoTokenizer

    document = json.loads((home / out / "compress.json").read_text())
    students = document["students"]
    tokenizer = AutoTokenizer.from_pretrained(home / "teacher")
    texts = {"WikiText-2": sample(wikitext("test"), 1, HELD), "docstrings": sample(docstrings(), 0, HELD)}
    for file in others:
        lines = Path(file).read_text().splitlines()
        texts[Path(file).stem] = sample([json.loads(line)["text"] for line in lines], 0, HELD)
    calibration = sample(wikitext("valid") + dolly(), 0, CALIBRATION)
    with tempfile.TemporaryDirectory() as folder:
        single = [tokenize([text], tokenizer) for text in calibration]
        runs = make_models(Path(folder), home / "teacher", single, tokenize(calibration, tokenizer))
        for student in students:
            graphs = (home / out if len(students) == 1 else home / out / student["name"]) / "onnx"
            runs[f"student, {student['wish']}"] = run_onnx(graphs / "model.int8.onnx")
        table = home / out / "static" / "onnx" / "model.onnx"
        if table.exists():
            runs["static table"] = run_onnx(table)
        speed = time_runs(runs, 9)
        teacher = {
            part: torch.from_numpy(embed(runs["float, fused"], rows, tokenizer)) for part, rows in texts.items()
        }
        models = {
            name: {
                "times_faster": speed[name],
                "quality": {part: agree(teacher[part], embed(run, rows, tokenizer)) for part, rows in texts.items()},
                "sts": judge_sts(run, tokenizer),
            }
            for name, run in runs.items()
        }
    return {"compress": document, "models": models}


def compare_quick(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Students of ``--quick`` and kept layers trained as long, in the same run: one row a seed, and paired gains."""
    rows = []
    for seed in range(arguments.quick):
        out = f"quick{seed}"
        extent = ["--quick", "--kept-layers", "--seed", str(seed)]
        spent = {} if (home / out).exists() else compress(home, arguments, out, extent)
        result = judge(home, arguments.judge, out)
        show(result["models"])
        trained = {}
        for entry in result["compress"]["students"]:
            arm = "kept" if entry["name"].endswith("-kept") else "student"
            design = {"design": entry["chosen"]["text"], "rate": entry["learning_rate"], "steps": entry["steps"]}
            model = result["models"][f"student, {entry['wish']}"]
            held_out = entry["quality"]["int8"]
            trained[arm] = design | model | {"held_out": held_out["value"], **held_out["details"]}
        rows.append({"seed": seed, **spent, **trained})
    gains = {
        name: paired_gain([of(row["kept"]) for row in rows], [of(row["student"]) for row in rows])
        for name, of in MEASURES.items()
    }
    print(json.dumps(gains, indent=1))
    return {"faster": arguments.faster, "seeds": rows, "gains": gains}


MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "held out": itemgetter("held_out"),
    "index": itemgetter("index"),
    "STS": lambda model: float(np.mean([model["sts"][str(year)] for year in YEARS])),
    "times faster, batch 1": lambda model: float(next(iter(model["times_faster"].values()))),
    "times faster, batch 32": lambda model: float(list(model["times_faster"].values())[-1]),
}
"""Of a model; gains in each are paired over seeds."""


def show(models: dict[str, Any]) -> None:
    for name, model in models.items():
        speed = " / ".join(f"{value:.2f}" for value in model["times_faster"].values())
        agreement = ", ".join(f"{of['spearman']:.3f} {of['index']:.3f}" for of in model["quality"].values())
        print(f"{name:32} {speed:16} {agreement}  STS {MEASURES['STS'](model):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, required=True, help="where the students stay; a killed run resumes there"
    )
    parser.add_argument("--faster", default="4.6,6.8")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--more", type=lambda text: text.split(","), default=[], help="JSON lines with a column text")
    parser.add_argument("--judge", type=lambda text: text.split(","), default=[], help="others, to judge on")
    parser.add_argument("--again", action="store_true", help="only judge the students that --keep has")
    parser.add_argument("--quick", type=int, default=0, metavar="SEEDS", help="compare --quick with kept layers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    home: Path = arguments.keep
    home.mkdir(exist_ok=True)
    if not (home / "teacher").exists():
        shutil.copytree(minilm_folder(), home / "teacher")
    about = {"processor": processor(), "cores": os.cpu_count()}
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    document: dict[str, Any] = {"machine": about, "versions": versions}
    if arguments.quick:
        document |= compare_quick(home, arguments)
    else:
        extent = ["--static", "--minutes", str(arguments.minutes)]
        document |= {} if arguments.again else compress(home, arguments, "student", extent)
        document |= judge(home, arguments.judge)
        words = document["compress"]["command"]
        document["compress"]["command"] = [word.replace(f"{home}/", "") for word in words]
        show(document["models"])
    out = arguments.out or RESULT.with_name("compress_quick.json" if arguments.quick else RESULT.name)
    save(document, out)


if __name__ == "__main__":
    main()
