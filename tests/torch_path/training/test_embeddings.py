"""Training towards embeddings from a cache alone: the loss, the metric, and both trainers."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers", reason="students are its models")
pytest.importorskip("datasets", reason="its trainer reads them")

import datasets
import scipy.stats
import sentence_transformers
import torch
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from support.binding.sentences import TEXTS, export_encoder, samples_of, tokens_of, write_encoder
from support.binding.trainer_cases import make_model, make_samples, make_trainer, trained, write_cache
from support.binding.trainer_cases import pad as pad_labelled
from support.commands import shd
from support.refusals import refusal

from shd_ref.teacher import Pooling, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import (
    EmbeddingLoss,
    EmbeddingTerm,
    HiddenTerm,
    KdTerm,
    OnlineTeacher,
    SupervisedDataset,
    compare_embeddings,
    embedding_loss,
    pool_states,
)

NORMALIZED = Pooling("mean", normalize=True)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Caches of a teacher of width 32, each made once for its options."""
    home, made = tmp_path_factory.mktemp("taught"), {}
    graph = export_encoder(write_encoder(home / "teacher"))

    def make(**options: Any) -> Path:
        key = str(options)
        if key not in made:
            made[key] = home / f"cache-{len(made)}"
            chosen = PrecomputeOptions(**{"form": "none", "embeddings": NORMALIZED} | options)
            precompute(graph, tokens_of(home / "teacher"), made[key], chosen, RunOptions(num_threads=1))
        return made[key]

    return make


def make_student(folder: Path, width: int = 32) -> Any:
    """Another encoder with the same words, as sentence-transformers loads it."""
    changes = {"hidden_size": width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_encoder(folder, None, "Normalize", num_hidden_layers=1, **changes)
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    sides = {name: [torch.as_tensor(sample[name]) for sample in samples] for name in samples[0]}
    return {name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in sides.items()}


def vectors(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("distance", ["cosine", "mse", "similarity"])
def test_the_loss_is_its_formula(distance: str) -> None:
    student, teacher = vectors(5, 4, 0).requires_grad_(), vectors(5, 4, 1)
    own, taught = (torch.nn.functional.normalize(side, dim=-1) for side in (student, teacher))
    pairs = [(i, j) for i in range(5) for j in range(i)]
    expected = {
        "cosine": (1 - (own * taught).sum(-1)).mean(),
        "mse": (student - teacher).square().mean(),
        "similarity": torch.stack([(own[i] @ own[j] - taught[i] @ taught[j]) ** 2 for i, j in pairs]).mean(),
    }[distance]
    loss = embedding_loss(student, teacher, distance=distance)
    torch.testing.assert_close(loss, expected)
    for got, target in zip(*(torch.autograd.grad(side, student) for side in (loss, expected)), strict=True):
        torch.testing.assert_close(got, target)
    half = embedding_loss(student.detach().half(), teacher, distance=distance)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), loss.detach(), rtol=1e-2, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert embedding_loss(student, teacher, distance=distance).equal(loss)
    alone = embedding_loss(student[:1], student[:1].detach(), distance=distance)
    assert alone.item() == pytest.approx(0.0, abs=1e-12)


def test_what_cannot_be_compared() -> None:
    with refusal("argument-shape", r"same texts and width \(project.*got \(5, 4\) and \(5, 6\)"):
        embedding_loss(vectors(5, 4, 0), vectors(5, 6, 1))
    assert embedding_loss(vectors(5, 4, 0), vectors(5, 6, 1), distance="similarity") > 0
    with refusal("argument-shape", "same texts"):
        embedding_loss(vectors(4, 4, 0), vectors(5, 4, 1), distance="similarity")
    with refusal("not-finite", "student must be finite"):
        embedding_loss(vectors(2, 2, 0) / 0, vectors(2, 2, 1), distance="similarity")
    with refusal("argument-value", "distance must be one of cosine, mse, similarity; got 'l1'"):
        EmbeddingTerm(distance="l1")
    with refusal("argument-value", "pooling must be one of mean, cls, max, last; got 'sum'"):
        pool_states(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool), pooling="sum")
    with refusal("argument-value", "texts must be 3 to 2048"):
        compare_embeddings(vectors(2, 4, 0), vectors(2, 4, 1))


