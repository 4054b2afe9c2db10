"""``python -m benchmarks.study [TASK ...]``: run what is missing, then write the table and the pictures.

Every run is a line of ``runs.jsonl`` as soon as it ends; started again, the study goes on where it stopped. Figures
of a machine's time are processor seconds of this process, one thread unless ``--threads`` says otherwise.
"""

from __future__ import annotations

import argparse
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import HERE, RESULTS
from benchmarks.study.analysis import compare_all, name_method, print_tables, stale_runs, write_table
from benchmarks.study.arms import ALONE, PRESETS, Arm, read_grid
from benchmarks.study.digits import UnavailableError
from benchmarks.study.origin import hash_code, name_processor
from benchmarks.study.pictures import draw_all
from benchmarks.study.runs import Record, run_missing
from benchmarks.study.tasks import TASKS, Task, load_task

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def read_duration(text: str) -> float:
    """Seconds of ``90s``, ``20m``, ``3h`` or ``1.5h``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a budget must be a number with s, m or h, such as 3h; got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def name_machine(device: str) -> str:
    """The processor or the GPU, and what ran on it."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; default all")
    parser.add_argument("--parts", nargs="+", help="only these parts of the grids")
    parser.add_argument(
        "--stale", action="store_true", help="run again what did not start from its base loss's weights; others wait"
    )
    parser.add_argument("--budget", type=read_duration, help="start no run after so long, such as 3h")
    parser.add_argument("--preset", choices=PRESETS, help="quick: tiny sizes; gpu: larger ones, for one GPU")
    parser.add_argument(
        "--quick", dest="preset", action="store_const", const="quick", help="the same as --preset quick"
    )
    parser.add_argument("--device", help="cuda or cpu; default cuda for --preset gpu, else cpu")
    parser.add_argument("--out", type=Path, help="folder of runs.jsonl and tables; default benchmarks/results/study")
    parser.add_argument("--work", type=Path, default=Path("build/study"), help="folder of data and teachers")
    parser.add_argument(
        "--pictures", type=Path, help="folder of pictures; default docs/study, or --out with a preset"
    )
    parser.add_argument("--maps", action="store_true", help="train two students of digits again and draw their maps")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.tasks) - set(TASKS))
    if unknown:
        parser.error(f"tasks are {', '.join(TASKS)}; got {', '.join(unknown)}")
    torch.set_num_threads(given.threads)
    device = given.device or ("cuda" if given.preset == "gpu" else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no GPU is here: with --device cpu the preset runs on the processor, for many hours")
    out = given.out or RESULTS / "study" / (given.preset or "")
    console = Console()
    record = Record(out / "runs.jsonl")
    pictures = given.pictures or (out if given.preset else HERE.parent / "docs" / "study")
    end = None if given.budget is None else time.monotonic() + given.budget
    for name in given.tasks or TASKS:
        grid = read_grid(name, given.preset)
        runs = stale_runs(grid, record) if given.stale else grid.runs(given.parts)
        stale = {arm.key(seed): record.found.pop(arm.key(seed)) for arm, seed in runs} if given.stale else {}
        for arm, seed in runs if given.stale else ():
            console.print(f"{name}: stale: {arm.part}, {name_method(arm)}, {arm.options['start']} start, seed {seed}")
        made: dict[str, Task] = {}

        def train(arm: Arm, seed: int, made: dict[str, Task] = made) -> dict[str, object]:
            own = arm.settings | ({"draw": seed} if arm.settings.get("draws") else {})
            settings = str(own)
            if settings not in made:
                made.clear()  # one teacher at a time
                made[settings] = load_task(arm.task)(given.work / arm.task, own, device)
            result = made[settings].train(arm, seed)
            fields = ("code",) if arm.method == ALONE else ("code", "rival_code")
            code = {name: hash_code(name, arm.task) for name in fields}
            return {**result, **code, "processor": name_processor(device), "machine": name_machine(device)}

        before = len(record.found)
        try:
            missing = run_missing(record, runs, train, console=console, end=end)
        except UnavailableError as error:
            console.print(f"{name}: not run. {error}", soft_wrap=True)
            continue
        finally:
            record.found = stale | record.found  # what was not run again stays in the tables
        console.print(f"{name}: {len(record.found) - before} runs made, {len(missing)} of {len(runs)} missing")
        for part in dict.fromkeys(arm.part for arm, _ in missing):
            lacking = [f"{arm.method} (seed {seed})" for arm, seed in missing if arm.part == part]
            console.print(f"  missing of {part}: {', '.join(lacking)}", soft_wrap=True)
        rows = compare_all(TASKS, record, given.preset)[name]
        if rows:
            print_tables(rows, grid, console)
            write_table(rows, out / f"{name}.csv")
            draw_all(rows, grid, record, pictures)
        if given.maps and name == "images":
            arms = {arm.method: arm for arm in reversed(grid.arms) if arm.part == "beta"}
            task: Any = load_task(name)(given.work / name, grid.arms[0].settings, device)
            task.draw_maps(
                {"student, KD": arms["base"], "student, KD + SHD": arms["shd"]}, pictures / "images-maps.png"
            )


if __name__ == "__main__":
    main()
