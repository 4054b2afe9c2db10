"""What do exact targets give for a byte? KD from last states and a head, against top k and whole logits.

``gradient``: relative error (root mean square over tokens) of the gradient of forward KL by a student's logits, for
targets as they would be stored. At 512 classes teacher and states are stories260K's, and the student is the teacher
disturbed a little; at 32,000 and 151,936 the head is made: a Zipf distribution with 64 directions of a context.
``rank`` keeps the largest principal components of the states, with the head projected.

``training``: students of 2 layers on stories260K, with random initial weights: the loss of KD (forward KL to the live
teacher's whole logits) on held-out texts after ``--steps``, by seed. ``same`` compares every loss of 100 steps from
the cache with those of the live teacher. ``made`` is the same at the larger vocabularies, for a student of 2 layers
without attention that sees the context through noise and has the made head. ``as many bytes`` are whole logits of as
many tokens as fit the bytes that exact targets in float16 take of all.

Prints tables and writes ``results/exact_targets.json`` after each way. A stopped run resumes; ``--again`` forgets the
ways of its parts.

    python -m benchmarks.exact_targets [--parts gradient training made] [--made 32000 151936] [--again]
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from support.binding.stories import Stories, load_stories  # the teacher's architecture, which tests use too
from torch import Tensor

from benchmarks import STORIES, machine, result_path, save
from shd_ref.cache.codecs.codecs import to_int8
from shd_ref.cache.codecs.logits import RowCode
from shd_ref.teacher.options import LAST, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import ExactTargets, SupervisedDataset, TeacherHead, export_teacher, kd_loss, linear_kd_loss
from shd_torch.kd import kd_targets_topk

RESULT: Final = result_path(__file__)
SIZES: Final = (512, 32000, 151936)
RANKS: Final = (8, 16, 32, 48)
TOPS: Final = (8, 16, 32, 64, 128)
LENGTH, BATCH, TEXTS, HELD = 64, 8, 512, 64
TOKENS, AT_ONCE = 2048, 16  # of the made vocabularies, and of a step


class Rows(NamedTuple):
    """Tokens: the teacher's states and head, and what makes the student's logits."""

    states: Tensor
    head: TeacherHead
    student: Callable[[], Tensor]


def stories_rows(tokens: int) -> Rows:
    """The trained teacher, on the samples that it wrote."""
    teacher = load_stories(STORIES / "stories260K.bin")
    student = copy.deepcopy(teacher)
    torch.manual_seed(0)
    kept: list[Tensor] = []
    teacher.norm.register_forward_hook(lambda module, given, made: kept.append(made))
    ids = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    with torch.no_grad():
        for parameter in student.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
        teacher(ids[: math.ceil(tokens / 256)])
        logits = student(ids[: math.ceil(tokens / 256)])
    head = TeacherHead(teacher.embed.weight.detach().double())
    return Rows(kept[0].flatten(0, 1)[:tokens].double(), head, lambda: logits.flatten(0, 1)[:tokens].double())


def made_rows(size: int, tokens: int) -> Rows:
    """Zipf's law plus the influence of a context, as in ``kd_targets.py``."""
    draw = torch.Generator().manual_seed(size)
    weight = torch.randn(size, 64, generator=draw, dtype=torch.float64) * 3.4 / 8
    bias = -torch.arange(1, size + 1, dtype=torch.float64).log()
    strength = 0.3 + 1.2 * torch.rand(tokens, 1, generator=draw, dtype=torch.float64)
    context, other = torch.randn(2, tokens, 64, generator=draw, dtype=torch.float64)
    head = TeacherHead(weight, bias)
    seen = strength * (0.95 * context + math.sqrt(1 - 0.95**2) * other)
    return Rows(strength * context, head, lambda: head.logits(seen))


def stored(states: Tensor, codec: str) -> Tensor:
    """States after they were coded."""
    if codec == "int8":
        codes, steps = to_int8(states.float().numpy())
        return torch.from_numpy(codes.astype(np.float64) * steps[:, None])
    return states.to({"float16": torch.float16, "float32": torch.float32}[codec]).double()


