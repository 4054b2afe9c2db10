"""``shd-torch compress``: the choice on its own, and the whole command on small teachers."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.folders import save_model, save_modules
from support.refusals import refusal

transformers: Any = pytest.importorskip("transformers", reason="teachers are Hugging Face models")
pytest.importorskip("onnxruntime", reason="graphs are timed in onnxruntime")
pytest.importorskip("cyclopts", reason="the command needs cyclopts")
pytest.importorskip("scipy", reason="the choice is an integer programme")

from support.commands import invoke  # noqa: E402  (after the skips)

from shd_ref.cache import CacheReader  # noqa: E402
from shd_ref.errors import ShdError  # noqa: E402
from shd_torch.cli import load_app  # noqa: E402
from shd_torch.compress import CompressOptions, compress, stages, students  # noqa: E402
from shd_torch.compress.handover import Point, describe_regions  # noqa: E402
from shd_torch.compress.samples import add_crops, divide, read_rows, training_order  # noqa: E402
from shd_torch.compress.search import TEACHER, Costs, Worths, choose_design, choose_designs, fit_costs, keep_layers  # noqa: E402  # noqa: E402
from shd_torch.compress.space import NONE, Design, Space, find_space  # noqa: E402
from shd_torch.compress.stages import Run, Search  # noqa: E402
from shd_torch.compress.students import RATES, TrainingConfig, train  # noqa: E402
from shd_torch.shrink import load_student  # noqa: E402
from shd_torch.shrink.families import FAMILIES  # noqa: E402
from shd_torch.shrink.folders import load_teacher  # noqa: E402
from shd_torch.shrink.sizes import sizes_of  # noqa: E402
from shd_torch.shrink.unfinished import Unfinished  # noqa: E402

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "compress.md").read_text(encoding="utf-8")
SPACE = Space(3, heads=(4, 2, NONE), neurons=(8, 4), keeps_first=False, head_dim=2)
OPTIONS = CompressOptions(mb=(0.045,), batch=(1,), length=(8,), minutes=0.01, candidates=2, go_on=True)
KILLS = 25
MEGABYTES = {"vit": 0.035, "decoder": 0.039, "sentences": 0.0405, "classifier": 0.045}
"""Of students of the teachers below; times of such small models are noise."""


CLASSES: dict[str, tuple[str, dict[str, int]]] = {
    "vit": ("ViTModel", {"image_size": 8, "patch_size": 4}),
    "decoder": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "classifier": ("BertForSequenceClassification", {}),
    "sentences": ("BertModel", {}),
}


def made_costs(*, reads_first: bool = False) -> Costs:
    """Two settings that rank parts differently, and bytes."""
    random = np.random.default_rng(3)
    heads = [np.sort(random.uniform(1, 4, 3))[::-1].tolist() for _ in range(3)]
    neurons = [np.sort(random.uniform(1, 4, 2))[::-1].tolist() for _ in range(3)]
    return Costs([1.0, 2.0, 3.0], heads, neurons, [30.0, 30.0, 30.0], None, reads_first)


def made_worths() -> Worths:
    random = np.random.default_rng(4)
    heads = [[0.0, *np.sort(random.uniform(0, 1, 2)).tolist()] for _ in range(3)]
    neurons = [[0.0, float(random.uniform(0, 1))] for _ in range(3)]
    return Worths(heads, neurons, random.uniform(0.5, 2, 3).tolist())


def all_designs() -> list[Design]:
    return [
        Design(kept, heads, neurons)
        for count in (1, 2, 3)
        for kept in itertools.combinations(range(3), count)
        for heads in itertools.product(SPACE.heads, repeat=count)
        for neurons in itertools.product(SPACE.neurons, repeat=count)
        if any(heads)
    ]


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("share", [0.95, 0.7, 0.45, 0.3])
def test_the_choice_is_the_best_of_all_students(share: float, reads_first: bool) -> None:
    costs, worths = made_costs(reads_first=reads_first), made_worths()
    limits = [share * cost for cost in costs.predict(SPACE.whole, SPACE)]

    def fits(design: Design) -> bool:
        return (2 in design.kept or not reads_first) and all(
            cost <= limit + 1e-9 for cost, limit in zip(costs.predict(design, SPACE), limits, strict=True)
        )

    for count in (1, 2, 3):
        possible = [design for design in all_designs() if len(design.kept) == count and fits(design)]
        chosen = choose_design(SPACE, costs, worths, limits, count)
        if not possible:
            assert chosen is None
            continue
        assert chosen is not None
        assert fits(chosen)
        best = min(worths.predict(design, SPACE) for design in possible)
        assert worths.predict(chosen, SPACE) == pytest.approx(best)
    ranked = [worths.predict(design, SPACE) for design in choose_designs(SPACE, costs, worths, limits)]
    assert ranked == sorted(ranked)
    whole = [design for design in all_designs() if design.keeps_layers(SPACE) and fits(design)]
    # As many as fit, then the best of them.
    first = min(whole, key=lambda design: (-len(design.kept), worths.predict(design, SPACE)), default=None)
    assert keep_layers(SPACE, costs, worths, limits) == first


def test_the_page_says_which_model_is_best_at_which_speed() -> None:
    figures = {
        "teacher": (1.0, [1.0, 1.0]),
        "slow": (0.9, [2.0, 0.9]),
        "int8": (0.99, [3.0, 2.5]),
        "table": (0.6, [400]),
    }
    points = [Point(name, quality, {}, speeds, 1.0) for name, (quality, speeds) in figures.items()]
    words = "teacher (up to 1.00 times); int8 (up to 2.50 times); table (up to 400 times). Never: slow."
    assert describe_regions(points) == f"Best by speed, at the slowest setting: {words}"


@pytest.mark.parametrize("reads_first", [False, True])
def test_costs_of_parts_come_back_from_sums(reads_first: bool) -> None:
    """Also where the last layer of each student takes no time."""
    truth = made_costs(reads_first=reads_first)
    whole = SPACE.whole
    designs = {"whole": whole, "half": SPACE.uniform(4, 8, 1)}
    designs |= {f"heads {count}": SPACE.uniform(count, 8) for count in SPACE.heads[1:]}
    designs |= {f"neurons {count}": SPACE.uniform(4, count) for count in SPACE.neurons[1:]}
    prices = {name: truth.predict(design, SPACE) for name, design in designs.items()}
    costs = fit_costs(prices | {TEACHER: truth.teacher}, designs, SPACE, reads_first=reads_first)
    for design in all_designs():
        np.testing.assert_allclose(costs.predict(design, SPACE), truth.predict(design, SPACE), rtol=1e-6)


def test_no_layer_costs_less_than_nothing() -> None:
    """Small FFNs save more than their share: without attention too they would cost -0.5 by sums of differences."""
    attention, ffn = {4: 3.0, 2: 2.0, NONE: 0.0}, {8: 3.0, 4: -0.5}
    designs = {"whole": SPACE.whole, "half": SPACE.uniform(4, 8, 1), "neurons 4": SPACE.uniform(4, 4)}
    designs |= {f"heads {count}": SPACE.uniform(count, 8) for count in (2, NONE)}
    prices = {TEACHER: [30.0, 1.0]}
    for name, design in designs.items():
        prices[name] = [1 + sum(map(attention.get, design.heads)) + sum(map(ffn.get, design.neurons)), 1.0]
    costs = fit_costs(prices, designs, SPACE)
    smallest = Design((0, 1, 2), (4, NONE, NONE), (4, 4, 4))
    assert costs.heads[0] == sorted(costs.heads[0], reverse=True)
    assert min(heads + neurons for heads in costs.heads[0] for neurons in costs.neurons[0]) >= 0
    assert costs.predict(smallest, SPACE)[0] >= costs.predict(SPACE.uniform(4, 4, 1), SPACE)[0]


def test_gated_ffns_may_become_one_map() -> None:
    config, family = transformers.LlamaConfig(), FAMILIES["llama"]
    assert find_space(sizes_of(config, family), family, config).neurons[-1] == NONE


def test_samples_are_divided_by_content() -> None:
    rows = [{"input_ids": np.arange(at, at + 3 + at % 5)} for at in range(100)]
    first, second = divide([*rows, *rows[:7]], None, 0), divide(rows[::-1], None, 0)
    parts = [first.train, first.choices, first.held_out]
    assert [len(part) for part in parts] == [80, 10, 10]
    seen = [row["input_ids"].tobytes() for part in parts for row in part]
    assert len(set(seen)) == 100
    assert first.digest == second.digest
    assert first.digest != divide(rows, None, 1).digest
    calibration = first.calibration(20)["input_ids"]  # short ones first: their batches have little padding
    lengths = sorted(len(row["input_ids"]) for row in first.train[:20])
    assert [int(np.count_nonzero(row[1:])) + 1 for row in calibration] == lengths
    judged = divide(rows, rows[:30], 0)  # what is judged is not learned
    assert (len(judged.train), len(judged.choices), len(judged.held_out)) == (63, 7, 30)
    with refusal("argument-value", "data must hold 40 distinct samples"):
        divide(rows[:30] * 3, None, 0)
    mixed = divide([*rows, *rows[:7]], None, 0, ["a"] * 40 + ["b"] * 67)  # what both hold is of the first
    assert mixed.train_files.count("a") + mixed.held_files.count("a") <= 40
    for row, file in zip(mixed.train, mixed.train_files, strict=True):
        assert (int(row["input_ids"][0]) < 40) == (file == "a")


def test_batches_hold_samples_of_similar_length_and_every_sample() -> None:
    random = np.random.default_rng(0)
    rows = [{"input_ids": np.zeros(size, np.int64)} for size in random.integers(1, 60, 320)]
    order = training_order(rows, steps=20, size=16, seed=0)
    assert len(order) == 320
    assert sorted(order) == list(range(320))  # one epoch
    lengths = np.array([len(rows[at]["input_ids"]) for at in order]).reshape(20, 16)
    assert (lengths.max(1) - lengths.min(1)).mean() < 6
    assert training_order(rows, 20, 16, 1) != order


def test_tokens_without_a_mask_all_count(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    row = read_rows(tmp_path / "tokens.npy", tmp_path, None)[2]
    assert row["input_ids"].tolist() == [8, 9, 10, 11]
    assert row["attention_mask"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("qualities", "best"), [((0.9, 0.8, 1.0), RATES[1]), ((0.6, 0.7, 0.8), RATES[3])])
def test_a_target_gets_the_learning_rate_that_suits_it(
    qualities: tuple[float, ...], best: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The best after short trainings of its first candidate, until neighbours are worse; none that diverges.

    Kept layers have a rate of their own, and as many steps as the best candidate.
    """
    kept, trained, values = 3, [], dict(zip(RATES[1:], qualities, strict=True))

    def train_short(run: Any, target: Any, row: Any, config: TrainingConfig) -> dict[str, float]:
        trained.append((row["number"], config.learning_rate, config.steps))
        if row["number"] == kept:
            return {"value": 0.1 * RATES.index(config.learning_rate) - 1, "steps": config.steps}
        if config.learning_rate not in values:
            raise ShdError("not-finite", "a model must give finite outputs; got NaN or infinity")
        return {"value": values[config.learning_rate] - row["number"], "steps": config.steps}

    monkeypatch.setattr(students, "_train_short", train_short)
    monkeypatch.setattr(students, "_make", lambda *_: SimpleNamespace(student=None))
    run: Any = SimpleNamespace(options=OPTIONS, search=Search(), judge=lambda use: None, find=lambda name, make: {})
    config = TrainingConfig([], tmp_path, 0, 0, half=False, learning_rate=RATES[1])
    (target,) = OPTIONS.targets([8.0, 1.0])
    tried, chosen = students.compare(run, target, [{"keeps_layers": number == kept} for number in range(4)], config)
    assert (len(tried), chosen["number"], chosen["learning_rate"]) == (4, 0, best)
    # All after 100 steps, the better half after 300, kept layers as well.
    runs = [(0, 100), (1, 100), (2, 100), (kept, 100), (0, 300), (1, 300), (kept, 300)]
    assert trained[-7:] == [(number, RATES[3] if number == kept else best, steps) for number, steps in runs]
    assert {steps for _, _, steps in trained[:-7]} == {100}
    run.options = replace(OPTIONS, learning_rate=RATES[2])
    assert students.compare(run, target, [{"keeps_layers": False}], config)[1]["learning_rate"] == RATES[2]


