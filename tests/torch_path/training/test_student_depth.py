"""A student with another number of layers than its teaching was made for is refused, whichever way it is taught."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.trainer_cases import make_model, make_samples, make_trainer, pad
from support.exported_models import trace
from support.refusals import refusal
from torch.utils.data import DataLoader

from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, SupervisedDataset, capture_attention, layer_kls

TEACHER_LAYERS, MEANT = 3, 3


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("depth")
    arrays = {name: value.numpy() for name, value in pad(make_samples()).items() if name != "labels"}
    example = {name: torch.from_numpy(value[:2]) for name, value in arrays.items()}
    trace(make_model(4, seed=1, layers=TEACHER_LAYERS), example, folder / "teacher.onnx")
    made: dict[str, dict[str, Any]] = {
        "maps": {"num_student_layers": MEANT},
        "pairs": {"layer_pairs": ((0, 1), (2, 2))},
        "pairs of 3": {"layer_pairs": ((0, 1), (2, 2)), "num_student_layers": MEANT},
    }
    for name, options in made.items():
        chosen = PrecomputeOptions(num_student_heads=2, **options)
        precompute(folder / "teacher.onnx", arrays, folder / name, chosen, RunOptions(num_threads=1))
    return {name: folder / name for name in made}


@pytest.mark.parametrize("cache", ["maps", "pairs of 3", "pairs"])
def test_capture_that_was_not_told(caches: dict[str, Path], cache: str, tmp_path: Path) -> None:
    """All layers captured, or those of a plain list, which knows no depth; pairs alone leave other layers open."""
    joined, is_open = SupervisedDataset(make_samples(), caches[cache]), cache == "pairs"
    if not is_open:
        with refusal("cache-mismatch", "num_student_layers must be 3, .*; got 4"):
            make_trainer(tmp_path, train=joined, model=make_model(2, seed=2, layers=4), beta=0.1)
    batch, supervision = next(iter(DataLoader(joined, 4, collate_fn=joined.collate_with(pad))))
    for depth in (2, MEANT, 4):
        student = make_model(2, seed=2, layers=depth)
        for layers in (None, [layer for layer in supervision.layers if layer < depth]):
            with capture_attention(student, layers=layers) as captured:
                student(**batch)
            if depth == MEANT or (is_open and depth > MEANT):
                assert sorted(layer_kls(captured, supervision)) == list(supervision.layers)
                continue
            code = "capture-failed" if is_open else "cache-mismatch"
            with refusal(code, None if is_open else f"the student must make 3 attention calls.*got {depth}"):
                layer_kls(captured, supervision)


def test_live_teacher(tmp_path: Path) -> None:
    teacher = OnlineTeacher(make_model(4, seed=1, layers=TEACHER_LAYERS), 2, MEANT)
    arguments: dict[str, Any] = {"train": make_samples(), "teacher": teacher, "beta": 0.1}
    make_trainer(tmp_path, model=make_model(2, seed=2, layers=MEANT), **arguments).train()
    with refusal("cache-mismatch", r"must make 3 attention calls.*layer_map=4"):
        make_trainer(tmp_path, model=make_model(2, seed=2, layers=4), **arguments).train()
