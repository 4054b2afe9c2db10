"""Logits and hidden states from graph to cache and back, with every form of attention beside them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.attention_graphs import language_model, saved, token_samples
from support.calls import calls_of
from support.plain_kd import topk_targets
from support.refusals import refusal

from shd_ref.cache import CacheReader, CacheWriter, Hidden, Logits, Receipt, SampleRecord, sample_key, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES = 14
LENGTH = 8
STATES = ("state_0", "state_1")


def make_inputs(front: bool = False) -> dict[str, NDArray[Any]]:
    inputs = token_samples(NUM_SAMPLES, LENGTH, least=3)
    inputs["attention_mask"][::2, 0] &= not front
    return inputs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(language_model(), tmp_path_factory.mktemp("teacher"))


def run_alone(teacher: Path, inputs: dict[str, NDArray[Any]], index: int) -> tuple[dict[str, Any], slice]:
    """What the teacher itself gives a sample, up to its last position; and where its record begins."""
    model = onnx.load(teacher)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in STATES)
    end = int(np.flatnonzero(inputs["attention_mask"][index])[-1]) + 1
    feeds = {name: array[index : index + 1, :end] for name, array in inputs.items()}
    names = ["logits", *STATES]
    values = onnxruntime.InferenceSession(model.SerializeToString()).run(names, feeds)
    return {name: value[0] for name, value in zip(names, values, strict=True)}, end


def records_of(folder: Path, inputs: dict[str, NDArray[Any]]) -> list[SampleRecord]:
    reader = CacheReader(folder)
    found = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        end = int(np.flatnonzero(mask)[-1]) + 1
        found.append(reader.read(sample_key({"input_ids": ids[:end], "attention_mask": mask[:end]})))
    return found


def forms_of(folder: Path) -> tuple[Logits, Hidden]:
    manifest = CacheReader(folder).manifest
    assert manifest.logits is not None
    assert manifest.hidden is not None
    return manifest.logits, manifest.hidden


@pytest.mark.parametrize(
    ("form", "codec", "padding"),
    [("maps", "topk", "front"), ("factored", "topk", "behind"), ("factored", "float16", "front")],
)
def test_records_are_what_the_teacher_gives(
    teacher: Path, tmp_path: Path, form: str, codec: str, padding: str
) -> None:
    inputs = make_inputs(front=padding == "front")
    temperature = 1.0 if codec == "float16" else 2.0
    options = PrecomputeOptions(
        num_student_heads=2,
        form=form,
        logits=codec,
        logits_top=6,
        logits_temperature=temperature,
        hidden=(0, 1),
        hidden_codec="int8" if codec == "topk" else "float16",
    )
    summary = precompute(teacher, inputs, tmp_path / "cache", options, RunOptions(batch_size=4))
    assert verify_cache(tmp_path / "cache").ok
    assert recheck_records(tmp_path / "cache", teacher, inputs, num_records=NUM_SAMPLES).records == NUM_SAMPLES
    logits, hidden = forms_of(tmp_path / "cache")
    errors = summary.errors
    assert errors["logits"] is not None
    assert errors["hidden"] is not None
    assert errors["logits"].rows > 0
    assert 0 < errors["hidden"].relative_max < 0.02
    for index, record in enumerate(records_of(tmp_path / "cache", inputs)):
        expected, end = run_alone(teacher, inputs, index)
        kept = slice(record.first, end)
        counted = inputs["attention_mask"][index, kept].astype(bool)
        assert counted.all() == (padding == "behind" or form == "factored" or bool(index % 2))
        rows = expected["logits"][kept]
        stored: Any = logits.decode(record)
        if codec == "float16":
            np.testing.assert_allclose(stored[counted], rows[counted], rtol=2e-3, atol=1e-3)
        else:
            assert stored.temperature == temperature
            wanted = topk_targets(rows, 6, temperature=temperature)
            probs = np.exp(stored.log_probs)
            np.testing.assert_array_equal(stored.ids[counted, :6], wanted.ids[counted])
            np.testing.assert_allclose(probs[counted], np.exp(wanted.log_probs)[counted], atol=0.01)
            np.testing.assert_allclose(probs.sum(-1) + np.exp(stored.log_tail), 1.0, atol=1e-6)
        for layer in (0, 1):
            found, states = hidden.decode(record, layer), expected[STATES[layer]][kept]
            assert not found[~counted].any()  # what padding gives is not stored
            limit = np.abs(states).max() / 254 + 1e-3
            np.testing.assert_allclose(found[counted], states[counted], atol=limit)


def test_a_padded_vocabulary_is_cut_where_it_has_no_mass(tmp_path: Path) -> None:
    onnx.save(language_model(padding=6), tmp_path / "teacher.onnx")
    options = {"num_student_heads": 2, "logits": "topk", "logits_top": 4}
    precompute(tmp_path / "teacher.onnx", make_inputs(), tmp_path / "c", PrecomputeOptions(**options, vocab_size=50))
    logits = CacheReader(tmp_path / "c").manifest.logits
    assert logits is not None
    assert (logits.vocab_size, logits.padded_vocab_size) == (50, 56)
    for size, message in ((40, "must cut padding alone"), (57, "must be at most 56, the columns of logits; got 57")):
        wrong = PrecomputeOptions(**options, vocab_size=size)
        with refusal("argument-value", f"vocab_size {message}") as caught:
            precompute(tmp_path / "teacher.onnx", make_inputs(), tmp_path / "d", wrong)
        assert ("sample " in str(caught.value)) == (size == 40)
        assert not (tmp_path / "d").exists()  # and the right size may still go there


def test_a_classifier_has_one_row_a_sample(tmp_path: Path) -> None:
    teacher, inputs = tmp_path / "teacher.onnx", make_inputs()
    onnx.save(language_model(head="sample"), teacher)
    options = PrecomputeOptions(num_student_heads=2, logits="float16")
    for size in (2, 32):  # of two, the first ones are as long as each other
        with refusal("graph-unsupported", "with their padding"):  # which its head reads too
            precompute(teacher, inputs, tmp_path / "cache", options, RunOptions(batch_size=size))
    precompute(teacher, inputs, tmp_path / "cache", options, RunOptions(batch_size=1))
    logits = CacheReader(tmp_path / "cache").manifest.logits
    assert logits is not None
    assert logits.rows == "sample"
    for index, record in enumerate(records_of(tmp_path / "cache", inputs)):
        stored: Any = logits.decode(record)
        assert stored.shape == (1, 50)
        np.testing.assert_allclose(stored[0], run_alone(teacher, inputs, index)[0]["logits"], atol=5e-3)


def test_logits_of_some_positions_alone_are_refused(tmp_path: Path) -> None:
    onnx.save(language_model(head="last"), tmp_path / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=2, logits="topk")
    with refusal("graph-unsupported", "logits must have a row for each of 8 positions"):
        precompute(tmp_path / "teacher.onnx", make_inputs(), tmp_path / "cache", options)
    assert not (tmp_path / "cache").exists()


def test_batches_are_smaller_where_logits_would_take_too_much(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PrecomputeOptions(num_student_heads=2, logits="topk", logits_top=4, hidden=(0, 1))
    monkeypatch.setattr("shd_ref.teacher.run.teacher.TARGET_BYTES", 2 * 4 * (50 + 2 * 12) * LENGTH)
    with calls_of("run_batch") as calls:
        precompute(teacher, make_inputs(), tmp_path / "cache", options, RunOptions(samples_per_shard=NUM_SAMPLES))
    sizes = [call["batch"].arrays["input_ids"].shape for call in calls]
    # The widths of rows, the first samples, and one of them alone and in company.
    assert sizes[:4] == [(1, 3), (2, LENGTH), (1, 3), (2, 4)]
    after_checks = sizes[4:]
    assert all(samples > 1 and samples * length <= 2 * LENGTH for samples, length in after_checks[:-1])
    assert verify_cache(tmp_path / "cache").ok
    with calls_of("run_batch") as calls:
        recheck_records(tmp_path / "cache", teacher, make_inputs())
    assert {len(call["batch"].indices) for call in calls} == {1}  # as a record is its sample's alone


@pytest.mark.parametrize(("name", "said"), [("logits", "logits row"), ("H01", "hidden layer 1 row")])
def test_another_teachers_rows_are_found_out(teacher: Path, tmp_path: Path, name: str, said: str) -> None:
    """As if the cache had been filled by something else under the teacher's name."""
    options = PrecomputeOptions(form="none", logits="topk", logits_top=4, hidden=(1,))
    made = CacheReader(precompute(teacher, make_inputs(), tmp_path / "made", options).folder)
    form, _ = forms_of(tmp_path / "made")
    writer = CacheWriter(tmp_path / "cache", made.manifest)
    for shard in writer.missing_shards():
        receipt = Receipt.read(made.folder, shard, made.manifest)
        turned = []
        for record in (made.read(record.key) for record in receipt.records):
            count = record.parts["logits"].size // form.row_sizes[0]
            parts = {part: rows.reshape(count, -1) for part, rows in record.parts.items()}
            parts[name] = parts[name][::-1]
            turned.append(SampleRecord(index=record.index, key=record.key, length=record.length, parts=parts))
        writer.write_shard(shard, turned, receipt.errors)
    writer.seal()
    with refusal("cache-mismatch", f"{said} .* must equal what the teacher gives now"):
        recheck_records(tmp_path / "cache", teacher, make_inputs())


def test_a_sample_whose_logits_are_not_finite_is_named(tmp_path: Path) -> None:
    teacher, inputs, token = tmp_path / "teacher.onnx", make_inputs(), 13
    counted = inputs["attention_mask"].astype(bool)
    inputs["input_ids"][inputs["input_ids"] == token] = 0
    inputs["input_ids"][4, 1] = inputs["input_ids"][5, LENGTH - 1] = token
    assert not counted[5, LENGTH - 1]  # padding may be anything
    model = language_model()
    model.graph.node[-1].output[0] = "clean"
    for name, array in (("token", np.int64(token)), ("nan", np.float32(np.nan)), ("axis", np.int64([-1]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    for kind, names, output in (
        ("Equal", ["input_ids", "token"], "met"),
        ("Unsqueeze", ["met", "axis"], "column"),
        ("Where", ["column", "nan", "clean"], "logits"),
    ):
        model.graph.node.append(onnx.helper.make_node(kind, names, [output]))
    onnx.save(model, teacher)
    options = PrecomputeOptions(num_student_heads=2, logits="topk", logits_top=4)
    with refusal("not-finite", r"sample 4 .*: the teacher gives NaN or infinity in its logits"):
        precompute(teacher, inputs, tmp_path / "a", options)