def test_every_second_text_is_also_a_crop() -> None:
    rows = [{"input_ids": np.arange(size), "attention_mask": np.ones(size, np.int64)} for size in (7, 9, 8, 9, 40)]
    crops = add_crops(rows, 0)[len(rows) :]
    assert len(crops) == 2  # the first is too short
    for row, crop in zip(rows[2::2], crops, strict=True):
        ids = crop["input_ids"]
        assert (ids[0], ids[-1]) == (0, row["input_ids"][-1])
        assert 5 <= len(ids) <= min(len(row["input_ids"]) - 1, 17)
        np.testing.assert_array_equal(np.diff(ids[1:-1]), 1)
        assert crop["attention_mask"].shape == ids.shape


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "faster, ms, mb or at_least must be given"),
        ({"faster": (2.0,), "mb": (1.0,)}, "must not be mixed"),
        ({"faster": (0.0,)}, "faster"),
        ({"ms": (2.0,)}, "ms must go with one batch and one length"),
        ({"at_least": 0.9, "kept_layers": True}, "kept_layers must go with faster, ms or mb"),
        ({"at_least": 1.5}, "at_least must be a finite number above 0 and at most 1"),
        ({"faster": (2.0,), "minutes": -1.0}, "minutes"),
    ],
)
def test_wishes_that_contradict_each_other(changes: dict[str, Any], said: str) -> None:
    with refusal("argument-value", said):
        CompressOptions(**changes)