def ways(rows: Rows) -> Iterator[tuple[str, float, Any]]:
    """Name, bytes a token, and targets."""
    states, head, _ = rows
    size, width = head.weight.shape
    for codec, cost in (("float32", 4 * width), ("float16", 2 * width), ("int8", width + 4)):
        yield f"exact {codec}", cost, ExactTargets(stored(states, codec), head)
    mean = states.mean(0)
    axes = torch.linalg.svd(states - mean, full_matrices=False).Vh
    for rank in RANKS:
        kept = (states - mean) @ axes[:rank].T
        bias = head.weight @ mean + (0.0 if head.bias is None else head.bias)
        projected = TeacherHead(head.weight @ axes[:rank].T, bias)
        for codec, cost in (("float16", 2 * rank), ("int8", rank + 4)):
            yield f"rank {rank} {codec}", cost, ExactTargets(stored(kept, codec), projected)
    logits = head.logits(states)
    yield "whole float16", 2 * size, logits.half().double()
    for top in TOPS:
        code, targets = RowCode(size, top), kd_targets_topk(logits, top)
        read = code.decode(code.encode(*(field.numpy() for field in targets[:3])))
        coded = targets._replace(log_probs=torch.from_numpy(read.log_probs), log_tail=torch.from_numpy(read.log_tail))
        yield f"top {top} with tail", code.row_bytes, coded


def gradient(targets: Any, student: Tensor) -> Tensor:
    logits = student.clone().requires_grad_()
    (made,) = torch.autograd.grad(kd_loss(targets, logits, reduction="sum", check=False), logits)
    return made


def measure_gradients(size: int, tokens: int) -> list[dict[str, Any]]:
    """Of every way, by its name, bytes and error."""
    rows = stories_rows(tokens) if size == 512 else made_rows(size, tokens)
    student = rows.student()
    exact = gradient(ExactTargets(rows.states, rows.head), student)
    results = []
    for name, cost, targets in ways(rows):
        moved = gradient(targets, student) - exact
        error = float(moved.square().sum().sqrt() / exact.square().sum().sqrt())
        results.append({"way": name, "bytes": cost, "gradient_error": error})
        print(f"{size:7d}  {name:20s} {cost:8.0f} bytes  {error:.2e}", flush=True)
    return results


def prepare(folder: Path) -> tuple[Stories, list[dict[str, Tensor]], Tensor]:
    """The teacher, the texts with caches of them in every form, and held-out texts."""
    teacher = load_stories(STORIES / "stories260K.bin").requires_grad_(False)
    tokens = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy")[:, :LENGTH].astype(np.int64))
    train = tokens[:TEXTS]
    graph = folder / "teacher.onnx"
    export_teacher(teacher, {"input_ids": train[:2]}, graph)
    options = {
        f"exact {codec}": {"hidden": (LAST,), "hidden_codec": codec} for codec in ("float32", "float16", "int8")
    }
    options |= {f"top {top}": {"logits": "topk", "logits_top": top} for top in (32, 60)}
    options |= {"whole float16": {"logits": "float16"}}
    for name, asked in options.items():
        made: Any = PrecomputeOptions(form="none", **asked)
        precompute(graph, {"input_ids": train.numpy()}, folder / name, made, RunOptions(num_threads=2))
    return teacher, [{"input_ids": ids} for ids in train], tokens[TEXTS : TEXTS + HELD]


