"""Language-model pretraining: stories260K or a small Llama trained here on text, students of half the heads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError
from benchmarks.study.keeping import keep_trained, kept_place
from benchmarks.study.memory import Remembered
from benchmarks.study.rivals import Rival, make_rival
from benchmarks.study.starts import start_student
from benchmarks.study.training import Course, train
from shd_torch.recipes import SHD, Terms, babyllama, language_kd

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "data"
Forward = Callable[[Mapping[str, Tensor]], Any]
MARKS = (0, 50, 150, 300, 600, 1000, 2000, 3000)


class Language:
    """See the module; what is trained here is kept in the folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        self.settings, self.folder, self.device = settings, folder, device
        windows, valid, test, teacher = self._load(settings["corpus"])
        count = settings["windows"]
        self.windows, self.other_windows = windows[:count].to(device), windows[count:].to(device)
        self.valid, self.test = valid.to(device), test.to(device)
        self.teachers = [teacher.to(device).eval().requires_grad_(False)]
        self.teacher_loss = _measure(lambda inputs: teacher(**inputs), self.test)
        self._logits: list[Tensor] = []
        self._kept: tuple[str, Any] = ("", None)

    def _load(self, corpus: str) -> tuple[Tensor, Tensor, Tensor, Any]:
        """All windows ``(N, L)`` to train on, those to choose by and to judge by, and the teacher."""
        settings, length = self.settings, self.settings["length"]
        source = SHARED / ("stories260K" if corpus == "stories" else "wikitext2")
        if not source.is_dir():
            raise UnavailableError(f"{source} holds the corpus, and is not there")
        if corpus == "stories":
            sys.path.append(str(ROOT / "tests"))
            from support.shrink.stories import load_llama  # the teacher's conversion, which tests use too

            tokens = np.load(source / "self_sampled_1024x256_uint16.npy").astype(np.int64)
            windows = torch.from_numpy(tokens[:-128]).reshape(-1, length)
            judged = torch.from_numpy(tokens[-128:]).reshape(-1, length)
            valid, test = judged.split(len(judged) // 2)
            valid, test = (each[: settings["judged"]] for each in (valid, test))
            return windows, valid, test, load_llama(source / "stories260K.bin")
        text = [np.frombuffer((source / f"{name}.txt").read_bytes(), dtype=np.uint8) for name in ("valid", "test")]
        rows = [
            torch.from_numpy(part[: len(part) // length * length].astype(np.int64)).reshape(-1, length)
            for part in text
        ]
        teacher = self._train_teacher(rows[0].to(self.device))
        step, judged = len(rows[1]) // 512, settings["judged"]
        return rows[0], rows[1][::step][:judged], rows[1][1::step][:judged], teacher

    def _train_teacher(self, windows: Tensor) -> Any:
        """A Llama over bytes, half the layers deeper than its students."""
        from transformers import LlamaConfig, LlamaForCausalLM

        given = self.settings["teacher"]
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=given["width"],
            intermediate_size=2 * given["width"],
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        return keep_trained(
            kept_place(self.folder, "language-teacher", self.settings, "corpus", "length", "teacher"),
            LlamaForCausalLM(config).to(self.device),
            lambda model, index: _cross_entropy(model(input_ids=windows[index]).logits, windows[index]),
            size=len(windows),
            steps=given["steps"],
            rate=3e-3,
            batch=16,
        )

    def _second_teacher(self) -> Any:
        """The teacher without its third layer, squeezed in closed form and trained on for 100 steps."""
        first = self.teachers[0]
        made = start_student("squeezed", first, {"input_ids": self.windows[:64]}, lambda: None, layers=[0, 1, 3, 4])
        optimizer = torch.optim.AdamW(made.parameters(), 1e-3)
        for step in range(self.settings["second_teacher_steps"]):
            ids = self.windows[torch.arange(8) * 7 + 56 * step % (len(self.windows) - 64)]
            loss = _cross_entropy(made.train()(input_ids=ids).logits, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return made.eval().requires_grad_(False)

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """One student; a seed draws its random weights and the order of windows."""
        options, settings = arm.options, self.settings
        result = train(
            self.course(arm, seed),
            beta=options["beta"],
            steps=options["steps"],
            batch=settings["batch"],
            rate=settings["rate"] * (1.0 if options["start"] == "random" else settings["start_rate"]),
            seed=seed,
            marks=MARKS,
        )
        return {**result, "teacher_loss": self.teacher_loss}

    def course(self, arm: Arm, seed: int) -> Course:
        """What the student is taught with; ``kd_weight`` of the arm is of one teacher, .5 without it."""
        options = arm.options
        while len(self.teachers) < options["teachers"]:
            self.teachers.append(self._second_teacher())
        while len(self._logits) < options["teachers"]:
            teacher = self.teachers[len(self._logits)]
            with torch.no_grad():
                self._logits.append(torch.cat([teacher(input_ids=part).logits for part in self.windows.split(64)]))
        student = self._make_student(arm, seed)
        torch.manual_seed(seed)
        rivals = self._rivals(arm, student)

        def base(output: Any, index: Tensor, shd: SHD | None) -> Terms:
            targets, labels = [logits[index] for logits in self._logits[: options["teachers"]]], self.windows[index]
            if len(targets) == 1:
                weight = options.get("kd_weight", 0.5)
                return language_kd(
                    output.logits, labels, targets[0], kd_weight=weight, shift=True, shd=shd, check=False
                )
            return babyllama(output.logits, labels, targets, shift=True, shd=shd, check=False)

        def evaluate(forward: Forward) -> dict[str, float]:
            return {f"{name}_loss": _measure(forward, getattr(self, name)) for name in ("valid", "test")}

        return Course(
            student,
            len(self.windows),
            lambda index: {"input_ids": self.windows[index]},
            base,
            evaluate,
            rivals,
            data=(self.windows, self.valid, self.test, *self.teachers[: options["teachers"]]),
        )

    def _make_student(self, arm: Arm, seed: int) -> Any:
        teacher, heads, layers = self.teachers[0], arm.options["heads"], [0, 2, 4]

        def make_own() -> Any:
            config = type(teacher.config)(**teacher.config.to_dict())
            config.num_hidden_layers, config.num_attention_heads = len(layers), heads
            config.num_key_value_heads = min(heads, config.num_key_value_heads)
            config.head_dim = teacher.config.hidden_size // teacher.config.num_attention_heads
            torch.manual_seed(seed)
            model = type(teacher)(config).to(self.device)
            return self._pretrain(model, heads, seed) if arm.options["start"] == "pretrained" else model

        calibration = {"input_ids": self.windows[:64]}
        return start_student(arm.options["start"], teacher, calibration, make_own, heads=heads, layers=layers)

    def _pretrain(self, model: Any, heads: int, seed: int) -> Any:
        """The student trained without the teacher, on other windows than the study's or on the same; kept."""
        settings = {"pretraining_windows": "other"} | self.settings
        windows = self.windows if settings["pretraining_windows"] == "same" else self.other_windows
        depends = ("corpus", "length", "windows", "teacher", "pretraining", "pretraining_windows")
        return keep_trained(
            kept_place(self.folder, f"language-pretrained-{heads}-{seed}", settings, *depends),
            model,
            lambda student, index: _cross_entropy(student(input_ids=windows[index]).logits, windows[index]),
            size=len(windows),
            seed=seed,
            **self.settings["pretraining"],
        ).requires_grad_(True)

    def _rivals(self, arm: Arm, student: Any) -> list[tuple[Rival, Remembered]]:
        options = arm.options
        if options["method"] == ALONE:
            return []
        made = []
        for number, teacher in enumerate(self.teachers[: options["teachers"]]):
            # The student has layers 0, 2, 4 of the first teacher; the second is spread as usual.
            pairs = [(0, 0), (1, 2), (2, 4)] if number == 0 else None
            made.append(
                make_rival(
                    options["method"],
                    teacher,
                    student,
                    {"input_ids": self.windows[:32]},
                    layer_pairs=pairs,
                    plan=options["plan"],
                    alpha_per=options["alpha_per"],
                    temperature=options["temperature"],
                )
            )
        key = str([options[name] for name in ("method", "plan", "alpha_per", "temperature", "heads", "teachers")])
        if self._kept[0] != key:
            self._kept = ("", None)
            self._kept = (key, [Remembered(rival, {"input_ids": self.windows}) for rival in made])
        return list(zip(made, self._kept[1], strict=True))


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _measure(forward: Forward, windows: Tensor) -> float:
    with torch.no_grad():
        parts = [
            float(_cross_entropy(forward({"input_ids": part}).logits, part)) * len(part) for part in windows.split(64)
        ]
    return sum(parts) / len(windows)