def test_only_a_dry_run_needs_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text("{}")
    np.savez("d.npz", input_ids=np.ones((2, 3), np.int64))
    monkeypatch.setattr("shd_torch.compress.run.forecast", lambda *_, **__: ["in all about 5 min"])
    words = ["compress", "teacher", "--data", "d.npz", "--faster", "2"]
    result = invoke(load_app(), [*words, "--dry-run"])
    assert (result.exit_code, result.output) == (0, "in all about 5 min\n")
    result = invoke(load_app(), words)
    assert result.exit_code == 1
    assert "--out must be given" in result.output


def write_teacher(folder: Path, kind: str, **changes: int) -> tuple[Path, Path]:
    """A small random teacher and data for it."""
    random, teacher = np.random.default_rng(0), folder / "teacher"
    name, sizes = CLASSES[kind]
    save_model(teacher, name, **{"vocab_size": 40, "max_position_embeddings": 16} | sizes | changes)
    if kind == "vit":
        arrays: dict[str, Any] = {"pixel_values": random.standard_normal((80, 3, 8, 8)).astype(np.float32)}
    else:
        mask = (np.arange(12) < random.integers(4, 13, 80)[:, None]).astype(np.int64)
        arrays = {"input_ids": random.integers(3, 40, (80, 12)) * mask, "attention_mask": mask}
    if kind == "classifier":  # one that answers everything alike is refused
        model = load_teacher(teacher)
        with torch.no_grad():
            logits = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).logits
            model.classifier.bias -= logits.mean(0)
        model.save_pretrained(teacher)
    if kind == "sentences":
        save_modules(teacher, "Normalize", pooling={"pooling_mode_mean_tokens": True})
    if kind == "decoder":  # tokens alone, which all count
        np.save(folder / "data.npy", arrays["input_ids"])
        return teacher, folder / "data.npy"
    np.savez(folder / "data.npz", **arrays)
    return teacher, folder / "data.npz"


