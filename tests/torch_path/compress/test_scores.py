"""Rerankers, regressors and independent labels: measures that no ignorant student passes, pairs, and labels."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import invoke
from support.folders import WORDS, random_like, save_model, save_modules, save_tokenizer
from support.refusals import refusal

transformers: Any = pytest.importorskip("transformers", reason="teachers are Hugging Face models")
pytest.importorskip("onnxruntime", reason="graphs are run")
pytest.importorskip("scipy", reason="compress needs scipy")

from shd_torch.cli import load_app  # noqa: E402
from shd_torch.compress import CompressOptions  # noqa: E402
from shd_torch.compress.measures import compare_labels, compare_orders, rank_relevant, read_labels  # noqa: E402
from shd_torch.compress.run import _open_run  # noqa: E402
from shd_torch.compress.samples import QUERY, Columns, collate, divide, read_rows, training_order  # noqa: E402
from shd_torch.compress.space import Design  # noqa: E402
from shd_torch.compress.students import _make, prepare_training, train  # noqa: E402
from shd_torch.compress.task import (  # noqa: E402
    Judge,
    Quality,
    ScoreTerm,
    SentenceEncoder,
    find_task,
    graph_run,
    model_run,
    read_measure,
)
from shd_torch.deploy import quantize_graph  # noqa: E402
from shd_torch.shrink import load_student  # noqa: E402
from shd_torch.shrink.folders import forward_inputs, load_teacher, read_config, read_modules, save_student  # noqa: E402
from shd_torch.shrink_command import read_inputs  # noqa: E402

OPTIONS = CompressOptions(mb=(0.045,), batch=(1,), length=(8,), minutes=1e-4, candidates=1, go_on=True)
PAIRS = Columns(reads_pairs=True)
KINDS: dict[str, dict[str, Any]] = {
    "reranker": {"num_labels": 1},
    "regressor": {"num_labels": 2, "problem_type": "regression"},
    "classifier of independent labels": {"num_labels": 4, "problem_type": "multi_label_classification"},
    "classifier": {"num_labels": 3},
}


def make_pairs(queries: int, seed: int = 0) -> list[dict[str, Any]]:
    """Eight texts of each query, none the same in lower case."""
    random, words = np.random.default_rng(seed), sorted({word.lower() for word in WORDS})
    rows = []
    for _ in range(queries):
        query = " ".join(random.choice(words, 5))
        texts = [" ".join([words[at], *random.choice(words, random.integers(1, 8))]) for at in range(8)]
        rows += [{"text": query, "text_pair": text, "label": int(at % 3 == 0)} for at, text in enumerate(texts)]
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_teacher(folder: Path, kind: str, layers: int = 1) -> Path:
    save_model(folder, "BertForSequenceClassification", num_hidden_layers=layers, **KINDS[kind])
    save_tokenizer(folder, "bert")
    return folder


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return {kind: make_teacher(folder / f"{at}", kind) for at, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def pairs(teachers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Tokens of 31 queries with eight texts each, the same for all teachers: reading compares them in a process."""
    path = write_rows(tmp_path_factory.mktemp("data") / "d.jsonl", make_pairs(31))
    return list(read_rows(path, teachers["reranker"], None, columns=PAIRS))


def test_orders_are_compared_within_queries() -> None:
    """By hand: of three pairs of pairs one is in the other order; a query of one text does not count."""
    teacher, student = torch.tensor([3.0, 2.0, 1.0, 9.0]), torch.tensor([0.3, 0.1, 0.2, 0.0])
    queries = torch.tensor([5, 5, 5, 7])
    figures = compare_orders(teacher, student, queries)
    second, third = 1 / np.log2(3), 1 / np.log2(4)
    random, best = 2 * (1 + second + third), 3 + 2 * second + third
    assert figures["kendall"] == pytest.approx(1 / 3)
    assert figures["ndcg"] == pytest.approx((3 + second + 2 * third - random) / (best - random))
    assert compare_orders(5 + 2 * teacher, student, queries) == pytest.approx(figures)
    assert compare_orders(teacher, teacher, queries) == {"kendall": 1, "ndcg": 1}
    assert compare_orders(teacher, torch.ones(4), queries) == pytest.approx({"kendall": 0, "ndcg": 0}, abs=1e-6)
    assert compare_orders(teacher, student, torch.arange(4)) == {}