def test_agreement_is_that_of_scipy_and_of_sorted_neighbours() -> None:
    teacher, student = vectors(30, 6, 0), vectors(30, 9, 1)
    actual = compare_embeddings(teacher, student)
    units = [torch.nn.functional.normalize(side, dim=-1) for side in (teacher, student)]
    cosines = [(side @ side.T).numpy() for side in units]
    above = np.triu_indices(30, 1)
    expected = scipy.stats.spearmanr(*(side[above] for side in cosines)).statistic
    assert actual.spearman == pytest.approx(expected, abs=1e-9)
    nearest = [[set(np.argsort(-np.delete(row, i))[:10]) for i, row in enumerate(side)] for side in cosines]
    assert actual.neighbours == pytest.approx(np.mean([len(a & b) / 10 for a, b in zip(*nearest, strict=True)]))
    assert actual.index is None
    same = compare_embeddings(teacher, 3 * teacher)
    assert (same.spearman, same.neighbours, same.index) == (pytest.approx(1.0), 1.0, 1.0)
    turned = teacher.flip(1)  # the same cosines in other directions, in which no index of the teacher's finds texts
    foreign = compare_embeddings(teacher, turned)
    searched = (torch.nn.functional.normalize(turned, dim=-1) @ units[0].T).numpy()
    hits = [set(np.argsort(-np.delete(row, i))[:10]) for i, row in enumerate(searched)]
    assert foreign.neighbours == 1.0
    assert foreign.index == pytest.approx(np.mean([len(a & b) / 10 for a, b in zip(nearest[0], hits, strict=True)]))
    assert foreign.index < 0.6
    assert compare_embeddings(teacher, torch.ones(30, 2)).spearman == 0.0
    ties = compare_embeddings(torch.eye(4)[[0, 0, 1, 2, 3]], torch.eye(3)[[0, 0, 0, 1, 2]])  # 1 of 10 alike, 3 of 10
    assert ties.spearman == pytest.approx(scipy.stats.spearmanr([1] + [0] * 9, [1] * 3 + [0] * 7).statistic)


@pytest.mark.parametrize(("distance", "pooling"), [("mse", "last"), ("similarity", "max")])
def test_a_step_is_that_of_a_plain_loop(
    caches: Callable[..., Path], tmp_path: Path, distance: str, pooling: str
) -> None:
    """Of two micro-batches of three and one texts, beside hidden states that count positions."""
    cache = caches(embeddings=Pooling(pooling, normalize=distance != "mse"), hidden=(2,))
    student = make_student(tmp_path / "student")
    samples = samples_of(tmp_path / "student")[:4]
    joined = SupervisedDataset(samples, cache)
    model = student[0].auto_model
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 1}
    arguments |= {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    hidden = HiddenTerm([(1, 2)], weight=0.5)
    term = EmbeddingTerm(weight=2.0, distance=distance)
    trainer = trained(
        tmp_path / "out", train=joined, model=model, collate=pad, embeddings=term, hidden=hidden, arguments=arguments
    )
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        value.data.copy_(before[name])
    taught = joined.collate_with(pad)([joined[index] for index in range(4)])[1]
    targets, states = taught.embeddings(), taught.hidden_states()[2]
    assert targets is not None
    batch = pad(samples)
    mask = batch["attention_mask"].bool()
    model.zero_grad()
    output = model(**batch)
    own = pool_states(output.last_hidden_state, mask, pooling=pooling, normalize=targets.normalize)
    sides = ((own[rows], targets.vectors[rows]) for rows in (slice(3), slice(3, 4)))
    first, second = (embedding_loss(*side, distance=distance) for side in sides)
    expected = 0.75 * first + 0.25 * second
    apart = (output.last_hidden_state - states).square().mean(-1)[mask].mean()
    (2 * expected + 0.5 * apart).backward()
    assert trainer.state.log_history[0]["embedding_loss"] == pytest.approx(expected.item(), rel=1e-4)
    for name, value in model.named_parameters():
        stepped = value.detach() - 0.01 * (0 if value.grad is None else value.grad)
        torch.testing.assert_close(after[name], stepped, rtol=1e-4, atol=1e-6, msg=name)


def test_beside_attention_and_logits_of_a_student_with_a_head(tmp_path: Path) -> None:
    """Its last hidden state is what its head reads."""
    cache = write_cache(tmp_path, logits="float16", embeddings=Pooling("last"))
    joined = SupervisedDataset(make_samples(), cache)
    arguments = {"per_device_train_batch_size": 8, "max_steps": 1, "train_sampling_strategy": "sequential"}
    terms: dict[str, Any] = {"beta": 0.5, "kd": KdTerm(), "embeddings": EmbeddingTerm(weight=3.0)}
    logged = trained(tmp_path / "out", train=joined, arguments=arguments, **terms).state.log_history[0]
    weights = {"shd": 0.5, "kd": 1.0, "embedding": 3.0}
    weighted = sum(weight * logged[f"{name}_loss"] for name, weight in weights.items())
    assert logged["loss"] == pytest.approx(logged["base_loss"] + weighted, rel=1e-3)
    batch = pad_labelled(make_samples())
    states = make_model(2, seed=2)(**batch, output_hidden_states=True).hidden_states[-1]
    own = pool_states(states, batch["attention_mask"].bool(), pooling="last")
    targets = joined.collate_with(pad_labelled)([joined[index] for index in range(8)])[1].embeddings()
    assert targets is not None
    assert logged["embedding_loss"] == pytest.approx(embedding_loss(own, targets.vectors).item(), rel=1e-4)
    with refusal("argument-value", "embedding must have a cache of embeddings, as no live teacher gives them"):
        live = OnlineTeacher(make_model(4, seed=1), 2, [(0, 0), (1, 1)])
        trained(tmp_path / "live", train=make_samples(), teacher=live, embeddings=EmbeddingTerm())


def test_a_student_learns_from_the_cache_alone(caches: Callable[..., Path], tmp_path: Path) -> None:
    """Narrower than its teacher; it is evaluated, saved, and loads as an encoder."""
    student = make_student(tmp_path / "student", 16)
    samples = samples_of(tmp_path / "student")
    joined = SupervisedDataset(samples, caches(embeddings_codec="float16"))
    arguments = {"max_steps": 8, "per_device_train_batch_size": 12, "learning_rate": 0.005, "optim": "adamw_torch"}
    arguments |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "per_device_eval_batch_size": 5}
    trainer = make_trainer(
        tmp_path / "out",
        train=joined,
        model=student[0].auto_model,
        collate=pad,
        embeddings=EmbeddingTerm(distance="mse"),
        eval_dataset=joined,
        arguments=arguments,
    )
    trainer.train()
    losses = [step["embedding_loss"] for step in trainer.state.log_history if "embedding_loss" in step]
    assert losses[-1] < 0.8 * losses[0]
    assert len(list(trainer.projectors.parameters())) == 2
    metrics = trainer.evaluate()
    taught = np.stack([joined.cache.decode_embedding(joined[index][1]) for index in range(len(joined))])
    own = student.encode(TEXTS)
    expected = compare_embeddings(torch.from_numpy(taught), torch.from_numpy(own))
    assert metrics["eval_spearman"] == pytest.approx(expected.spearman, abs=0.01)
    assert metrics["eval_neighbours"] == pytest.approx(expected.neighbours, abs=0.02)
    student.save_pretrained(str(tmp_path / "trained"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS), own, atol=1e-6)