def check_result(folder: Path, data: Path) -> dict[str, Any]:
    """The graphs, the model and the page agree with each other."""
    import onnxruntime

    document: dict[str, Any] = json.loads((folder / "compress.json").read_text())
    student = load_student(folder)
    rows = read_rows(data, folder, None)[:1]
    batch = {name: array[None] for name, array in rows[0].items()}
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    feed = {one.name: batch[one.name] for one in session.get_inputs()}
    with torch.no_grad():
        output = student(**{name: torch.tensor(array) for name, array in batch.items()})[0]
    np.testing.assert_allclose(session.run(None, feed)[0], output.numpy(), atol=1e-4)
    page = (folder / "README.md").read_text()
    entry = document["students"][0]
    assert entry["chosen"]["text"] in page
    for kind, quality in entry["quality"].items():
        graph = folder / "onnx" / ("model.onnx" if kind == "float" else "model.int8.onnx")
        assert onnxruntime.InferenceSession(graph).run(None, feed)[0].shape == output.shape
        assert f"{quality['value']:.4f}" in page
    return document


@pytest.mark.slow
def test_pixels_without_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One layer with one head, of which only neurons can be cut: the smallest search, and the page on it.

    The data are of two files, one of which is thin.
    """
    teacher, data = write_teacher(tmp_path, "vit", num_hidden_layers=1, num_attention_heads=1)
    pixels = np.load(data)["pixel_values"]
    files = [tmp_path / "many.npy", tmp_path / "few.npy"]
    for file, part in zip(files, (pixels, pixels[:3] + 1), strict=True):
        np.save(file, part)
    monkeypatch.setattr(stages, "LEAST", 4)
    # With SHD, for which there is no time, and of the samples as many as the least training takes.
    monkeypatch.setattr(stages, "_searches", lambda: iter([Search(fractions=(0.5,), steps=(1, 2))]))
    monkeypatch.setattr(stages, "_CACHED", 0.0)
    told: list[str] = []
    options = CompressOptions(mb=(0.0247,), batch=(1,), minutes=0.001, candidates=1, int8=False)
    document = compress(teacher, files, options, out=tmp_path / "student", say=told.append)
    assert document["samples"]["train"] == 32
    assert [line.partition(":")[0] for line in told] == list(stages.STAGES[1:-1])
    assert all(line.endswith(" left in all") for line in told)
    assert any(f"{files[1]} has" in remark for remark in document["remarks"])
    (student,) = document["students"]
    assert student["bytes"]["float"] <= 24_700
    assert student["chosen"]["design"]["kept"] == [0]
    assert student["chosen"]["design"]["neurons"][0] < 32
    assert set(student["quality"]) == {"float"}
    assert str(files[0]) in student["by_file"]
    assert document["teacher"]["by_file"].keys() == student["by_file"].keys()
    assert "Quality by file" in (tmp_path / "student" / "README.md").read_text()
    assert student["shd"]["gains"]
    assert student["learning_rate"] in RATES
    check_result(tmp_path / "student", data)

    def compress_as_before(teacher: str, data: str, options: CompressOptions, *, out: str) -> dict[str, Any]:
        assert options.faster
        return document

    monkeypatch.setattr("shd_torch.compress.compress", compress_as_before)
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], "compress.md", "exec"), {})
    assert capsys.readouterr().out.startswith(student["chosen"]["text"])


@pytest.mark.slow
def test_shd_teaches_layers_of_one_number_of_heads(tmp_path: Path) -> None:
    """Where heads differ by layer: the most frequent number; the term follows the maps of these layers alone."""
    teacher, data = write_teacher(tmp_path, "classifier", num_hidden_layers=4, num_attention_heads=4)
    samples = divide(read_rows(data, teacher, None), None, 0)
    with Unfinished(tmp_path / "run", {}) as keeper:
        run = Run(teacher, OPTIONS, keeper, lambda *_: None, samples)
        config = replace(students.prepare_training(run), steps=1)
        target = OPTIONS.targets([1.0, 1.0])[0]
        row = {"number": 0, "design": asdict(Design((0, 1, 2, 3), (4, 2, NONE, 2), (32, 32, 16, 32)))}
        taught = students._with_maps(run, target, row, config, "maps")
        form = CacheReader(taught.cache).manifest.attention
        assert (form.num_student_heads, form.num_student_layers) == (2, 3)
        assert [(layer.student_layer, layer.teacher_layer) for layer in form.layers] == [(1, 1), (2, 3)]
        trained = []
        for has_maps in (False, True):
            student = students._make(run, target, 0, row).student
            train(run.task, student, 4, replace(taught, shd=has_maps), tmp_path / f"training-{has_maps}")
            trained.append(student.state_dict())
    query = "bert.encoder.layer.3.attention.self.query.weight"  # no layer above it would change it
    assert not torch.equal(trained[0][query], trained[1][query])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MEGABYTES)
def test_kinds_of_teachers(kind: str, tmp_path: Path) -> None:
    teacher, data = write_teacher(tmp_path, kind)
    options = replace(OPTIONS, mb=(MEGABYTES[kind],))
    compress(teacher, data, options, out=tmp_path / "student")
    document = check_result(tmp_path / "student", data)
    assert document["students"][0]["shd"]["why"]
    if kind == "classifier":
        with refusal("argument-value", "met by some student; got 1000 times faster: the smallest student is about"):
            compress(teacher, data, replace(options, mb=(), faster=(1000.0,)), out=tmp_path / "other")


@pytest.mark.nightly
def test_kept_layers_are_trained_as_long_for_the_same_target(tmp_path: Path) -> None:
    teacher, data = write_teacher(tmp_path, "sentences", num_hidden_layers=3)
    options = replace(OPTIONS, mb=(0.0466,), kept_layers=True)  # the whole teacher fits, in int8
    compress(teacher, data, options, out=tmp_path / "students")
    page = (tmp_path / "students" / "README.md").read_text()
    chosen, rival = json.loads((tmp_path / "students" / "compress.json").read_text())["students"]
    assert (chosen["name"], rival["name"]) == ("0.0466mb", "0.0466mb-kept")
    assert (chosen["chosen"]["keeps_layers"], rival["chosen"]["keeps_layers"]) == (False, True)
    assert chosen["steps"] == rival["steps"]  # the least number, as there is no time
    assert "## Kept layers, 0.0466 mb" in page
    for student in (chosen, rival):
        made = load_student(tmp_path / "students" / student["name"])
        assert made.config.num_hidden_layers == len(student["chosen"]["design"]["kept"])


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_graphs_are_timed_at_the_length_of_the_data(tmp_path: Path) -> None:
    teacher, data = write_teacher(tmp_path, "classifier")
    samples = divide(read_rows(data, teacher, None), None, 0)
    with Unfinished(tmp_path / "run", {}) as keeper:
        (length,) = Run(teacher, replace(OPTIONS, length=()), keeper, lambda *_: None, samples).options.length
    assert length % 8 == 0
    assert length - 8 < np.median([len(row["input_ids"]) for row in samples.train]) <= length


def test_a_folder_counts_once_it_is_vouched_for_and_as_it_was_then(tmp_path: Path) -> None:
    teacher, data = write_teacher(tmp_path, "classifier")
    samples = divide(read_rows(data, teacher, None), None, 0)
    target = OPTIONS.targets([1.0])[0]
    row = {"number": 0, "design": asdict(Design((0, 1), (2, 2), (16, 32)))}
    with Unfinished(tmp_path / "run", {}) as keeper:
        run = Run(teacher, OPTIONS, keeper, lambda *_: None, samples)
        folder = keeper.folder / f"shrunk-{target.name}-0"
        folder.mkdir()
        (folder / "shrink.json").write_text("{}")  # of a run that was killed before it wrote the rest
        students._make(run, target, 0, row)
        before = contents(folder)
        students._make(run, target, 0, row)
        assert contents(folder) == before
        weights = folder / "model.safetensors"
        weights.write_bytes(before["model.safetensors"][:-1] + b"\7")
        with refusal("read-failed", f"damaged files {folder.name}"):
            students._make(run, target, 0, row)


@pytest.mark.nightly
def test_a_storm_of_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At random moments of a few stages each, until the run comes to its end between them or after them."""
    teacher, data = write_teacher(tmp_path, "classifier")
    options = replace(OPTIONS, minutes=1e-4)  # the least number of steps, whatever a step takes
    monkeypatch.setattr(students, "half_is_faster", lambda *_: False)  # which is measured
    draw = random.Random(0)

    def run(name: str, stage: int | None = None, delay: float = 0.0) -> int:
        seen = []

        def tell(done: int, total: int, what: str) -> None:
            if seen[-1:] != [what]:
                seen.append(what)
                if len(seen) == stage:
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # threads do not live on in a child
            try:
                compress(teacher, data, options, out=tmp_path / name, progress=tell)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1]

    assert run("whole") == 0
    ends = [
        run("student", draw.randint(2, 6), draw.uniform(0, 1.5))
        for _ in range(KILLS)
        if not (tmp_path / "student").exists()
    ]
    assert {signal.SIGKILL} <= {*ends} <= {0, signal.SIGKILL}
    assert (tmp_path / "student").exists() or run("student") == 0
    if list(tmp_path.glob(".*")):  # killed when all was done: the next run refuses, and clears away
        assert run("student") != 0
    assert contents(tmp_path / "student") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))
