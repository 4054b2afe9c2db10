"""A step without a teacher in memory: a cache of attention, logits and hidden states teaches as the live one does."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from support.binding.trainer_cases import make_model, make_samples, make_trainer, pad, trained
from support.refusals import refusal
from support.two_sequences import encoder_decoder

from shd_ref.cache import Attention, CacheReader
from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import HiddenTerm, KdTerm, OnlineTeacher, SupervisedDataset, hidden_loss, kd_loss
from shd_torch.kd import kd_targets_topk

WHOLE = {"max_steps": 1, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
TOP = {"logits": "topk", "logits_top": 8, "logits_temperature": 2.0, "logits_bits": 16}
HIDDEN = {"hidden": (0, 1, 2), "hidden_codec": "float16"}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "topk": ({**TOP, **HIDDEN}, {"k": 8, "temperature": 2.0}),
    "float16": ({"logits": "float16", **HIDDEN}, {}),
}
"""Options of precompute, and what keeps the same classes of a live teacher."""


class Truncated(OnlineTeacher):
    """A live teacher of which the classes that a cache keeps are kept."""

    kept: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taught = super().__call__(*args, **kwargs)
        if not self.kept:
            return taught
        return replace(taught, logits=kd_targets_topk(taught.logits, **self.kept))


def live(**kept: Any) -> OnlineTeacher:
    teacher = Truncated(make_model(4, seed=1), 2, 2, hidden_layers=[0, 1, 2])
    teacher.kept = kept
    return teacher


@pytest.mark.parametrize("form", ["topk", "float16"])
def test_loss_and_gradient_are_within_the_stated_error(form: str, cached: Callable[..., Path]) -> None:
    """By Pinsker a row is within sqrt(2 KL) of the teacher's, and its gradient within w times that."""
    options, kept = FORMS[form]
    reader = CacheReader(cached(**options))
    dataset, batch = SupervisedDataset(make_samples(), reader), pad(make_samples())
    _, supervision = dataset.collate_with(pad)([dataset[index] for index in range(8)])
    mask = batch["attention_mask"].bool()
    seen = {name: value for name, value in batch.items() if name != "labels"}
    online = live(**kept)(**seen)
    logits = torch.randn(8, 12, 30, generator=torch.Generator().manual_seed(0))
    runs = []
    for targets in (supervision.targets(), online.targets()):
        z = logits.clone().requires_grad_()
        loss = kd_loss(targets, z, temperature=2.0, loss_mask=mask)
        loss.backward()
        runs.append((loss.detach(), z.grad))
    assert reader.errors["logits"] is not None
    # Receipts measure float16 logits at T = 1; dividing them by 2 halves their rounding, and so does not raise it.
    rows = math.sqrt(2 * reader.errors["logits"].kl_max)
    difference = (runs[0][1] - runs[1][1]).abs().sum(-1)
    assert float(difference.max()) <= 2.0 / int(mask.sum()) * rows + 1e-7
    assert float(difference[~mask].max()) == 0.0
    spread = float(logits.abs().max()) + 10  # of the logarithms that the difference is weighed with
    assert abs(float(runs[0][0] - runs[1][0])) <= 4.0 * rows * spread
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-3, atol=0)
    states, expected = supervision.hidden_states(), online.hidden_states()
    assert list(states) == list(expected) == [0, 1, 2]
    assert reader.errors["hidden"] is not None
    for layer, state in states.items():
        off = (state - expected[layer])[mask].norm(dim=-1) / expected[layer][mask].norm(dim=-1)
        assert float(off.max()) <= reader.errors["hidden"].relative_max + 1e-5
        assert float(hidden_loss(state, expected[layer], loss_mask=mask)) < 1e-5


