"""A form of supervision in one file, entered from outside in cache, precompute and training: entropies of logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.trainer_cases import export, make_samples, pad, trained
from torch import Tensor

from shd_ref.cache import FORMS, U8, CacheReader, Part, RowError, list_cache, verify_cache
from shd_ref.cache.forms.rows import RowCodec, Rows
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.graph.targets import LOGITS
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.precompute.forms import MAKERS
from shd_ref.teacher.precompute.forms.rows import RowsMaker
from shd_torch import SupervisedDataset
from shd_torch.supervision.supervision import Taught
from shd_torch.training import Term
from shd_torch.training.batch import Forward, MicroBatch, every_row
from shd_torch.training.terms import Measured

OPTIONS = PrecomputeOptions(form="none", logits="float16")


@dataclass(frozen=True)
class EntropyError(RowError):
    moved_mean: float
    moved_max: float
    rows: int

    def describe(self) -> str:
        return f"{self.moved_mean:.2g} nats"


class EntropyCodec(RowCodec):
    width, size = 1, 2

    def encode(self, name: str, values: Any) -> NDArray[np.uint8]:
        return np.asarray(values.astype("<f2").view(np.uint8))

    def decode(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.ascontiguousarray(rows).view("<f2").astype(np.float32)

    def error(self, values: Any, rows: NDArray[np.uint8]) -> EntropyError:
        moved = np.abs(self.decode("", rows) - values)
        return EntropyError(float(moved.mean()), float(moved.max()), len(moved))

    def compare(self, name: str, values: Any, rows: NDArray[np.uint8]) -> Any:
        return np.abs(self.decode(name, rows) - values)[:, 0], np.full(len(values), 0.01)


@dataclass(frozen=True, kw_only=True)
class Entropies(Rows):
    SUBJECT: ClassVar[str] = "entropy"
    ERROR: ClassVar[type[RowError]] = EntropyError
    CHOICE: ClassVar[str] = "entropy"

    @property
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        return ((Part("entropy", U8, self.SUBJECT), EntropyCodec()),)

    def describe(self) -> list[tuple[str, str]]:
        return [("entropy", "of every row"), ("entropy codec", self.codec)]


class EntropyMaker(RowsMaker[Entropies]):
    def describe(self, work: Any, outputs: Any) -> Entropies | None:
        return Entropies(codec="float16", rows="positions") if LOGITS in outputs.targets.arrays else None

    def options(self, form: Entropies) -> dict[str, Any]:
        return {}

    def values(self, form: Entropies, sample: Any) -> Iterator[NDArray[np.float32]]:
        yield np.asarray(entropies(torch.from_numpy(sample.targets.arrays[LOGITS])))[:, None]


@dataclass(frozen=True)
class EntropyTerm(Term):
    NAME: ClassVar[str] = "entropy"
    WEIGHT_NAME: ClassVar[str] = "entropy_weight"
    weight: Any = 1.0

    def count(self, batch: MicroBatch) -> int:
        return batch.count(every_row)

    def measure(self, forward: Forward) -> Measured:
        own = entropies(forward.outputs.logits)
        (taught,) = forward.learn(lambda taught: stored(taught, own.shape[1]), "entropy must have a cache; got none")
        counted = forward.batch.counted(every_row, own.shape[1])
        return Measured({"": (own - taught).square()[counted].mean()}, self.count)


def stored(taught: Taught, length: int | None) -> Tensor | None:
    if (rows := taught.stored_rows("entropy", length)) is None:
        return None
    return rows.spread(rows.codes["entropy"].clone().view(torch.float16)[:, 0].float())


def entropies(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@pytest.fixture(autouse=True)
def entered() -> Iterator[None]:
    FORMS.append(Entropies)
    MAKERS[Entropies] = EntropyMaker()
    yield
    del FORMS[-1], MAKERS[Entropies]


def test_a_form_from_elsewhere_goes_from_the_graph_to_the_gradient(tmp_path: Path) -> None:
    export(tmp_path)
    arrays = {name: value.numpy() for name, value in pad(make_samples()).items() if name != "labels"}
    precompute(tmp_path / "teacher.onnx", arrays, tmp_path / "whole", OPTIONS, RunOptions(num_threads=1))
    assert verify_cache(tmp_path / "whole").ok
    assert recheck_records(tmp_path / "whole", tmp_path / "teacher.onnx", arrays).records == 8
    listed = list_cache(tmp_path / "whole").to_json()
    assert listed["entropy"] == {"codec": "float16", "rows": "positions"}
    assert 0 < listed["errors"]["entropy"]["moved_mean"] < 1e-3

    reader = CacheReader(tmp_path / "whole")
    key = reader.keys()[0]
    assert list(reader.read(key, logits=False).parts) == ["entropy"]
    assert list(reader.read(key, entropy=False).parts) == ["logits"]
    record, form = reader.read(key), reader.manifest.find(Entropies)
    assert form is not None
    logits = reader.decode_logits(record)
    assert isinstance(logits, np.ndarray)
    np.testing.assert_allclose(form.decode(record)[:, 0], entropies(torch.from_numpy(logits)), atol=5e-3)

    joined = SupervisedDataset(make_samples(), reader)
    _, batch = joined.collate_with(pad)([joined[index] for index in range(8)])
    assert stored(batch, None).shape == batch.query_mask().shape
    arguments = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 0.5}
    losses = []
    for weight in (0.0, 30.0):
        trainer = trained(tmp_path / "out", train=joined, terms=[EntropyTerm(weight)], arguments=arguments)
        losses.append([step["entropy_loss"] for step in trainer.state.log_history if "entropy_loss" in step])
    assert len(losses[0]) == 8
    assert losses[1][-1] < losses[0][-1] / 4  # without it the labels draw entropies away from the teacher's
