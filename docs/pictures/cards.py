"""Draws the pictures that lead pages, from results of the benchmarks where they show figures.

PYTHONPATH=. python docs/pictures/cards.py [NAME ...]
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from benchmarks.card import Card
from benchmarks.figures import load, n, steps

HERE = OUT = Path(__file__).parent


def front() -> None:
    """How fast MiniLM, its int8 and its students are, and how good: the picture of the README."""
    document = load("compress_minilm.json")
    models, wishes = document["models"], [student["wish"] for student in document["compress"]["students"]]
    rows = [
        ("teacher", "float", "grey", models["float, fused"]),
        ("teacher, int8", "compress", "grey", models["ours"]),
        ("teacher, int8", "OpenVINO", "grey", models["OpenVINO, NNCF"]),
        *(("student, int8", f"--faster {wish.split()[0]}", "green", models[f"student, {wish}"]) for wish in wishes),
    ]
    card = Card("Students of MiniLM are faster than its int8, and agree as well with human scores")
    card.text(24, 38, "all-MiniLM-L6-v2 on one CPU thread", "head")
    card.text(142, 66, "times faster")
    card.text(142, 86, "batch 1, below 32", "soft")
    card.text(392, 66, "human", anchor="end")
    card.text(392, 86, "scores", "soft", "end")
    card.text(464, 66, "top 10", anchor="end")
    card.text(464, 86, "kept", "soft", "end")
    for number, (name, detail, color, model) in enumerate(rows):
        y = 104 + 56 * number
        card.text(24, y + 16, name)
        card.text(24, y + 37, detail, "soft")
        for batch, top, height, kind in (("1", 0, 22, ""), ("32", 25, 12, "soft")):
            faster = model["times_faster"][batch]
            card.bar(142, y + top, 16 * faster, color, height)
            card.text(148 + 16 * faster, y + top + height - 4 + 2 * (batch == "32"), n(faster, 1), kind)
        card.text(392, y + 17, n(fmean(model["sts"].values()), 3), "", "end")
        index = fmean(part["index"] for part in model["quality"].values())
        card.text(464, y + 17, f"{n(100 * index)}%", "", "end")
    y = 116 + 56 * len(rows)
    note = "Human scores: mean rank correlation, STS 2012-14 and 2016. "
    note += "Top 10: share of the teacher's nearest ten that the student finds."
    y = card.lines(24, y + 8, note, 56, "soft", 20)
    card.save(OUT / "front.svg", y)


def flow() -> None:
    """From teacher to student, and who reads what."""
    card = Card("From teacher to student: export, inspect, precompute, train; the student starts from merged weights")
    left, right, wide, high, pitch = 20, 258, 190, 84, 112
    boxes = [
        (
            ("blue", "your teacher", "12 heads,", "any framework"),
            ("green", "student", "4 heads, starts from", "merged weights"),
        ),
        (
            ("blue", "teacher.onnx", "shd-torch export,", "or any exporter"),
            ("", "inspect, plan", "what can merge,", "and its cost"),
        ),
        (
            ("orange", "shd precompute", "runs once, merges", "maps in the graph"),
            ("", "your data", "inputs, and labels", "if you have them"),
        ),
        (
            ("orange", "cache/", "one byte per entry,", "found by hash"),
            ("green", "training", "base loss + β KL,", "no teacher needed"),
        ),
    ]
    for row, pair in enumerate(boxes):
        y = 20 + pitch * row
        for x, (color, head, *words) in zip((left, right), pair, strict=True):
            card.box(x, y, wide, high, f"box {color}".strip(), 8)
            card.text(x + wide / 2, y + 28, head, "strong", "middle")
            for line, word in enumerate(words):
                card.text(x + wide / 2, y + 50 + 21 * line, word, "", "middle")
        ends = ((left + wide, y + high / 2), (right, y + high / 2))
        card.line(*(ends if row != 2 else ends[::-1]), tip=True)
        if row < 3:
            card.line((left + wide / 2, y + high), (left + wide / 2, y + pitch), tip=True)
    x, y = right + wide, 20 + high / 2
    card.line((x, y), (x + 18, y), (x + 18, y + 3 * pitch), (x, y + 3 * pitch), tip=True)
    card.save(OUT / "flow.svg", 20 + 3 * pitch + high + 20)


def choose() -> None:
    """Five questions and what follows from each."""
    length = "Are samples longer than 2 x the teacher's width / the student's heads (causal: 4 x)?"
    questions = [
        ("Is text generated in training, or are crops or masks redrawn?", "a live teacher", "a cache"),
        (length, "--form factored", "maps, sqrt8-row"),
        ("Does the teacher predict tens of thousands of classes?", "--hidden last", "--logits topk"),
        ("Has the student its teacher's architecture?", "shd-torch shrink", "random weights"),
        ("Does it start from random weights?", "beta: 3% of the gradient", "1%, or no SHD"),
    ]
    card = Card("Five questions that decide teacher, form, targets, start and beta")
    y = 20.0
    for question, yes, no in questions:
        lines = textwrap.wrap(question, 48)
        card.box(20, y, 440, 21 * len(lines) + 14, "box", 8)
        y = card.lines(36, y + 22, question, 48)
        for x, word, answer, color in ((24, "yes", yes, "green"), (252, "no", no, "blue")):
            card.line((x + 14, y - 8), (x + 14, y + 14), tip=True)
            card.text(x + 24, y + 11, word, "soft")
            card.text(x + 8, y + 36, answer, f"strong {color}")
        y += 54
    card.save(OUT / "choose.svg", y)


def doctor() -> None:
    """The answers on pairs of the study: where the measured gain lies, in widths of its interval."""
    rows = load("study/doctor.csv")
    card = Card("The doctor's answers on 25 pairs of the study, by the gain that was measured")
    card.text(24, 38, f"{len(rows)} answers, and the gain measured after", "head")
    color = {"hit": "green", "open": "grey", "miss": "orange"}
    x = 24.0
    for word, kind in color.items():
        count = sum(row["answer: hit"] == word for row in rows)
        card.dot(x + 6, 64, kind)
        card.text(x + 18, 70, f"{count} {'misses' if word == 'miss' else word}")
        x += 100
    left, right, low, high = 36, 456, -2.0, 5.0

    def place(value: float) -> float:
        return left + (right - left) * (min(max(value, low), high) - low) / (high - low)

    y = 92.0
    for answer in ("yes", "probably not"):
        own = [row for row in rows if row["answer"] == answer]
        stacks: dict[int, int] = {}
        dots = []
        for row in own:
            gain, half = (float(number) for number in re.findall(r"[+-]?[\d.]+", row["gain by SHD"])[:2])
            slot = round((place(gain / half) - left) / 13)
            stacks[slot] = stacks.get(slot, 0) + 1
            dots.append((left + 13 * slot, stacks[slot], color[row["answer: hit"]]))
        height = 13 * max(stacks.values()) + 34
        card.text(24, y + 20, f"{answer} ({len(own)})", "strong")
        for edge in (-1, 1):
            card.line((place(edge), y + 26), (place(edge), y + height), kind="axis")
        card.line((left, y + height), (right, y + height), kind="axis")
        for x, level, kind in dots:
            card.dot(x, y + height + 5 - 13 * level, kind)
        y += height + 14
    for x, words in ((place(-1.5), "harms"), (place(0), "interval has 0"), (place(3), "helps")):
        card.text(x, y + 8, words, "soft", "middle")
    card.text(24, y + 36, "gain over half of its 95% interval, unadjusted", "soft")
    card.save(OUT / "doctor.svg", y + 54)


def results() -> None:
    """What a cache, a step and its memory cost, as ratios to the plain way."""
    card = Card("Time and memory of precompute and of a training step, over the plain way")
    ways = load("precompute_overhead.json")["figures"]
    pre = ways["precompute 12 -> 6"], ways["precompute 12 -> 4"], ways["eager, all maps in float16"]
    names = (
        ("shd precompute, 12 to 6", "green"),
        ("shd precompute, 12 to 4", "green"),
        ("eager, all maps saved", "grey"),
    )
    named = list(zip(names, pre, strict=True))
    y = card.bars(
        14,
        "Fill a cache: time over plain passes",
        [(name, way["ratio"], n(way["ratio"], 2), color) for (name, color), way in named],
    )
    y = card.bars(
        y,
        "The same: MB written",
        [(name, way["megabytes"], n(way["megabytes"]), color) for (name, color), way in named],
    )
    cpu = load("attention_kl_cpu.json")
    long, memory = cpu["time"]["2048"], cpu["memory_megabytes"]
    steps = (
        ("without SHD", "without SHD", "grey"),
        ("SHD, cached maps", "cache, dense", "green"),
        ("SHD, queries and keys", "queries and keys, dense", "green"),
        ("both maps, compiled", "compiled", "grey"),
        ("both maps, eager", "eager", "grey"),
    )
    y = card.bars(
        y,
        "Train, 2,048 tokens: time of a step",
        [(name, long[way]["ratio"], n(long[way]["ratio"], 1), color) for name, way, color in steps],
    )
    kinds = (
        ("dense (default on a CPU)", "dense", "green"),
        ("sdpa", "sdpa", "green"),
        ("both maps, eager", "eager", "grey"),
    )
    y = card.bars(
        y,
        "The loss at 4,096 tokens: MB",
        [(name, memory[kind]["4096"], n(memory[kind]["4096"]), color) for name, kind, color in kinds],
    )
    card.save(OUT / "results.svg", y)


def backends() -> None:
    """Memory of one layer's loss by length, and time of a step, by backend."""
    cpu = load("attention_kl_cpu.json")
    card = Card("Memory of the loss by length and time of a training step, by backend, on a CPU")
    card.text(24, 38, "One layer's loss on a CPU: MB by length", "head")
    eager = f"both maps, eager ({n(cpu['memory_megabytes']['eager']['4096'])} at 4,096)"
    names = (("dense", "dense", "green"), ("sdpa", "sdpa", "orange"), ("eager", eager, "grey"))
    curves = []
    for kind, _, color in names:
        points = [(int(length), size) for length, size in cpu["memory_megabytes"][kind].items() if size <= 160]
        curves.append((points, color))
    y = card.chart(58, curves, (1024, 2048, 4096, 8192), (0, 40, 80, 120, 160), is_log=False)
    y = card.legend(y + 22, [(name, color) for _, name, color in names])
    for length in ("512", "2048"):
        times = cpu["time"][length]
        rows = (
            ("dense, cached maps", "cache, dense", "green"),
            ("sdpa, cached maps", "cache, sdpa", "orange"),
            ("dense, queries, keys", "queries and keys, dense", "green"),
            ("sdpa, queries, keys", "queries and keys, sdpa", "orange"),
            ("both maps, eager", "eager", "grey"),
        )
        ratios = [(name, times[way]["ratio"], n(times[way]["ratio"], 1), color) for name, way, color in rows]
        y = card.bars(y, f"Step over one without SHD, {int(length):,} tokens", ratios)
    card.save(OUT / "backends.svg", y)