def test_a_cache_without_attention_teaches_kd_and_hidden_states(cached: Callable[..., Path], tmp_path: Path) -> None:
    """``precompute --no-attention`` and a step on it: what the live teacher's logits and hidden states give."""
    options, kept = FORMS["topk"]
    alone = cached(**options, form="none", num_student_heads=0, codec="sqrt8-row")
    assert CacheReader(alone).manifest.find(Attention) is None
    arguments = {"kd": KdTerm(0.5, temperature=2.0), "hidden": HiddenTerm([(1, 1), (2, 2)], weight=0.1)}
    joined = SupervisedDataset(make_samples(), alone)
    free = trained(tmp_path, train=joined, arguments=WHOLE, **arguments)
    held = trained(tmp_path, train=make_samples(), teacher=live(**kept), arguments=WHOLE, **arguments)
    for key in ("loss", "base_loss", "kd_loss", "hidden_loss"):
        assert free.state.log_history[0][key] == pytest.approx(held.state.log_history[0][key], rel=1e-3), key
    assert "shd_loss" not in free.state.log_history[0]
    with refusal("argument-value", "must hold attention"):
        make_trainer(tmp_path, train=joined, beta=0.1)


def test_what_a_cache_cannot_teach_is_refused_before_the_first_step(
    cached: Callable[..., Path], tmp_path: Path
) -> None:
    whole, bare = cached(**TOP, **HIDDEN), cached()
    cases: list[tuple[Path, dict[str, Any], dict[str, Any], str, str]] = [
        (whole, {"logits": False}, {"kd": KdTerm()}, "cache-mismatch", "logits=True"),
        (whole, {}, {"kd": KdTerm(temperature=1.0)}, "argument-value", "temperature 2 of"),
        (bare, {}, {"hidden": HiddenTerm([(1, 1)])}, "cache-mismatch", "precompute with --hidden"),
        (whole, {"hidden": [1]}, {"hidden": HiddenTerm([(1, 2)])}, "cache-mismatch", r"got \[1\]"),
    ]
    for folder, read, terms, code, words in cases:
        with refusal(code, words):
            make_trainer(tmp_path, train=SupervisedDataset(make_samples(), folder, **read), **terms)


def collate_decoder(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [sample[name] for sample in batch], batch_first=True, padding_value=-100 if name == "labels" else 0
        )
        for name in batch[0]
    }