def fit(student: Any, data: dict[str, list[Any]], loss: Any, out: Path) -> list[float]:
    """The losses of a few steps of ``SentenceTransformerTrainer``."""
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=6,
        max_steps=10,
        learning_rate=0.005,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=student, args=arguments, train_dataset=datasets.Dataset.from_dict(data), loss=loss
    )
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def test_the_trainer_of_sentence_transformers(caches: Callable[..., Path], tmp_path: Path) -> None:
    """By the content of its tokens, of two columns of texts."""
    student = make_student(tmp_path / "student", 16)
    loss = EmbeddingLoss(student, caches(), distance="cosine")
    assert loss.projector is not None
    assert EmbeddingLoss(student, caches(), distance="similarity").projector is None
    losses = fit(student, {"one": TEXTS, "other": TEXTS[::-1]}, loss, tmp_path / "out")
    assert np.mean(losses[-2:]) < 0.8 * np.mean(losses[:2])
    student.save_pretrained(str(tmp_path / "trained"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS), student.encode(TEXTS), atol=1e-6)
    evaluate = EmbeddingSimilarityEvaluator(TEXTS[:6], TEXTS[6:], scores=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], name="few")
    assert -1 <= evaluate(loaded)["few_spearman_cosine"] <= 1


def test_caches_and_students_that_do_not_fit(caches: Callable[..., Path], tmp_path: Path) -> None:
    student = make_student(tmp_path / "student", 16)
    other = caches(embeddings=None, hidden=(2,))
    joined = SupervisedDataset(samples_of(tmp_path / "student"), other)
    with refusal("cache-mismatch", "embedding must have embeddings in .*; got none: precompute with --embeddings"):
        make_trainer(tmp_path, train=joined, model=student[0].auto_model, embeddings=EmbeddingTerm())
    with refusal("argument-value", "must hold embeddings for this; it holds hidden"):
        EmbeddingLoss(student, other)
    with refusal("sample-missing", r"lacks 1 of 2 of a batch, first tokens \[.*max_seq_length and without prompts"):
        EmbeddingLoss(student, caches())([student.tokenize([TEXTS[0], "w1 w1 w1 w1"])])
    with refusal("sample-missing", "1 of 1 are not in it"):
        SupervisedDataset([{"input_ids": [3, 3], "attention_mask": [1, 1]}], caches())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the page's other libraries
def test_the_page_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands but the export and the start, and every snippet, on small models."""
    page = (Path(__file__).resolve().parents[3] / "docs/sentence-encoders.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    export_encoder(write_encoder(tmp_path / "teacher"))
    write_encoder(tmp_path / "student", None, "Normalize", num_hidden_layers=1)
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 4), encoding="utf-8")
    (precompute_line,) = re.findall(r"^shd (precompute .*)$", page.replace("\\\n", ""), re.MULTILINE)
    shd(*shlex.split(precompute_line))
    capsys.readouterr()
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(snippet, "sentence-encoders.md", "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    assert output.count("eval_spearman") >= 2
    loaded = sentence_transformers.SentenceTransformer("trained-too", device="cpu")
    assert loaded.encode(TEXTS).shape == (len(TEXTS), 32)
