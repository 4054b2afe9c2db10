"""Instruction tuning: questions and answers, a teacher trained here, Rouge-L of the answers (Tables 3, 5)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError
from benchmarks.study.keeping import keep_trained, kept_place
from benchmarks.study.memory import Remembered
from benchmarks.study.rivals import Rival, make_rival
from benchmarks.study.starts import start_student
from benchmarks.study.training import Course, Teach, train
from shd_ref.layers import layer_map
from shd_torch.recipes import SHD, TeacherMixture, Terms, cross_entropy, language_kd, minillm_policy, minillm_rollout

SOURCE = Path(__file__).resolve().parents[4] / "shared" / "data" / "dolly_pairs" / "dolly_pairs.jsonl"
PAD, END, ANSWER = 0, 1, 2
Forward = Callable[[Mapping[str, Tensor]], Any]


class Instructions:
    """See the module; tokenizer and teacher are trained here, once a folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        self.settings, self.folder, self.device = settings, folder, device
        if not SOURCE.is_file():
            raise UnavailableError(f"{SOURCE} holds the questions, and is not there")
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise UnavailableError("Rouge-L comes from rouge-score: pip install rouge-score") from None
        self.scorer = RougeScorer(["rougeL"])
        lines = SOURCE.read_text(encoding="utf-8").splitlines()[: settings["lines"]]
        raw = [json.loads(line) for line in lines]
        self.tokenizer = self._make_tokenizer(raw)
        texts = self._encode(raw)
        judged = settings["judged"]
        self.valid, self.test, kept = texts[:judged], texts[judged : 2 * judged], texts[2 * judged :]
        pairs = settings["pairs"]
        self.ids, self.labels = self._label(kept[:pairs])
        self.other_ids, self.other_labels = self._label(kept[pairs:])
        self.questions = [question for question, _ in kept[:pairs]]
        given = settings["teacher"]
        self.teacher = keep_trained(
            kept_place(
                folder,
                "instructions-teacher",
                settings,
                *("lines", "judged", "pairs", "length", "vocabulary", "teacher"),
            ),
            self._make_model(given["width"], 8, given["layers"]),
            lambda model, index: (
                cross_entropy(model(input_ids=self.ids[index]).logits, self.labels[index], shift=True).total
            ),
            size=len(self.ids),
            steps=given["steps"],
            rate=given["rate"],
        )
        judged = (tensor for texts in (self.valid, self.test) for tensor in self._label(texts))
        self.data = (self.ids, self.labels, *judged, self.teacher)
        self._logits: Tensor | None = None
        self._started: dict[int, Any] = {}
        self._kept: tuple[str, Any] = ("", None)

    def _make_tokenizer(self, pairs: Sequence[Mapping[str, str]]) -> Any:
        """Byte pairs, learned on the questions and answers."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.settings["vocabulary"],
            special_tokens=["<pad>", "<end>", "<answer>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((f"{pair['instruction']} {pair['response']}" for pair in pairs), trainer)
        return tokenizer

    def _encode(self, pairs: Sequence[Mapping[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Pairs that fit into ``length`` tokens with a question of at most half of them."""
        found, length = [], self.settings["length"]
        for pair in pairs:
            question = [*self.tokenizer.encode(pair["instruction"]).ids, ANSWER]
            answer = [*self.tokenizer.encode(pair["response"]).ids, END]
            if len(question) <= length // 2 and len(question) + len(answer) <= length:
                found.append((question, answer))
        return found

    def _pad(self, texts: Sequence[list[int]]) -> Tensor:
        """Padding comes last, where causal rows that count do not see it."""
        made = torch.full((len(texts), self.settings["length"]), PAD)
        for row, text in enumerate(texts):
            made[row, : len(text)] = torch.tensor(text)
        return made.to(self.device)

    def _label(self, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """Ids and labels ``(N, L)``: answers alone are learned."""
        ids = self._pad([question + answer for question, answer in texts])
        labels = ids.masked_fill(ids == PAD, -100)
        for row, (question, _) in enumerate(texts):
            labels[row, : len(question)] = -100
        return ids, labels

    def _make_model(self, width: int, heads: int, layers: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.settings["vocabulary"],
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=2 * self.settings["length"],
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=END,
        )
        return LlamaForCausalLM(config).to(self.device)

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """One student; with ``minillm`` it starts from one that learned the answers first, the same for all arms."""
        options, settings = arm.options, self.settings
        student = self._make_student(options, seed)
        torch.manual_seed(seed)
        is_policy = options["base"] == "minillm"
        factor = 1.0 if options["start"] == "random" else settings["start_rate"]
        if is_policy:
            student.load_state_dict(self._started_student(student, seed).state_dict())
        rivals = self._rivals(arm, student, live=is_policy)
        if is_policy:
            batch, base, mask = self._policy(student)
        else:
            batch, base, mask = self._supervised()
        course = Course(student, len(self.ids), batch, base, self._judge, rivals, loss_mask=mask, data=self.data)
        return train(
            course,
            beta=options["beta"],
            steps=settings["policy_steps"] if is_policy else settings["steps"],
            batch=settings["batch"],
            rate=settings["policy_rate"] if is_policy else settings["rate"] * factor,
            seed=seed,
        )

    def _make_student(self, options: Mapping[str, Any], seed: int) -> Any:
        sizes = self.settings["student"]
        layers = [layer for _, layer in layer_map(self.settings["teacher"]["layers"], sizes["layers"])]

        def make_own() -> Any:
            model = self._make_model(sizes["width"], options["heads"], sizes["layers"])
            torch.manual_seed(seed)  # after the line above, which draws weights from seed 0
            model.apply(model._init_weights)
            return self._pretrain(model, options["heads"], seed) if options["start"] == "pretrained" else model

        given = {"heads": options["heads"], "hidden": sizes["width"], "neurons": 2 * sizes["width"], "layers": layers}
        return start_student(options["start"], self.teacher, {"input_ids": self.ids[:64]}, make_own, **given)

    def _pretrain(self, model: Any, heads: int, seed: int) -> Any:
        """The student trained on pairs that are not among those of the study, without the teacher; kept."""
        depends = ("lines", "judged", "pairs", "length", "vocabulary", "student", "pretraining")
        return keep_trained(
            kept_place(self.folder, f"instructions-pretrained-{heads}-{seed}", self.settings, *depends),
            model,
            lambda student, index: (
                cross_entropy(
                    student(input_ids=self.other_ids[index]).logits, self.other_labels[index], shift=True
                ).total
            ),
            size=len(self.other_ids),
            seed=seed,
            **self.settings["pretraining"],
        ).requires_grad_(True)

    def _started_student(self, student: Any, seed: int) -> Any:
        if seed not in self._started:
            batch, base, _ = self._supervised()
            course = Course(copy.deepcopy(student), len(self.ids), batch, base, lambda _: {})
            settings = self.settings
            train(
                course, beta=0.0, steps=settings["steps"], batch=settings["batch"], rate=settings["rate"], seed=seed
            )
            self._started[seed] = course.student
        return self._started[seed]

    def _supervised(self) -> tuple[Any, Any, Any]:
        """Batches of pairs, KD on the answers, and rows that are text."""
        if self._logits is None:
            with torch.no_grad():
                self._logits = torch.cat([self.teacher(input_ids=part).logits.half() for part in self.ids.split(64)])
        targets = self._logits

        def base(output: Any, index: Tensor, shd: SHD | None) -> Terms:
            return language_kd(
                output.logits, self.labels[index], targets[index].float(), shift=True, shd=shd, check=False
            )

        return lambda index: {"input_ids": self.ids[index]}, base, lambda index: self.ids[index] != PAD

    def _policy(self, student: Any) -> tuple[Any, Any, Any]:
        """Answers that student and teacher sample together, MiniLLM's policy loss, and KD on pairs beside it."""
        last: dict[str, Any] = {}
        _, supervised, _ = self._supervised()

        def batch(index: Tensor) -> dict[str, Tensor]:
            questions = [self.questions[int(row)] for row in index]
            length = max(map(len, questions))
            ids = torch.tensor([[PAD] * (length - len(question)) + question for question in questions])
            ids = ids.to(self.device)
            mask = (ids != PAD).long()
            mixture = TeacherMixture(self.teacher, attention_mask=mask)
            student.eval()  # no dropout
            text = student.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                eos_token_id=END,
                pad_token_id=PAD,
                max_new_tokens=self.settings["answer"],
                logits_processor=[mixture],
            )
            inputs = {"input_ids": text, "attention_mask": (text != PAD).long()}
            rows = slice(length - 1, -1)
            with torch.no_grad():
                own, other = (model(**inputs).logits[:, rows] for model in (student, self.teacher))
            rollout = minillm_rollout(own, other, text[:, length:], (text != PAD)[:, rows])
            last.update(rollout=rollout, teacher=other, rows=rows, mask=text != PAD)
            return inputs

        def base(output: Any, index: Tensor, shd: SHD | None) -> Terms:
            terms = minillm_policy(output.logits[:, last["rows"]], last["teacher"], last["rollout"], shd=shd)
            more = supervised(student(input_ids=self.ids[index]), index, None)
            return terms + more.scaled(1.0, prefix="pretraining_")

        return batch, base, lambda _: last["mask"]

    def _rivals(self, arm: Arm, student: Any, *, live: bool) -> list[tuple[Rival, Teach]]:
        if arm.method == ALONE:
            return []
        rival = make_rival(arm.method, self.teacher, student, {"input_ids": self.ids[:32]}, plan=arm.options["plan"])
        if live:  # no memory has seen what is sampled
            return [(rival, lambda _, inputs: rival.teach(**inputs))]
        key = str([arm.method, arm.options["plan"], arm.options["heads"]])
        if self._kept[0] != key:
            self._kept = ("", None)
            self._kept = (key, Remembered(rival, {"input_ids": self.ids}))
        return [(rival, self._kept[1])]

    def _judge(self, forward: Forward) -> dict[str, float]:
        """Cross entropy of answers, and Rouge-L of greedy ones, in [0, 1]."""
        found = {}
        for name, texts in (("valid", self.valid), ("test", self.test)):
            ids, labels = self._label(texts)
            logits = forward({"input_ids": ids}).logits
            found[f"{name}_loss"] = float(cross_entropy(logits, labels, shift=True).total)
            found[f"{name}_rouge_l"] = self._rouge(forward, texts)
        return found

    def _rouge(self, forward: Forward, texts: Sequence[tuple[list[int], list[int]]]) -> float:
        ids = self._pad([question for question, _ in texts])
        ends = torch.tensor([len(question) for question, _ in texts], device=self.device)
        rows = torch.arange(len(texts), device=self.device)
        for _ in range(self.settings["answer"]):  # right-padded, through the forward pass that this rival trains
            likeliest = forward({"input_ids": ids}).logits[rows, ends - 1].argmax(-1)
            done = (ids[rows, ends - 1] == END) | (ends >= ids.shape[1])
            ids[rows[~done], ends[~done]] = likeliest[~done]
            ends = ends + (~done).long()
        scores = []
        for row, (question, answer) in enumerate(texts):
            made = self.tokenizer.decode(ids[row, len(question) : int(ends[row])].tolist())
            scores.append(self.scorer.score(self.tokenizer.decode(answer), made)["rougeL"].fmeasure)
        return float(sum(scores) / len(scores))