def lasting() -> None:
    """How long a start from the teacher stays ahead."""
    marks = (50, 150, 300, 600, 1000, 2000, 3000)
    card = Card("A student that starts from its teacher stays ahead of random weights for 3,000 steps")
    card.text(24, 38, "Test loss, nats per token, by training step", "head")
    names = {"random": ("random weights, KD", "grey"), "squeezed": ("from the teacher, KD", "green")}
    curves, legend = [], []
    for start, (name, color) in names.items():
        for with_shd in (False, True):
            kind = f"{color} dashed" if with_shd else color
            curves.append(([(mark, float(steps(start, with_shd, mark).mean())) for mark in marks], kind))
            legend.append((name + " + SHD" * with_shd, kind))
    y = card.chart(58, curves, (50, 150, 300, 1000, 3000), (1.5, 2.0, 2.5, 3.0, 3.5, 4.0), is_log=False)
    y = card.legend(y + 22, legend)
    note = "Stories, 8 heads and 5 layers to 4 and 3; the teacher has 1.494; means of three seeds."
    card.save(OUT / "lasting.svg", card.lines(24, y + 4, note, 54, "soft", 20))


def teacher_length() -> None:
    """Memory and time of a teacher's pass by length."""
    runs = load("teacher_length.json")["runs"]
    card = Card("Memory and time of shd precompute by length, in tiles and with whole maps, and of PyTorch")
    names = (
        ("factored", "precompute, queries and keys", "green"),
        ("factored, whole maps", "the same with whole maps (--tile 0)", "green dashed"),
        ("maps", "precompute, merged maps", "orange"),
        ("PyTorch fused", "PyTorch, fused attention: no maps", "blue"),
        ("PyTorch maps", "PyTorch, output_attentions", "blue dashed"),
    )
    y, lengths = 20.0, (1024, 2048, 4096, 8192, 16384)
    parts = (
        ("gigabytes", "Peak memory, GB, by tokens of a sample", (0.25, 0.5, 1, 2, 4, 8)),
        ("seconds", "Processor seconds of one more sample", (0.01, 0.1, 1, 10)),
    )
    for part, head, ticks in parts:
        card.text(24, y + 18, head, "head")
        curves = []
        for way, _, color in names:
            points = [(int(length), row[part]) for length, row in runs[way].items() if row.get(part)]
            curves.append((sorted(points), color))
        y = card.chart(y + 38, curves, lengths, ticks) + 14
    card.save(OUT / "teacher_length.svg", card.legend(y + 6, [(name, color) for _, name, color in names]) + 6)