def test_relevant_texts_are_ranked_by_hand() -> None:
    is_relevant = torch.tensor([True, False, True, False, True, True])
    queries = torch.tensor([0, 0, 0, 0, 1, 1])  # the second has no other texts
    figures = rank_relevant(torch.tensor([0.1, 0.9, 0.5, 0.2, 1.0, 0.0]), is_relevant, queries)
    assert figures == pytest.approx({"map": (1 / 2 + 2 / 4) / 2, "mrr": 1 / 2})
    assert rank_relevant(torch.zeros(6), is_relevant, queries) == pytest.approx(
        {"map": (1 / 3 + 2 / 4) / 2, "mrr": 1 / 3}
    )
    assert rank_relevant(torch.zeros(6), is_relevant, torch.arange(6)) == {}


def test_labels_that_most_samples_lack_agree_by_chance() -> None:
    teacher = torch.rand(400, 3, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.05, 0.5, 0.0])
    none = compare_labels(teacher, torch.zeros_like(teacher))
    assert none["agreement"] > 0.75
    assert none["kappa"] == none["worst"] == 0
    own = compare_labels(teacher, teacher)
    assert (own["kappa"], own["worst"]) == (1, 1)
    student = teacher.clone()
    student[:, 0] = False
    figures = compare_labels(teacher, student)
    assert figures["worst"] == 0
    assert 0 < figures["kappa"] < 1
    assert compare_labels(teacher[:, 2:], student[:, 2:])["kappa"] == 0  # nobody could tell


@pytest.mark.parametrize("kind", KINDS)
def test_no_measure_lets_an_ignorant_student_pass(
    teachers: dict[str, Path], pairs: list[dict[str, Any]], kind: str
) -> None:
    """A random student, the teacher's answers to other samples, and one answer for all."""
    folder = teachers[kind]
    model = load_teacher(folder)
    task = find_task(folder, model.config)
    assert kind == task.NAME
    judge = Judge(task, pairs, model_run(model))
    own = judge.measure(model_run(model))
    assert own.value == pytest.approx(1, abs=1e-6)
    forward, random = model_run(model), np.random.default_rng(0)
    others = {
        "random": model_run(random_like(model)),
        "shuffled": lambda batch: random.permutation(forward(batch)),
        "constant": lambda batch: np.ones_like(forward(batch)),
    }
    for name, other in others.items():
        quality = judge.measure(other)
        # Many samples have the most frequent class, which kappa allows for.
        assert quality.value < (0.9 if kind == "classifier" else 0.35), name
        assert quality.loss > 10 * max(own.loss, 1e-3)
        for detail in task.DETAILS.keys() & quality.details.keys() - {"agreement"}:
            assert own.details[detail] == pytest.approx(1, abs=1e-6)
            assert quality.details[detail] < 0.35, (name, detail)


