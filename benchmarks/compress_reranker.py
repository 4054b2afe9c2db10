"""What is a reranker worth that ``compress`` makes twice as fast as its teacher in int8?

A cross encoder is trained from all-MiniLM-L6-v2 on the train split of TREC QA. Its student is chosen by the stages of
``compress`` for half the time of the teacher in int8 at every batch, from fewer sizes than ``--minutes 60`` tries, or
has the design that is given. It learns from the teacher's scores, without labels, of TREC's own pairs (train, dev)
and of pairs that look like those to rank: questions of TREC and of dolly with sentences that share words with them;
several times, with other orders of samples. Judged on the test split, which nothing else used: MAP over questions
with right and wrong answers, with intervals of paired differences, and agreement with the teacher.

Prints the figures and writes ``results/compress_reranker.json``. A stopped run resumes from --keep.
    python -m benchmarks.compress_reranker --keep FOLDER [--steps 600] [--pairs 7000] [--seeds 3]
        [--design 0,1,2,3,5:9,9,9,9,12:768,768,704,640,1536]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import SHARED, minilm_folder, result_path, save
from benchmarks.texts import processor, wikitext
from shd_ref.teacher.study.intervals import half_width
from shd_torch.compress.options import CompressOptions, Target
from shd_torch.compress.run import _open_run
from shd_torch.compress.samples import batches
from shd_torch.compress.search import Costs, Worths, find_candidates, measure_costs, measure_worths
from shd_torch.compress.space import FRACTIONS, Design, find_space
from shd_torch.compress.stages import TEACHER, TEACHER_INT8, Run
from shd_torch.compress.students import _make, compare, prepare_training, train
from shd_torch.compress.task import Judge, graph_run, model_run, summarise
from shd_torch.shrink.folders import padding_of, save_student
from shd_torch.shrink.student import read_made

RESULT = result_path(__file__)
MOST = 64  # tokens of a pair
WRONG = 15  # wrong answers of a question from which the teacher learns, with all right ones


def read_pairs(part: str) -> list[dict[str, Any]]:
    lines = (SHARED / "trecqa" / f"{part}.jsonl").read_text().splitlines()
    return [{"text": row["query"], "text_pair": row["text"], "label": row["label"]} for row in map(json.loads, lines)]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def by_question(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["text"]].append(row)
    return groups


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def cross(queries: Sequence[str], texts: Sequence[str], count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Each query with some of the texts that share most words with it, rare words counting more."""
    holders, counts = defaultdict(list), [len(words(text)) for text in texts]
    for number, text in enumerate(texts):
        for word in words(text):
            holders[word].append(number)
    rows = []
    for query in queries:
        shared: dict[int, float] = defaultdict(float)
        for word in sorted(words(query)):
            for number in holders[word]:
                shared[number] += math.log(len(texts) / len(holders[word])) / (10 + counts[number])
        near = sorted(shared, key=lambda number: -shared[number])[: 5 * count]
        chosen = draw.sample(near, min(count, len(near)))
        rows += [{"text": query, "text_pair": texts[number]} for number in chosen]
    return rows