def indexer_kept() -> None:
    """What a model loses that reads 16 of up to 128 keys, and which share of attention the scorers keep."""
    result = load("stories_indexer.json")
    card = Card("A model that reads the keys of trained scorers loses little, and they keep most of its attention")
    rows = (("trained scorers", "trained", "green"), ("the last 16 keys", "recency", "grey"))
    rows += (("untrained scorers", "random scorers", "orange"),)
    lost = [(name, result[key]["lost"], n(result[key]["lost"], 3), color) for name, key, color in rows]
    y = card.bars(14, "16 of 128 keys read: nats per token lost", lost)
    kept = {layer: spans[-1] for layer, spans in result["kept"].items()}
    shares = [
        (f"layer {layer}", mean, f"{n(mean, 2)} (best 16: {n(best, 2)})", "green")
        for layer, (_, _, mean, best, *_) in kept.items()
    ]
    first, last = next(iter(kept.values()))[:2]
    y = card.bars(y, f"Attention kept at positions {first} to {last}", shares, 100, 100)
    card.save(OUT / "indexer_kept.svg", y)


def demo() -> None:
    """Accuracy of the demo's students by labels, from its own results."""
    rows = load("../../docs/demo/results.json")["accuracy"]
    card = Card("Test accuracy of logistic regression and of students of the demo, with 50 and 300 labels")
    y = 14.0
    for labels in (50, 300):
        bars = []
        for row in (row for row in rows if row["labels"] == labels):
            start, _, losses = row["name"].partition(": ")
            color = "green" if start.startswith("squeezed") else "blue" if losses else "grey"
            name = f"{start.split()[0]}: {losses}" if losses else "logistic regression"
            label = f"{n(100 * row['mean'], 1)} ± {n(100 * row['interval'], 1)}"
            bars.append((name.replace(" + ", "+"), row["mean"], label, color))
        y = card.bars(y, f"{labels} labels: test accuracy, %", bars, 214, 146)
    card.save(OUT / "demo.svg", y)