def collate_unmasked(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Without a mask of the decoder, and with labels that do not tell padding: the cache alone does."""
    padded = collate_decoder(batch)
    del padded["decoder_attention_mask"]
    return padded | {"labels": padded["labels"].clamp(min=0)}


class DecoderCase(NamedTuple):
    """A cache of logits and hidden states of an encoder-decoder, and who learns from it."""

    samples: list[dict[str, torch.Tensor]]
    teacher: Path
    joined: SupervisedDataset
    student: Any

    def train(self, out: Path, size: int, **options: Any) -> dict[str, float]:
        """What one step of all six samples logs, in parts of ``size``."""
        arguments = {"max_steps": 1, "per_device_train_batch_size": size, "gradient_accumulation_steps": 6 // size}
        options = {"train": self.joined, "model": copy.deepcopy(self.student), "collate": collate_decoder} | options
        trainer = trained(out, arguments=arguments | {"train_sampling_strategy": "sequential"}, **options)
        logged: dict[str, float] = trainer.state.log_history[0]
        return logged


@pytest.fixture(scope="module")
def decoder_case(tmp_path_factory: pytest.TempPathFactory) -> DecoderCase:
    import transformers

    folder = tmp_path_factory.mktemp("decoder")
    onnx.save(encoder_decoder(), folder / "teacher.onnx")
    rng, samples = np.random.default_rng(5), []
    for number in range(6):
        ids, second = rng.integers(1, 30, 3 + number % 3), rng.integers(1, 30, 8 - number)
        samples.append(
            {
                "input_ids": torch.from_numpy(ids),
                "attention_mask": torch.ones(len(ids), dtype=torch.int64),
                "decoder_input_ids": torch.from_numpy(second),
                "decoder_attention_mask": torch.ones(len(second), dtype=torch.int64),
                "labels": torch.from_numpy(second).roll(-1),
            }
        )
    arrays = {name: value.numpy() for name, value in collate_decoder(samples).items() if name != "labels"}
    options = PrecomputeOptions(form="none", logits="float16", hidden=(0, 1))
    precompute(folder / "teacher.onnx", arrays, folder / "cache", options, RunOptions(num_threads=1))
    torch.manual_seed(2)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, max_position_embeddings=16, dropout=0.0, **sizes, **heads
    )
    student = transformers.BartForConditionalGeneration(config).train()
    return DecoderCase(samples, folder / "teacher.onnx", SupervisedDataset(samples, folder / "cache"), student)


def test_a_cache_teaches_the_decoder_of_an_encoder_decoder(decoder_case: DecoderCase, tmp_path: Path) -> None:
    """Rows are the second sequence's, whose lengths are not the first's (CACHE-160)."""
    import onnxruntime

    batch, joined = collate_decoder(decoder_case.samples), decoder_case.joined
    arrays = {name: value.numpy() for name, value in batch.items() if name != "labels"}
    _, supervision = joined.collate_with(collate_decoder)([joined[index] for index in range(6)])
    (expected,) = onnxruntime.InferenceSession(decoder_case.teacher).run(["logits"], arrays)
    mask = batch["decoder_attention_mask"].bool()
    assert torch.equal(supervision.decoder_mask(), mask)
    torch.testing.assert_close(
        supervision.targets()[mask].float(), torch.from_numpy(expected)[mask], rtol=2e-3, atol=2e-3
    )
    states, length = supervision.hidden_states(10), mask.shape[1]
    assert {layer: tuple(state.shape) for layer, state in states.items()} == {0: (6, 10, 12), 1: (6, 10, 12)}
    weights = [onnx.numpy_helper.to_array(each) for each in onnx.load(decoder_case.teacher).graph.initializer]
    head = torch.from_numpy(next(array for array in weights if array.shape == (12, 30)).copy())
    torch.testing.assert_close(
        (states[1][:, :length] @ head)[mask], torch.from_numpy(expected)[mask], rtol=2e-2, atol=2e-2
    )
    assert not states[1][:, :length][~mask].any()
    with torch.no_grad():
        own = decoder_case.student(**{name: value for name, value in batch.items() if name != "labels"}).logits
    target = kd_loss(torch.from_numpy(expected), own, temperature=2.0, loss_mask=mask)
    terms = {"kd": KdTerm(temperature=2.0), "hidden": HiddenTerm([(1, 1)])}
    whole, parts = (decoder_case.train(tmp_path, size, **terms) for size in (6, 2))
    assert [whole["kd_loss"], parts["kd_loss"]] == pytest.approx([float(target)] * 2, rel=2e-3)
    assert whole["hidden_loss"] > 0
    assert parts["hidden_loss"] == pytest.approx(whole["hidden_loss"], rel=1e-4)


@pytest.mark.parametrize("way", ["kd", "recipe", "live"])
def test_rows_that_the_labels_or_the_cache_leave_out_have_no_share(
    decoder_case: DecoderCase, tmp_path: Path, way: str
) -> None:
    """A step in parts is the whole step, though labels count padding too, or say alone what the decoder counts."""
    arguments: dict[str, Any] = {"recipe": "language_kd"} if way == "recipe" else {"kd": KdTerm(rows="labels")}
    if way == "live":
        teacher = copy.deepcopy(decoder_case.student).eval()
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter *= 1.5
        arguments |= {"teacher": OnlineTeacher(teacher, 2, 3), "train": decoder_case.samples}
    collate = collate_decoder if way == "live" else collate_unmasked
    whole, parts = (decoder_case.train(tmp_path, size, collate=collate, **arguments) for size in (6, 2))
    assert whole["kd_loss"] > 0
    assert parts["kd_loss"] == pytest.approx(whole["kd_loss"], rel=1e-4)


def test_a_batch_must_say_what_its_decoder_reads(decoder_case: DecoderCase, tmp_path: Path) -> None:
    """Where the student is given no labels, or a teacher beside it is not: BART would read the encoder's tokens."""

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in collate_decoder(batch).items() if not name.startswith("decoder")}

    teacher = OnlineTeacher(copy.deepcopy(decoder_case.student).eval(), 2, 3)
    cases: list[dict[str, Any]] = [
        {"recipe": "cross_entropy", "train": decoder_case.samples},
        {"kd": KdTerm(), "teacher": teacher, "train": decoder_case.samples},
    ]
    for case in cases:
        with refusal("argument-value", r"must hold decoder_input_ids.*DataCollatorForSeq2Seq"):
            decoder_case.train(tmp_path, 6, collate=collate, **case)
