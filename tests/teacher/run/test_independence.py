"""Maps are those of single samples, or refused: shown on the first samples of the data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.attention_graphs import (
    GraphBuilder,
    encoder_layer,
    only_site,
    random_projection,
    reason_of,
    saved,
    token_teacher,
)
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader
from shd_ref.cli import load_app
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

HEADS, WIDTH = 2, 6
Change = Callable[[GraphBuilder, str], str]

WINDOWS = "maps per sample"
NOT_ITS_OWN = "change with the other samples .*run to run.*evaluation mode.*batch_first=True.*over the batch"


def attention(
    change: Change | None = None,
    *,
    window: int | None = None,
    shifted: bool = False,
    batch: int | str = "batch",
    length: int | str = 8,
    logits_of: Change | None = None,
) -> onnx.ModelProto:
    """Self-attention of two heads on ``x (batch, length, 6)``, changed before, or with other logits ``(B, H, L, L)``.

    It is in windows of so many positions where they are given; shifted ones are rolled by half a window, and each has
    its mask, as in a Swin layer.
    """
    build = GraphBuilder()
    source = "x" if change is None else change(build, "x")
    if shifted:
        parts = [build.op("Slice", source, [a], [b], [1]) for a, b in ((2, 8), (0, 2))]
        source = build.op("Concat", *parts, axis=1)
    if window is not None:
        source = build.op("Reshape", source, [-1, window, WIDTH])

    def heads(seed: int) -> str:
        projected = build.op("MatMul", source, random_projection(WIDTH, WIDTH, seed))
        split = build.op("Reshape", projected, [0, 0, HEADS, WIDTH // HEADS])
        return build.op("Transpose", split, perm=[0, 2, 1, 3])

    values = heads(3)
    if logits_of is None:
        logits = build.op("MatMul", heads(1), build.op("Transpose", heads(2), perm=[0, 1, 3, 2]))
    else:
        logits = logits_of(build, "x")
    if shifted and window is not None:
        mask = np.zeros((1, 8 // window, 1, window, window), np.float32)
        mask[:, -1, :, : window // 2, window // 2 :] = mask[:, -1, :, window // 2 :, : window // 2] = -100
        shape = np.array([-1, 8 // window, HEADS, window, window])
        masked = build.op("Add", build.op("Reshape", logits, shape), mask)
        logits = build.op("Reshape", masked, [-1, HEADS, window, window])
    context = build.op("MatMul", build.op("Softmax", logits, axis=-1), values)
    output = build.project(context, WIDTH, 7, 4)
    return build.model({"x": (TensorProto.FLOAT, [batch, length, WIDTH])}, [output])


def normalised(build: GraphBuilder, source: str) -> str:
    """Batch normalisation in training mode."""
    axes = build.const(np.array([0, 1]))
    centred = build.op("Sub", source, build.op("ReduceMean", source, axes))
    variance = build.op("ReduceMean", build.op("Mul", centred, centred), axes)
    return build.op("Div", centred, build.op("Sqrt", variance))


def leaked(build: GraphBuilder, source: str) -> str:
    """A little of what samples have in common: more than rounding of float32, less than that of bfloat16."""
    mean = build.op("ReduceMean", source, [0])
    return build.op("Add", source, build.op("Mul", mean, np.float32(0.14)))


def dropped(build: GraphBuilder, source: str) -> str:
    """Dropout in training mode, as noise."""
    return build.op("Mul", source, build.op("RandomUniformLike", source))


def quantised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx")
    return onnx.load(folder / "int8.onnx")


def sequence_first(*shape: int | str) -> onnx.ModelProto:
    """``torch.nn.MultiheadAttention`` as it is: ``x (L, B, D)``, maps ``(B H, L, L)``."""
    model = encoder_layer(layout="batch-folded", sequence_first=True)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False):
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    return model


ACCEPTED = {
    "batch of four": attention(batch=4),
    "a shifted window that is the sample": attention(window=8, shifted=True),
    "half precision": encoder_layer(float16=True),
    "token numbers": token_teacher(),
}
REFUSED = {
    "shifted windows": (attention(window=4, shifted=True), WINDOWS),
    "sequence first": (sequence_first("batch", "length"), NOT_ITS_OWN),
    "batch normalisation": (attention(normalised, length="length"), NOT_ITS_OWN),
    "samples with a little of their mean": (attention(leaked), NOT_ITS_OWN),
    "dropout": (attention(dropped), NOT_ITS_OWN),
}


def samples_for(model: onnx.ModelProto, count: int = 7) -> dict[str, NDArray[Any]]:
    """Samples of random numbers, of eight positions where the graph leaves it open."""
    rng, data = np.random.default_rng(1), {}
    for value in model.graph.input:
        shape = [count, *(dim.dim_value or 8 for dim in value.type.tensor_type.shape.dim[1:])]
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            data[value.name] = rng.normal(size=shape).astype(np.float32)
        elif "mask" in value.name:
            shortest = 3 if value.name == "attention_mask" else shape[1]  # other graphs mask nothing
            lengths = rng.integers(shortest, shape[1] + 1, (count, 1))
            data[value.name] = (np.arange(shape[1]) < lengths).astype(np.int64)
        else:
            data[value.name] = rng.integers(1, 50, shape)
    return data


def records(model: onnx.ModelProto, folder: Path, **options: Any) -> list[NDArray[Any]]:
    """The maps that a precompute stores."""
    data = samples_for(model)
    mask = next((name for name in data if "mask" in name), None)
    run = RunOptions(mask=mask, num_threads=1, **options)
    precompute(saved(model, folder), data, folder / "cache", PrecomputeOptions(1, codec="float32"), run)
    reader = CacheReader(folder / "cache")
    return [reader.decode(reader.read(key), 0) for key in sorted(reader.keys())]


@pytest.mark.parametrize("form", ACCEPTED)
def test_records_do_not_change_with_the_batch_size(form: str, tmp_path: Path) -> None:
    model = ACCEPTED[form]
    alone, *others = (records(model, tmp_path / str(size), batch_size=size) for size in (1, 3))
    assert len(alone) == 7
    # Rounding of the graph's own dtype, and of alpha behind it.
    limit = load_tolerances()["recheck"]["total_variation"]["float16" if form == "half precision" else "float32"]
    for other in others:
        for first, second in zip(alone, other, strict=True):
            assert 0.5 * np.abs(first - second).sum(axis=-1).max() <= limit


@pytest.mark.parametrize("form", REFUSED)
def test_samples_that_change_in_company_are_refused(form: str, tmp_path: Path) -> None:
    model, cause = REFUSED[form]
    assert only_site(model).supported
    # What has its samples on another axis may not even run with the squeeze in it.
    may_fail = "sequence first" in form
    with pytest.raises(ShdError, match="failed|" + cause if may_fail else cause) as caught:
        records(model, tmp_path)
    assert caught.value.code in ("graph-unsupported", "inputs-invalid")
    assert not (tmp_path / "cache").exists()


def test_samples_that_run_alone_must_give_the_same_twice(tmp_path: Path) -> None:
    with refusal("graph-unsupported", "from run to run") as caught:
        records(REFUSED["dropout"][0], tmp_path, batch_size=1)
    assert "--batch-size 1" not in str(caught.value)


def test_a_flag_beside_the_samples_is_none_of_them(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(REFUSED["batch normalisation"][0])
    data = samples_for(model)
    model.graph.input.append(onnx.helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, (1,)))
    with refusal("graph-unsupported", NOT_ITS_OWN):
        precompute(saved(model, tmp_path), data, tmp_path / "cache", PrecomputeOptions(1))


def test_shared_scales_make_samples_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = saved(quantised(attention(length="length"), tmp_path), tmp_path)
    np.savez(tmp_path / "data.npz", **samples_for(onnx.load(teacher)))
    job = [str(teacher), "--inputs", str(tmp_path / "data.npz"), "--student-heads", "1", "--batch-size"]
    for command in (["precompute", *job, "4", "--out", str(tmp_path / "cache")], ["plan", *job, "4"]):
        load_app()(command)
        assert "one sample at a time" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"length": "length"}, {"batch": 4}], ids=str)
def test_records_of_shared_scales_are_those_of_samples_alone(sizes: dict[str, Any], tmp_path: Path) -> None:
    teacher = saved(quantised(attention(**sizes), tmp_path), tmp_path)
    data = samples_for(onnx.load(teacher), 12)
    data["x"] *= np.geomspace(0.1, 2, 12, dtype=np.float32).reshape(-1, 1, 1)  # each with a scale of its own
    options = PrecomputeOptions(num_student_heads=1, codec="float32")
    caches = []
    for run in (RunOptions(batch_size=4), RunOptions(batch_size=1, seed=1), RunOptions(batch_tokens=50)):
        folder = tmp_path / f"{run.batch_size}-{run.seed}-{run.batch_tokens}"
        precompute(teacher, data, folder, options, run)
        assert recheck_records(folder, teacher, data).tv_max < 1e-6
        caches.append(CacheReader(folder))
    for key in caches[0]:
        maps = [cache.decode(cache.read(key), 0) for cache in caches]
        assert np.array_equal(maps[0], maps[1])
        assert np.array_equal(maps[0], maps[2])


def test_what_rounds_a_quantised_graph_is_in_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, teacher = attention(length="length"), quantised(attention(length="length"), tmp_path)
    paths, data = [saved(plain, tmp_path, "plain.onnx"), saved(teacher, tmp_path)], samples_for(plain)
    said = f"onnxruntime {onnxruntime.__version__}, all optimisations"
    for path, expected in zip(paths, ("", said), strict=True):
        precompute(path, data, tmp_path / path.stem, PrecomputeOptions(num_student_heads=1))
        assert CacheReader(tmp_path / path.stem).manifest.teacher.session == expected
        load_app()(["inspect", str(path)])
        printed = " ".join(capsys.readouterr().out.split())
        assert (said in printed and "A cache names its own" in printed) == bool(expected)
    monkeypatch.setattr(onnxruntime, "__version__", "0.1")
    precompute(paths[0], data, tmp_path / "plain", PrecomputeOptions(num_student_heads=1))
    with refusal("cache-mismatch", f"teacher.session: '{said}' -> 'onnxruntime 0.1, all optimisations'"):
        precompute(paths[1], data, tmp_path / "teacher", PrecomputeOptions(num_student_heads=1))


def test_a_map_that_samples_share_is_told_by_its_sizes() -> None:
    model = attention(logits_of=lambda build, _: build.const(np.zeros((1, HEADS, 8, 8), np.float32)))
    reason = reason_of(model)
    assert "from its sizes (map " in reason
    assert "samples share a map: select other sites" in reason