@pytest.mark.parametrize("kind", ["reranker", "classifier of independent labels", "classifier"])
def test_a_teacher_that_gives_one_answer_to_all_is_refused(
    teachers: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Every student that does the same would agree with it."""
    folder = shutil.copytree(teachers[kind], tmp_path / "teacher")
    model = load_teacher(folder)
    model.classifier.weight.data.zero_()
    model.save_pretrained(folder)
    data = write_rows(tmp_path / "d.jsonl", make_pairs(30))
    with (
        refusal("inputs-invalid", "held-out samples must differ in what the teacher answers; got one answer for all"),
        _open_run(folder, data, None, OPTIONS, tmp_path / "run", lambda *_: None) as run,
    ):
        run.judge("held_out")


def test_queries_stay_whole(pairs: list[dict[str, Any]]) -> None:
    """In one part of the data, and in training next to others of their own."""
    rows, samples = pairs, divide(pairs, None, 0)
    parts = [{int(row[QUERY]) for row in part} for part in (samples.train, samples.choices, samples.held_out)]
    assert [len(part) for part in parts] == [25, 3, 3]
    assert not (parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2])
    assert len({int(row[QUERY]) for row in samples.train[:16]}) > 8  # what calibrates is not of two queries
    assert samples.calibration(16).keys() == {"input_ids", "attention_mask"}
    order = training_order(rows[:240], steps=15, size=16, seed=0)
    assert sorted(order) == list(range(240))
    queries = np.array([int(rows[at][QUERY]) for at in order]).reshape(15, 4, 4)
    assert (queries == queries[..., :1]).all()
    assert collate(rows[:3])[QUERY].tolist() == [int(row[QUERY]) for row in rows[:3]]
    with refusal("argument-value", "data must hold pairs of three first texts or more"):
        divide([row | {QUERY: row[QUERY] * 0} for row in rows], None, 0)


def test_scores_are_compared_in_units_of_the_teacher() -> None:
    """By hand: errors of 2, 0 and 4 with a deviation of 2; the first two are of one query."""
    term = ScoreTerm()
    term._deviation[:] = [torch.tensor([2.0])]
    scores, own = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[3.0], [2.0], [7.0]])
    taught, batch = SimpleNamespace(targets=lambda: scores), SimpleNamespace(inputs={QUERY: torch.tensor([4, 4, 5])})
    forward: Any = SimpleNamespace(outputs={"logits": own}, learn=lambda read, _: [read(taught)], batch=batch)
    losses = term.measure(forward).losses
    assert {name: float(loss) for name, loss in losses.items()} == {
        "_errors": pytest.approx(5 / 3),
        "_differences": 1,
    }


@pytest.mark.parametrize("kind", ["reranker", "classifier of independent labels"])
def test_a_student_learns_what_its_kind_is_judged_by(
    teachers: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head was disturbed; scores are also compared within queries."""
    folder = teachers[kind]
    data = write_rows(tmp_path / "d.jsonl", make_pairs(30))
    measure, seen = ScoreTerm.measure, []

    def spy(term: ScoreTerm, forward: Any) -> Any:
        seen.append(measure(term, forward))
        return seen[-1]

    monkeypatch.setattr(ScoreTerm, "measure", spy)
    with _open_run(folder, data, None, OPTIONS, tmp_path / "run", lambda *_: None) as run:
        config = replace(prepare_training(run), steps=30, learning_rate=1e-2)
        student = load_teacher(folder)
        torch.manual_seed(1)
        student.classifier.weight.data += torch.randn(student.classifier.weight.shape)
        before = run.judge("choices").measure(model_run(student))
        train(run.task, student, 1, config, tmp_path / "training")
        assert run.judge("choices").measure(model_run(student)).loss < 0.2 * before.loss
    assert all(measured.losses["_differences"] > 0 for measured in seen)
    assert len(seen) == (30 if kind == "reranker" else 0)


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("BertForSequenceClassification", {"problem_type": "regression"}, "regressor"),
        ("LlamaForSequenceClassification", {"num_key_value_heads": 1}, "reranker"),
        ("ViTForImageClassification", {"image_size": 8, "patch_size": 4}, "regressor"),
    ],
)
def test_models_of_one_score_are_told_by_their_folder(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: str
) -> None:
    save_model(tmp_path, name, num_labels=1, **changes)
    assert kind == find_task(tmp_path, read_config(tmp_path)).NAME


