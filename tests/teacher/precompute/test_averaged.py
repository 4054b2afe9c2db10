"""The mean logits of several teachers, from one pass over all (CACHE-163)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.attention_graphs import encoder_layer, language_model, token_samples
from support.commands import shd
from support.plain_kd import topk_targets
from support.refusals import refusal

from shd_ref.cache import CacheReader, sample_key, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES, LENGTH, TOP = 10, 7, 4
RUN = RunOptions(batch_size=4, samples_per_shard=2, num_threads=1)
make_inputs = partial(token_samples, NUM_SAMPLES, LENGTH, least=3)


def rename_weights(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Another model of the same architecture."""
    rng = np.random.default_rng(seed)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "value" and len(attribute.t.dims) == 2:
                weight = onnx.numpy_helper.to_array(attribute.t)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(rng.permutation(weight)))
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2:
            weight = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(rng.permutation(weight), tensor.name))
    return model


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("teachers")
    models = [
        language_model(),
        language_model(num_layers=1, num_heads=5),
        rename_weights(language_model(padding=6), 1),
    ]
    paths = [folder / f"{name}.onnx" for name in ("first", "second", "third")]
    for model, path in zip(models, paths, strict=True):
        onnx.save(model, path)
    return paths


def options_of(others: list[Path], **changes: Any) -> PrecomputeOptions:
    options = PrecomputeOptions(
        num_student_heads=2, logits="topk", logits_top=TOP, logits_bits=16, with_teachers=tuple(others)
    )
    return replace(options, **changes)


def mean_of(teachers: list[Path], ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float64]:
    rows = [
        onnxruntime.InferenceSession(path).run(["logits"], {"input_ids": ids[None], "attention_mask": mask[None]})[0]
        for path in teachers
    ]
    return np.mean([each[0, :, :50].astype(np.float64) for each in rows], axis=0)


@pytest.mark.parametrize("codec", ["topk", "float16"])
def test_a_row_is_that_of_the_mean(teachers: list[Path], tmp_path: Path, codec: str) -> None:
    inputs = make_inputs()
    changes = {} if codec == "float16" else {"logits_temperature": 2.0}
    options = options_of(teachers[1:], logits=codec, vocab_size=50, **changes)
    precompute(teachers[0], inputs, tmp_path / "cache", options, RUN)
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    form = reader.manifest.logits
    assert form is not None
    assert [each.name for each in form.with_teachers] == ["second.onnx", "third.onnx"]
    assert [each.padded_vocab_size for each in form.with_teachers] == [None, 56]
    assert form.padded_vocab_size is None
    differs = 0.0
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        end = int(mask.sum())
        record = reader.read(sample_key({"input_ids": ids[:end], "attention_mask": mask[:end]}))
        mean = mean_of(teachers, ids[:end], mask[:end])
        found: Any = form.decode(record)
        if codec == "float16":
            np.testing.assert_allclose(found, mean, rtol=2e-3, atol=2e-3)
            continue
        wanted = topk_targets(mean, TOP, temperature=2.0)
        np.testing.assert_array_equal(found.ids[:, :TOP], wanted.ids)
        probs = np.exp(found.log_probs) if codec == "topk" else found.weights[:, :TOP]
        np.testing.assert_allclose(probs, np.exp(wanted.log_probs), atol=1e-4)
        alone = topk_targets(mean_of(teachers[:1], ids[:end], mask[:end]), TOP, temperature=2.0)
        differs = max(differs, float((alone.ids != wanted.ids).mean()))
    assert codec == "float16" or differs > 0.2
    again = recheck_records(tmp_path / "cache", teachers[0], inputs, with_teachers=teachers[1:])
    assert again.records == 8


def test_another_list_of_teachers_is_another_job(teachers: list[Path], tmp_path: Path) -> None:
    """Also of the same names."""
    inputs, cache, second = make_inputs(), tmp_path / "cache", tmp_path / "second.onnx"
    second.write_bytes(teachers[1].read_bytes())
    precompute(teachers[0], inputs, cache, options_of([second, teachers[2]], vocab_size=50), RUN)
    onnx.save(rename_weights(onnx.load(second), 4), second)
    for others in ([], [second, teachers[2]], [teachers[2], teachers[1]]):
        with refusal("cache-mismatch", "with_teachers"):
            precompute(teachers[0], inputs, cache, options_of(others, vocab_size=50), RUN)
        with refusal("cache-mismatch" if others else "argument-value"):
            recheck_records(cache, teachers[0], inputs, with_teachers=others)


WRONG: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], str, str]] = {
    "other classes": (lambda: language_model(padding=6), {}, "argument-value", "classes .* 50; got 56.*--vocab-size"),
    "fewer classes": (lambda: language_model(vocabulary=42), {"vocab_size": 50}, "argument-value", "50; got 42"),
    "no padding": (lambda: language_model(vocabulary=56), {"vocab_size": 50}, "argument-value", "cut padding alone"),
    "other positions": (lambda: language_model(head="last"), {}, "graph-unsupported", r"positions, .*got .*1\)"),
    "one row a sample": (lambda: language_model(head="sample"), {}, "graph-unsupported", "samples and positions"),
    "other inputs": (encoder_layer, {}, "inputs-invalid", "must hold attention_mask, input_ids, mask, x"),
    "a teacher twice": (language_model, {"with_teachers": (Path("a.onnx"),) * 2}, "argument-value", "once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_teachers_that_do_not_fit_are_refused_before_anything_is_written(
    teachers: list[Path], tmp_path: Path, case: str
) -> None:
    make, changes, code, message = WRONG[case]
    onnx.save(make(), tmp_path / "other.onnx")
    inputs = {name: array % 42 if name == "input_ids" else array for name, array in make_inputs().items()}
    with refusal(code, message):
        precompute(teachers[0], inputs, tmp_path / "cache", options_of([tmp_path / "other.onnx"], **changes), RUN)
    assert not (tmp_path / "cache").exists()


def test_the_commands_take_and_name_all_teachers(teachers: list[Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **make_inputs())
    data, cache, page = ("--inputs", tmp_path / "data.npz"), tmp_path / "cache", tmp_path / "report.html"
    others = ("--with-teacher", teachers[1], "--with-teacher", teachers[2], "--vocab-size", 50)
    asked = (teachers[0], *data, "--student-heads", 2, "--logits", "topk", "--logits-top", 4, *others)
    planned = shd("plan", *asked, "--samples", 2, "--json")
    assert f"--with-teacher {teachers[1]} --with-teacher {teachers[2]}" in planned
    words = shd("precompute", *asked, "--out", cache).rpartition("next: shd ")[2].split()
    assert words[words.index("--with-teacher") + 1] == str(teachers[1])
    shd(*words)
    assert "mean with second.onnx, third.onnx" in " ".join(shd("ls", cache).replace("│", " ").split())
    alone = shd("verify", cache, "--teacher", teachers[0], *data, code=1)
    assert "'second.onnx', 'third.onnx'" in " ".join(alone.split())
    shd("report", cache, "--out", page, "--teacher", teachers[0], *data)
    assert "mean with second.onnx, third.onnx" in page.read_text(encoding="utf-8")