def grouped() -> None:
    """Loss of starts with fewer key and value heads, before any training."""
    result = load("grouped_queries.json")
    starts = result["starts"]
    card = Card("Loss before training with fewer key and value heads, by start")
    names = (("shrink", "shrink", "green"), ("shrink --no-align", "shrink, closed form", "green"))
    names += (("first head, aligned", "first, aligned", "grey"), ("mean, aligned", "mean, aligned", "grey"))
    names += (("first head", "first", "grey"), ("mean", "mean", "grey"))
    y = 14.0
    for heads in (2, 1):
        losses = [(name, starts[f"{key} kv_heads={heads}"], color) for name, key, color in names]
        bars = [(name, loss, n(loss, 3), color) for name, loss, color in losses]
        y = card.bars(y, f"4 to {heads} key/value heads: nats per token", bars)
    card.text(24, y + 6, f"The teacher has {n(result['teacher'], 3)}.", "soft")
    card.save(OUT / "grouped.svg", y + 24)


def claims() -> None:
    """A square for each claim of the page, by its verdict."""
    text = (HERE.parent / "claims.md").read_text(encoding="utf-8")
    verdicts = re.findall(r"^\| \d+ \|.*?\| \*\*(yes|otherwise|no)\*\*", text, re.MULTILINE)
    card = Card("The claims of the papers by verdict: yes, otherwise, not tried")
    y, place = 20.0, 0
    for verdict, words, color in (
        ("yes", "yes: offered, or it holds here", "green"),
        ("otherwise", "otherwise: measured or proved", "orange"),
        ("no", "no: not tried", "grey"),
    ):
        count = verdicts.count(verdict)
        for number in range(place, place + count):
            card.bar(24 + 25.5 * (number % 17), 20 + 26 * (number // 17), 20, color, 20)
        place += count
        y = 20 + 26 * (len(verdicts) // 17 + 1) + 24 * ("yes", "otherwise", "no").index(verdict)
        card.bar(24, y + 4, 16, color, 16)
        card.text(50, y + 18, f"{count} {words}")
    card.save(OUT / "claims.svg", y + 38)


def masks() -> None:
    """Masks of a seed: the teacher and the student see the same tokens."""
    card = Card("One text and seed give the same masked tokens to teacher and student; their hash finds the record")
    card.box(20, 20, 440, 56, "box", 8)
    card.text(240, 44, "text 17, seed 3", "strong", "middle")
    card.text(240, 66, "the cat sat on the mat", "soft", "middle")
    for x, color, head, model, words in (
        (20, "orange", "precompute", "teacher", "stores the record"),
        (244, "green", "training", "student", "reads the record"),
    ):
        middle = x + 108
        card.line((middle, 76), (middle, 106), tip=True)
        card.box(x, 108, 216, 82, f"box {color}", 8)
        card.text(middle, 132, head, "strong", "middle")
        card.text(middle, 156, "mask_tokens(17, 3)", "code", "middle")
        card.text(middle, 180, "the [MASK] sat on …", "soft", "middle")
        card.line((middle, 190), (middle, 220), tip=True)
        card.box(x, 222, 216, 56, f"box {color}", 8)
        card.text(middle, 246, model, "strong", "middle")
        card.text(middle, 268, words, "soft", "middle")
        ends = ((middle, 278), (middle, 308))
        card.line(*(ends if model == "teacher" else ends[::-1]), tip=True)
    card.box(20, 310, 440, 56, "box", 8)
    card.text(240, 334, "cache, by the hash of the masked tokens", "strong", "middle")
    card.text(240, 356, "another mask is an error", "soft", "middle")
    card.save(OUT / "masks.svg", 386)


def recipes() -> None:
    """Where each recipe compares student and teacher."""
    card = Card("Where recipes compare student and teacher: outputs, features, and attention maps with SHD")
    logits = "language_kd, babyllama, gkd, minillm_policy, image_kd, nkd, deit_soft, deit_hard, vkd; diffusion: noise"
    levels = [
        ("outputs", "green", "logits", "logits", logits),
        ("features", "blue", "features", "features", "ViTKD: three layers; vkd: the last"),
        (
            "attention, with each of them",
            "orange",
            "4 maps",
            "12 maps",
            "SHD: maps merged into as many as the student's",
        ),
    ]
    y = 52.0
    card.text(66, 36, "student", "strong", "middle")
    card.text(414, 36, "teacher", "strong", "middle")
    for name, color, small, large, words in levels:
        lines = textwrap.wrap(words, 30)
        height = 46 + 20 * len(lines)
        for x, word in ((20, small), (368, large)):
            card.box(x, y, 92, height, f"box {color}", 8)
            card.text(x + 46, y + height / 2 + 6, word, "", "middle")
        card.text(240, y + 26, name, f"strong {color}", "middle")
        card.line((366, y + 36), (114, y + 36), tip=True)
        for line, word in enumerate(lines):
            card.text(240, y + 58 + 20 * line, word, "soft", "middle")
        y += height + 12
    card.save(OUT / "recipes.svg", y + 6)


def clusters() -> None:
    """Who writes a cache, and who reads it."""
    card = Card("Any number of processes write shards of one cache; training processes read it")
    for number, words in enumerate(("--shards 0/3", "--shards 1/3", "--shards 2/3")):
        x = 20 + 150 * number
        card.box(x, 20, 140, 78, "box blue", 8)
        card.text(x + 70, 48, "precompute", "strong", "middle")
        card.text(x + 70, 74, words, "code", "middle")
        card.line((x + 70, 98), (x + 70, 130), tip=True)
    card.box(20, 132, 440, 164, "box orange", 8)
    card.text(36, 160, "cache/ or s3://bucket/cache", "strong")
    for number, state in enumerate(("shard, receipt", "shard, receipt", "no receipt")):
        x = 36 + 138 * number
        card.box(x, 176, 132, 40, "card", 6)
        card.text(x + 66, 201, state, "orange" if state.startswith("no") else "", "middle")
    card.text(36, 244, "A shard counts once its receipt is there: the same", "soft")
    card.text(36, 264, "command resumes. The last to finish seals the", "soft")
    card.text(36, 284, "manifest.", "soft")
    for x, name, words in ((20, "shd verify", "reads every byte"), (244, "training", "finds samples by hash")):
        card.line((x + 108, 296), (x + 108, 328), tip=True)
        card.box(x, 330, 216, 66, "box green", 8)
        card.text(x + 108, 356, name, "strong", "middle")
        card.text(x + 108, 380, words, "soft", "middle")
    card.save(OUT / "clusters.svg", 416)


DRAW: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (front, flow, choose, doctor, results, backends, lasting, teacher_length)
}
DRAW |= {function.__name__: function for function in (indexer_kept, masks, demo, grouped, claims, recipes, clusters)}

if __name__ == "__main__":
    for name in sys.argv[1:] or DRAW:
        DRAW[name]()