def test_other_commands_read_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the head takes them, and int8 of one score is not judged by its largest logit."""
    monkeypatch.chdir(tmp_path)
    make_teacher(Path("teacher"), "reranker")
    write_rows(Path("d.jsonl"), make_pairs(8))
    model = load_teacher("teacher")
    inputs = read_inputs(Path("d.jsonl"), 64, Path("teacher"), as_model=True)
    assert inputs["token_type_ids"].any(1).all()
    model.classifier.weight.data *= 1e-3  # beside a large mean, int8 loses what tells samples apart
    model.classifier.bias.data.fill_(3.0)
    model.save_pretrained("teacher")
    words = ["export", "teacher", "--student", "--int8", "--data", "d.jsonl", "--out", "s.onnx"]
    assert invoke(load_app(), words).exit_code == 0
    report = quantize_graph("s.onnx", "again.onnx", inputs)
    assert (report.agreement, report.kl) == (None, None)
    assert 0.8 < report.cosine < 0.99999
    result = invoke(load_app(), ["shrink", "teacher", "--data", "d.jsonl", "--heads", "1", "--out", "student"])
    assert "--tokenizer teacher --pair-column text_pair" in " ".join(result.output.split())


def grade(folder: Path, path: Path, columns: Columns = PAIRS) -> dict[str, float]:
    """What the labels of a file say of the model in a folder."""
    model = load_teacher(folder)
    task = find_task(folder, model.config)
    columns = columns._replace(is_apart=isinstance(task, SentenceEncoder))
    rows = read_rows(path, folder, None, "held_out", takes=forward_inputs(model.config), columns=columns)
    labels = read_labels(path, rows, task, model.config)
    judge = Judge(task, rows[:10], model_run(model), labels=labels)
    return dict(judge.measure(model_run(model)).labels)


def run_texts(folder: Path, rows: list[dict[str, Any]], *names: str) -> np.ndarray[Any, Any]:
    """Logits of transformers, or last states of first positions, a row at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = load_teacher(folder)
    with torch.no_grad():
        outputs = [model(**tokenizer(*(row[name] for name in names), return_tensors="pt"))[0] for row in rows]
    return torch.cat([output if output.ndim == 2 else output.mean(1) for output in outputs]).numpy()