def train(
    targets_of: Callable[[Tensor], Any], texts: list[dict[str, Tensor]], seed: int, steps: int
) -> tuple[Stories, list[float]]:
    """A student after some steps of KD, and the loss of each."""
    torch.manual_seed(seed)
    student = Stories(width=32, hidden=96, num_layers=2, num_heads=4, num_kv_heads=2, vocabulary=512, length=LENGTH)
    torch.nn.init.normal_(student.embed.weight, std=0.05)
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randperm(len(texts), generator=order)[:BATCH]
        ids = torch.stack([texts[number]["input_ids"] for number in chosen.tolist()])
        loss = kd_loss(targets_of(chosen), student(ids), check=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return student, losses


def reader_of(folder: Path, texts: list[dict[str, Tensor]]) -> tuple[Callable[[Tensor], Any], int]:
    """What makes a batch's targets from a cache, and bytes a token."""
    joined = SupervisedDataset(texts, folder, preload=True)
    form = joined.cache.manifest.exact
    head = None if form is None else TeacherHead.read(joined.cache)

    def read(chosen: Tensor) -> Any:
        _, batch = joined.collate([joined[number] for number in chosen.tolist()])
        return batch.targets() if head is None else ExactTargets(batch.last_states(), head)

    rows: Any = form or joined.logits
    return read, rows.row_sizes[0]


def measure_made(size: int, steps: int, seeds: int, done: Collection[str]) -> Iterator[dict[str, Any]]:
    """The loss after training from each form at a made vocabulary, but of those that are done."""
    draw = torch.Generator().manual_seed(size)
    rows = made_rows(size, TOKENS + HELD)
    states, head = rows.states.float(), TeacherHead(rows.head.weight.float(), rows.head.bias.float())
    seen = 0.95 * states + math.sqrt(1 - 0.95**2) * torch.randn(states.shape, generator=draw)
    whole = max(1, TOKENS * 2 * states.shape[1] // (2 * size))
    top = max(k for k in range(1, 129) if RowCode(size, k).row_bytes <= 2 * states.shape[1])

    def kept(k: int) -> Callable[[Tensor], Any]:
        return lambda chosen: kd_targets_topk(head.logits(states[chosen]), k, check=False)

    ways_made: dict[str, tuple[float, int, Callable[[Tensor], Any]]] = {
        "exact float16": (2 * 64, TOKENS, lambda chosen: ExactTargets(states[chosen].half().float(), head)),
        "top 32": (RowCode(size, 32).row_bytes, TOKENS, kept(32)),
        f"top {top}": (RowCode(size, top).row_bytes, TOKENS, kept(top)),
        "whole float16": (2 * size, TOKENS, lambda chosen: head.logits(states[chosen]).half()),
        "whole float16, as many bytes": (2 * size, whole, lambda chosen: head.logits(states[chosen]).half()),
    }
    for way, (cost, tokens, targets_of) in ways_made.items():
        if way in done:
            continue
        losses = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            body = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
            optimizer, order = torch.optim.AdamW(body.parameters(), 3e-3), torch.Generator().manual_seed(seed)
            for _ in range(steps):
                chosen = torch.randint(tokens, (AT_ONCE,), generator=order)
                loss = linear_kd_loss(targets_of(chosen), body(seen[chosen]), head.weight, head.bias, check=False)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                taught = ExactTargets(states[TOKENS:], head)
                losses.append(float(linear_kd_loss(taught, body(seen[TOKENS:]), head.weight, head.bias)))
        yield {"way": way, "bytes": cost, "tokens": tokens, "losses": losses, "mean": statistics.mean(losses)}


def measure_training(steps: int, seeds: int, done: Collection[str]) -> Iterator[dict[str, Any]]:
    """The loss after training from each form, and how far losses of 100 steps are from a live teacher's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher, texts, held = prepare(folder)
        all_ids = torch.stack([text["input_ids"] for text in texts])
        with torch.no_grad():
            taught = teacher(held)

        def live(chosen: Tensor) -> Any:
            with torch.no_grad():
                return teacher(all_ids[chosen])

        readers = {"live": (live, 0)}
        readers |= {path.name: reader_of(path, texts) for path in sorted(folder.iterdir()) if path.is_dir()}
        readers |= {"whole float16, as many bytes": readers["whole float16"]}
        expected: list[float] = []
        for way, (read, cost) in readers.items():
            if way in done:
                continue
            share = texts[: TEXTS * 2 * 64 // cost] if way.endswith("as many bytes") else texts
            losses = []
            for seed in range(seeds):
                student = train(read, share, seed, steps)[0]
                with torch.no_grad():
                    losses.append(float(kd_loss(taught, student(held))))
            row = {"way": way, "bytes": cost, "tokens": LENGTH * len(share), "losses": losses}
            if way.startswith("exact"):
                expected = expected or train(live, texts, 0, 100)[1]
                curve = train(read, texts, 0, 100)[1]
                row["off the live teacher"] = max(abs(a - b) for a, b in zip(curve, expected, strict=True))
            yield row | {"mean": statistics.mean(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--parts", nargs="+", default=["gradient", "training", "made"], help="others stay as they are"
    )
    parser.add_argument("--made", type=int, nargs="+", default=SIZES[1:], help="vocabularies to train at")
    parser.add_argument("--again", action="store_true", help="run what is there again")
    arguments = vars(parser.parse_args())
    parts, sizes, threads, again = (arguments.pop(name) for name in ("parts", "made", "threads", "again"))
    torch.set_num_threads(threads)
    report: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    if arguments != {name: report.get(name) for name in arguments}:
        report = arguments
    report["machine"] = machine(threads)

    def write(section: str, rows: list[dict[str, Any]], size: int) -> None:
        report.setdefault(section, {})[str(size)] = rows
        save(report, RESULT)

    if "gradient" in parts:
        for size in SIZES:
            write("gradient", measure_gradients(size, arguments["tokens"]), size)
    measures: dict[int, Callable[..., Iterator[dict[str, Any]]]] = {}
    if "training" in parts:
        measures[SIZES[0]] = measure_training
    if "made" in parts:
        measures |= {size: functools.partial(measure_made, size) for size in sizes}
    for size, measure in measures.items():
        rows = [] if again else report.get("training", {}).get(str(size), [])
        for row in measure(arguments["steps"], arguments["seeds"], {row["way"] for row in rows}):
            print(f"{size:7d}  {row['way']:28s} {row['bytes']:6d} bytes  {row['mean']:.4f}", row, flush=True)
            rows.append(row)
            write("training", rows, size)


if __name__ == "__main__":
    main()