def unlabelled(count: int) -> list[dict[str, Any]]:
    """TREC's own pairs, so many more of its questions with texts of others, and three times as many of dolly's."""
    draw, own = random.Random(0), read_pairs("train") + read_pairs("dev")
    answers, questions = sorted({row["text_pair"] for row in own}), sorted({row["text"] for row in own})
    lines = [json.loads(line) for line in (SHARED / "dolly_pairs" / "dolly_pairs.jsonl").read_text().splitlines()]
    others = sorted({row["instruction"].replace("\n", " ") for row in lines if "?" in row["instruction"]})
    sentences = [text for row in lines for text in re.split(r"(?<=[.!?])\s+", row["response"].replace("\n", " "))]
    texts = sorted({*answers, *wikitext("valid"), *(text for text in sentences if len(text) > 30)})
    rows = [{name: row[name] for name in ("text", "text_pair")} for row in own]
    rows += cross(questions, answers, count // 4 // len(questions), draw)
    others = [text for text in others if len(words(text)) < 20]
    asked = draw.sample(others, min(len(others), (count - count // 4) // 6))
    return rows + cross(asked, texts, 6, draw)


def train_teacher(folder: Path, epochs: int, pairs: Sequence[dict[str, Any]]) -> None:
    """All right answers and some wrong ones of each question, binary cross entropy, as cross encoders are trained."""
    torch.manual_seed(0)
    draw = random.Random(0)
    source = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=MOST)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    chosen = []
    for group in by_question(pairs).values():
        wrong = [row for row in group if not row["label"]]
        chosen += [row for row in group if row["label"]] + draw.sample(wrong, min(WRONG, len(wrong)))
    total = max(epochs * math.ceil(len(chosen) / 32), 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1, (at + 1) / 20) * (1 - at / total))
    weight = torch.tensor(2.0)
    model.train()
    for _ in range(epochs):
        print(f"the teacher learns from {len(chosen)} pairs", flush=True)
        draw.shuffle(chosen)
        for start in range(0, len(chosen), 32):
            batch = chosen[start : start + 32]
            texts = [[row[name] for row in batch] for name in ("text", "text_pair")]
            rows = tokenizer(*texts, padding=True, truncation=True, return_tensors="pt")
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(**rows).logits[:, 0].float()
            labels = torch.tensor([float(row["label"]) for row in batch])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.config.problem_type = None
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def average_precisions(scores: np.ndarray, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each question with right and wrong answers."""
    groups = defaultdict(list)
    for score, row in zip(scores, rows, strict=True):
        groups[row["text"]].append((score, row["label"]))
    precisions = {}
    for query, pairs in groups.items():
        labels = [label for _, label in sorted(pairs, key=lambda pair: -pair[0])]
        if 0 < sum(labels) < len(labels):
            at_right = [sum(labels[: at + 1]) / (at + 1) for at, label in enumerate(labels) if label]
            precisions[query] = sum(at_right) / len(at_right)
    return precisions


class Bench:
    """Graphs of a run, judged by the teacher and by the labels of the test split."""

    def __init__(self, run: Run, rows: Sequence[dict[str, Any]]) -> None:
        self.run, self.rows = run, rows
        self.judge = Judge(run.task, run.samples.held_out, model_run(run.model), padding_of(run.model.config))

    def measure(self, graph: Path) -> dict[str, Any]:
        run, labels, forward = self.run, self.run.labels, graph_run(graph)
        assert labels is not None
        summary = labels.restore(summarise(run.task, forward, batches(labels.rows)))
        precisions = average_precisions(summary[:, 1].numpy(), self.rows)
        figures = asdict(replace(self.judge.measure(forward), labels=run.task.grade(summary, labels)))
        assert abs(np.mean([*precisions.values()]) - figures["labels"]["map"]) < 1e-3  # counted here in another way
        return figures | {"precisions": [precisions[query] for query in sorted(precisions)]}


def search(run: Run, arguments: argparse.Namespace) -> tuple[Target, dict[str, Any], list[dict[str, Any]], Any]:
    """The design for a share of the time of the teacher in int8, as ``compress`` finds it."""
    run.search = replace(run.search, fractions=FRACTIONS[:2], judged=32, steps=(50, 150))
    run.space = find_space(run.sizes, run.family, run.model.config, run.search.fractions)
    costs = Costs(**run.find("costs", lambda: asdict(measure_costs(run))))
    assert costs.teacher_int8 is not None
    limits = [seconds / arguments.faster for seconds in costs.teacher_int8[:-1]]
    target = Target("half", f"{arguments.faster:g} times faster than the teacher in int8", [*limits, math.inf])
    worths = Worths(**run.find("worths", lambda: asdict(measure_worths(run))))
    candidates = run.find("candidates", lambda: find_candidates(run, costs, worths, target))
    config = prepare_training(run)
    tried, best = compare(run, target, candidates, config)
    shown = [{name: row[name] for name in ("text", "untrained", "rounds")} for row in tried]
    return target, best, shown, replace(config, learning_rate=best["learning_rate"])


def take(run: Run, arguments: argparse.Namespace) -> tuple[Target, dict[str, Any], list[dict[str, Any]], Any]:
    """A given design: kept layers, and the heads and neurons of each."""
    design = Design(*(tuple(map(int, counts.split(","))) for counts in arguments.design.split(":")))
    best = {"number": 0, "design": asdict(design), "text": design.describe(run.space)}
    return Target("given", "the design that is given", []), best, [], prepare_training(run)


def compress(run: Run, arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    run.find("teacher", lambda: run.write_graphs(run.model, "teacher") and None, "graphs/teacher.*")
    target, best, tried, config = (take if arguments.design else search)(run, arguments)
    bench = Bench(run, rows)
    teachers = {
        name: run.find(f"judged {name}", lambda path=path: bench.measure(path))  # type: ignore[misc]
        for name, path in run.teacher_graphs.items()
    }
    students = []
    for seed in range(arguments.seeds):
        name = f"student-{arguments.steps}-{seed}"

        def make(seed: int = seed, name: str = name) -> dict[str, Any]:
            shrunk, trained = _make(run, target, best["number"], best), run.folder / f"trained-{name}"
            whole = replace(config, steps=arguments.steps, seed=seed)
            folder = run.folder / f"training-{name}"
            train(run.task, shrunk.student, run.space.num_layers, whole, folder, run.tell("training"))
            save_student(shrunk.student, shrunk.report, trained)  # without the trainer's half precision
            graphs = run.write_graphs(read_made(trained).student, name)
            return {kind: bench.measure(path) for kind, path in graphs.items()}

        students.append(run.find(name, make, f"graphs/{name}.*"))
        print(f"seed {seed}: {students[-1]['int8']['labels']} {students[-1]['int8']['details']}", flush=True)
    graphs = dict(reversed(run.teacher_graphs.items()))  # others are compared with the first
    graphs |= {"student, int8": run.graphs / f"student-{arguments.steps}-0.int8.onnx"}
    return {
        "design": best["text"],
        "learning_rate": config.learning_rate,
        "tried": tried,
        "teacher": teachers,
        "students": students,
        "times": [asdict(entry) for entry in run.time(graphs, 11)],
        "busy": run.find("busy", list),
        "samples": {name: len(getattr(run.samples, name)) for name in ("train", "choices", "held_out")},
    }


def compare_paired(result: dict[str, Any]) -> dict[str, Any]:
    """MAP of each model, and what the student loses, with 95% intervals over questions of means over seeds."""
    teacher, int8 = (np.array(result["teacher"][name]["precisions"]) for name in (TEACHER, TEACHER_INT8))
    by_seed = np.array([student["int8"]["precisions"] for student in result["students"]])
    student = by_seed.mean(0)
    rows = {"teacher": teacher, "teacher_int8": int8, "student_int8": student}
    losses = {"teacher": teacher - student, "teacher_int8": int8 - student, "int8": teacher - int8}
    return {
        "map": {name: float(row.mean()) for name, row in rows.items()},
        "map_by_seed": by_seed.mean(1).tolist(),
        "loss": {name: [float(row.mean()), half_width(row)] for name, row in losses.items()},
        "questions": len(teacher),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=7000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--faster", type=float, default=2.0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--design", help="layers:heads:neurons, taken without a search")
    parser.add_argument("--candidates", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    home: Path = arguments.keep
    home.mkdir(exist_ok=True)
    started, before = time.monotonic(), os.times()
    if not (home / "teacher").exists():
        train_teacher(home / "teacher", arguments.epochs, read_pairs("train"))
    test = read_pairs("test")
    data, held_out = write(home / "data.jsonl", unlabelled(arguments.pairs)), write(home / "test.jsonl", test)
    options = CompressOptions(
        faster=(arguments.faster,),
        batch=tuple(arguments.batch),
        length=(48,),
        candidates=arguments.candidates,
        learning_rate=1e-4,
        max_length=MOST,
    )

    def tell(done: int, total: int, what: str) -> None:
        if not done:
            print(f"{time.monotonic() - started:6.0f} s  {what}", flush=True)

    with _open_run(home / "teacher", data, held_out, options, home / "run", tell) as run:
        result = compress(run, arguments, test)
    after = os.times()
    document = {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "threads": 1},
        "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
        "options": {name: value for name, value in vars(arguments).items() if name not in ("keep", "out")},
        "minutes": (time.monotonic() - started) / 60,
        "processor_minutes": (after[0] + after[1] - before[0] - before[1]) / 60,
        "paired": compare_paired(result),
        **result,
    }
    save(document, arguments.out)
    print(json.dumps(document["paired"], indent=1))
    for entry in document["times"]:
        print(entry["graph"], entry["batch"], f"{1e3 * entry['wall']['median']:.2f} ms", entry["times_faster"])


if __name__ == "__main__":
    main()