def test_labels_of_each_kind_are_compared_with_its_answers(teachers: dict[str, Path], tmp_path: Path) -> None:
    """By other code, from transformers' own outputs, in files whose rows differ in length."""
    from scipy.stats import spearmanr

    rows = make_pairs(5)
    random, count = np.random.default_rng(0), len(rows)
    folder = teachers["reranker"]
    scores = run_texts(folder, rows, "text", "text_pair")[:, 0]
    precisions, ranks = [], []
    for start in range(0, count, 8):
        order = np.argsort(-scores[start : start + 8])
        hits = np.array([row["label"] for row in rows[start : start + 8]])[order]
        precisions.append((np.cumsum(hits) / np.arange(1, 9))[hits == 1].mean())
        ranks.append(1 / (hits.argmax() + 1))
    path = write_rows(tmp_path / "labelled.jsonl", rows)
    assert grade(folder, path) == pytest.approx({"map": np.mean(precisions), "mrr": np.mean(ranks)})
    scored = [
        {"text": row["text"], "text_pair": row["text_pair"], "score": float(score)}
        for row, score in zip(rows, random.random(count), strict=True)
    ]
    expected = spearmanr(scores, [row["score"] for row in scored]).statistic
    path = write_rows(tmp_path / "scored.jsonl", scored)
    assert grade(folder, path) == pytest.approx({"spearman": expected})
    sentences = tmp_path / "sentences"
    save_model(sentences, "BertModel")
    save_tokenizer(sentences, "bert")
    save_modules(sentences, pooling={"pooling_mode_mean_tokens": True})
    sides = [run_texts(sentences, scored, name) for name in ("text", "text_pair")]
    cosines = [(a @ b) / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*sides, strict=True)]
    expected = spearmanr(cosines, [row["score"] for row in scored]).statistic
    assert grade(sentences, path) == pytest.approx({"spearman": expected}, abs=1e-4)
    assert grade(sentences, write_rows(tmp_path / "single.jsonl", [{"text": "a", "score": 1.0}] * 20)) == {}
    classes = teachers["classifier"]
    chosen = run_texts(classes, rows, "text").argmax(1)
    named = [{"text": row["text"], "label": f"LABEL_{at % 3}"} for at, row in enumerate(rows)]
    expected = (chosen == np.arange(count) % 3).mean()
    assert grade(classes, write_rows(tmp_path / "named.jsonl", named)) == {"accuracy": pytest.approx(expected)}
    several = teachers["classifier of independent labels"]
    own, flags = run_texts(several, rows, "text") > 0, random.random((count, 4)) < 0.5
    told = [{"text": row["text"], "label": list(map(int, flag))} for row, flag in zip(rows, flags, strict=True)]
    expected = 2 * (own & flags).sum() / (own.sum() + flags.sum())
    assert grade(several, write_rows(tmp_path / "flags.jsonl", told)) == {"f1": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("kind", "column", "values", "said"),
    [
        ("reranker", "label", ["yes", "no"], "column label numbers"),
        ("reranker", "label", [1, 1], "labels that differ between samples, and of a reranker between the texts"),
        ("reranker", "score", [float("nan"), 1.0], "line 1 must be JSON: NaN"),
        ("classifier", "label", [0, 3], "one of the model's classes, 0 to 2 or its name"),
        ("classifier", "label", ["LABEL_0", "great"], "names of classes; got 'great'"),
        ("classifier", "label", [0, None], "held_out .*row 1: label must be numbers"),
        ("classifier of independent labels", "label", [[1, 0, 0, 0], [1, 0]], "as many in each line"),
        ("classifier of independent labels", "label", [[1, 0, 0, 2]] * 2, "4 numbers of 0 and 1"),
    ],
)
def test_bad_labels_are_refused_before_anything_runs(
    teachers: dict[str, Path],
    pairs: list[dict[str, Any]],
    tmp_path: Path,
    kind: str,
    column: str,
    values: list[Any],
    said: str,
) -> None:
    rows = [row | {column: values[number % 2]} for number, row in enumerate(make_pairs(31))]
    path = write_rows(tmp_path / "held.jsonl", rows)
    config = read_config(teachers[kind])
    with refusal("inputs-invalid", said):
        read_labels(path, pairs, find_task(teachers[kind], config), config)


def test_any_figure_of_the_page_can_be_asked_for() -> None:
    quality = asdict(Quality(0.9, 0.1, {"kendall": 0.8}, {"map": 0.7}))
    figures = {name: read_measure(quality, name) for name in ("quality", "kendall", "map")}
    assert figures == {"quality": 0.9, "kendall": 0.8, "map": 0.7}
    with refusal("argument-value", "at_least must name one of quality, kendall, map; got mrr"):
        read_measure(quality, "mrr")
    assert CompressOptions(faster=(2.0,), at_least=("map", 0.8)).least == ("map", 0.8)
    with refusal("argument-value", "at_least must be a finite number above 0 and at most 1"):
        CompressOptions(faster=(2.0,), at_least=("map", 8.0))


