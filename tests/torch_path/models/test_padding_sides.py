"""Caches of samples that are padded in front, behind and between, in every form: to the loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.architectures import make_inputs
from support.binding.models import hf_model, sharpen
from support.exported_models import trace
from torch import Tensor

from shd_ref.cache import CacheReader
from shd_ref.cache.codecs.codecs import row_tv_bound
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, SupervisedDataset

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LENGTH = 10
NAMES = ("bert", "llama")
Arrays = dict[str, NDArray[np.int64]]


def make_data() -> Arrays:
    """Ids and mask: the first sample is whole, as the longest one, and looks like one without any padding."""
    rng = np.random.default_rng(0)
    mask = np.ones((8, LENGTH), dtype=np.int64)
    for index, (first, last) in enumerate([(0, 10), (3, 10), (7, 10), (0, 6), (2, 8), (9, 10), (0, 1), (1, 10)]):
        mask[index] = (np.arange(LENGTH) >= first) & (np.arange(LENGTH) < last)
    mask[7, 4:6] = 0
    return {"input_ids": rng.integers(3, 50, mask.shape) * mask, "attention_mask": mask}


def samples_of(data: Arrays) -> list[dict[str, Tensor]]:
    return [{name: torch.from_numpy(array[i]) for name, array in data.items()} for i in range(len(data["input_ids"]))]


def teacher_of(name: str) -> Any:
    return sharpen(hf_model(name, attn_implementation="eager"), ("query.weight", "key.weight", "q_proj", "k_proj"))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    return {name: trace(teacher_of(name), make_inputs(name), folder / f"{name}.onnx") for name in NAMES}


def write(graph: Path, folder: Path, data: Arrays, **options: Any) -> CacheReader:
    precompute(graph, data, folder, PrecomputeOptions(num_student_heads=2, **options), RunOptions(num_threads=1))
    return CacheReader(folder)


def own_maps(name: str, data: Arrays) -> list[NDArray[np.float32]]:
    """Merged maps of the live PyTorch model, layer by layer."""
    taught = OnlineTeacher(teacher_of(name), 2, 2)(**{key: torch.from_numpy(array) for key, array in data.items()})
    return [supervision.probs().numpy() for supervision in taught.supervise()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "codec"), [("bert", "sqrt8-row"), ("llama", "float32")])
def test_rows_of_padding_are_empty_and_all_others_the_models(
    name: str, codec: str, graphs: dict[str, Path], tmp_path: Path
) -> None:
    data = make_data()
    expected, limits = own_maps(name, data), load_tolerances()["graph"]["probs"]["float32"]
    mask = data["attention_mask"].astype(bool)
    reader = write(graphs[name], tmp_path / "cache", data, codec=codec)
    assert reader.manifest.attention.support == ("causal" if name == "llama" else "full")
    joined = SupervisedDataset(samples_of(data), reader)
    for index, key in enumerate(joined.keys):
        record = reader.read(key)
        counted = mask[index, : record.length]
        for layer in (0, 1):
            maps = reader.decode(record, layer)
            assert not maps[:, ~counted].any()
            exact = expected[layer][index, :, : record.length, : record.length][:, counted].astype(np.float32)
            moved = 0.5 * np.abs(maps[:, counted] - exact).sum(-1)
            assert (moved <= row_tv_bound(codec, exact) + LENGTH * limits).all()
    assert recheck_records(tmp_path / "cache", graphs[name], data).records == len(joined)