def save_cross_encoder(folder: Path, *, is_old: bool) -> Any:
    """A folder as sentence-transformers writes it, today or before version 5."""
    library = pytest.importorskip("sentence_transformers", reason="its own folders")
    make_teacher(folder / "bert", "reranker", 2)
    function = torch.nn.Identity()
    told: Any = {"device": "cpu", "local_files_only": True, "max_length": 12}
    encoder = library.CrossEncoder(str(folder / "bert"), activation_fn=function, **told)
    encoder.save_pretrained(str(folder / "teacher"))
    if is_old:
        for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
            (folder / "teacher" / name).unlink()
        config = json.loads((folder / "teacher" / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}
        (folder / "teacher" / "config.json").write_text(json.dumps(config))
    else:
        file = folder / "teacher" / "config_sentence_transformers.json"
        told = {"prompts": {"query": "red fox "}, "default_prompt_name": "query"}
        file.write_text(json.dumps(json.loads(file.read_text()) | told))
    return library.CrossEncoder


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize("is_old", [False, True])
def test_a_cross_encoder_is_that_of_its_library_before_and_after(tmp_path: Path, is_old: bool) -> None:
    """The teacher's scores, with its prompt and its limit; a student's folder gives what its graph gives."""
    cross_encoder = save_cross_encoder(tmp_path, is_old=is_old)
    rows = make_pairs(10)
    texts = [(row["text"], row["text_pair"]) for row in rows]
    data = write_rows(tmp_path / "d.jsonl", rows)
    options = replace(OPTIONS, int8=False)
    with _open_run(tmp_path / "teacher", data, None, options, tmp_path / "run", lambda *_: None) as run:
        assert run.task.NAME == "reranker"
        samples = read_rows(data, tmp_path / "teacher", None, columns=PAIRS, takes=forward_inputs(run.model.config))
        own = [float(model_run(run.model)(collate_one(row))[0, 0]) for row in samples]
        expected = cross_encoder(str(tmp_path / "teacher"), device="cpu", local_files_only=True).predict(texts)
        np.testing.assert_allclose(own, expected, atol=2e-5 * np.abs(expected).max())
        # Of an old folder a stock student, of today's one whose layers differ.
        design = Design((0,), (2,), (16,)) if is_old else Design((0, 1), (2, 1), (32, 16))
        made, folder = _make(run, run.options.targets([1.0])[0], 0, {"design": asdict(design)}), tmp_path / "student"
        save_student(made.student, made.report, folder, run.teacher, read_modules(run.teacher, 16, 16))
        graph = graph_run(run.write_graphs(made.student, "student")["float"])
        load_student(folder)
        student = cross_encoder(str(folder), device="cpu", local_files_only=True)
        assert isinstance(student.activation_fn, torch.nn.Identity)
        scores = [float(graph(collate_one(row))[0, 0]) for row in samples]
        np.testing.assert_allclose(scores, student.predict(texts), atol=1e-4)
        assert np.abs(np.array(scores) - expected).max() > 1e-2


def collate_one(row: dict[str, Any]) -> dict[str, Any]:
    return {name: array[None] for name, array in row.items()}


@pytest.mark.nightly
def test_a_reranker_by_one_command(tmp_path: Path) -> None:
    """With labels on the page, and a figure of theirs that was asked for in vain."""
    make_teacher(tmp_path / "teacher", "reranker")
    data, held = write_rows(tmp_path / "d.jsonl", make_pairs(50)), write_rows(tmp_path / "h.jsonl", make_pairs(10, 1))
    words = ["--mb", "0.045", "--batch", "1", "--length", "8", "--minutes", ".01", "--candidates", "1", "--go-on"]
    words += ["--data", str(data), "--held-out", str(held), "--out", str(tmp_path / "student")]
    result = invoke(load_app(), ["compress", str(tmp_path / "teacher"), *words, "--at-least", "map=0.99"])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "student" / "compress.json").read_text())
    (student,) = document["students"]
    figures = student["quality"]["int8"]
    assert figures["labels"].keys() == {"map", "mrr"}
    assert {"kendall", "ndcg"} <= figures["details"].keys()
    page = (tmp_path / "student" / "README.md").read_text()
    assert "| model | quality | kendall | ndcg | map | mrr |" in page
    assert f"| {figures['labels']['map']:.4f} |" in page
    assert "a map of 0.99 was asked for" in student["missed"][0]
    other = ["compress", str(tmp_path / "teacher"), *words[:-2], "--out", str(tmp_path / "other")]
    result = invoke(
        load_app(), [*other[: other.index("--mb")], *other[other.index("--mb") + 2 :], "--at-least", "map=.9"]
    )
    assert "--at-least must name one of quality, kendall, ndcg; got map" in " ".join(result.output.split())
