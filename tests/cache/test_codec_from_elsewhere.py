"""A codec in one class, entered from outside by a form that names it: signs of an embedding, eight to a byte."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from support.makers import fractions, job, key_of, length_of
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import FORMS, U8, CacheReader, CacheWriter, Errors, HiddenError, Part, SampleRecord, verify_cache
from shd_ref.cache.forms.rows import RowCodec, Rows

WIDTH = 11


class SignCodec(RowCodec):
    width, size = WIDTH, 2

    def encode(self, name: str, values: Any) -> NDArray[np.uint8]:
        return np.packbits(values > 0, axis=1)

    def check(self, where: str, rows: NDArray[np.uint8]) -> None:
        if np.unpackbits(rows, axis=1)[:, WIDTH:].any():
            raise ShdError("argument-value", f"{where} must end in zeros")

    def decode(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        return 2 * np.unpackbits(rows, axis=1, count=WIDTH).astype(np.float32) - 1

    def error(self, values: Any, rows: NDArray[np.uint8]) -> HiddenError:
        moved = self.compare("", values, rows)[0]
        return HiddenError(float(moved.mean()), float(moved.max()), len(moved))

    def compare(self, name: str, values: Any, rows: NDArray[np.uint8]) -> Any:
        moved = np.linalg.norm(self.decode(name, rows) - values, axis=1) / np.linalg.norm(values, axis=1)
        return moved, np.full(len(values), np.inf)


@dataclass(frozen=True, kw_only=True)
class Signs(Rows):
    SUBJECT: ClassVar[str] = "signs"
    ERROR: ClassVar[type[HiddenError]] = HiddenError
    CHOICE: ClassVar[str] = "signs"

    @property
    def coded(self) -> tuple[tuple[Part, RowCodec], ...]:
        return ((Part("signs", U8, self.SUBJECT), SignCodec()),)

    def describe(self) -> list[tuple[str, str]]:
        return [("signs codec", self.codec)]


@pytest.fixture(autouse=True)
def entered() -> Iterator[None]:
    FORMS.append(Signs)
    yield
    del FORMS[-1]


def test_a_codec_from_elsewhere_is_written_and_read(tmp_path: Path) -> None:
    form = Signs(codec="signs", rows="sample")
    values = {index: fractions((1, WIDTH), index) - np.float32(0.5) for index in range(7)}
    records = [SampleRecord(i, key_of(i), length_of(i), {"signs": form.encode(values[i])}) for i in values]
    writer = CacheWriter(tmp_path, job(forms=(form,)))
    for shard in writer.missing_shards():
        written = [records[index] for index in writer.manifest.shard_samples(shard)]
        rows = np.concatenate([values[record.index] for record in written])
        error = form.measure(rows, np.concatenate([record.parts["signs"] for record in written]))
        writer.write_shard(shard, written, Errors({"signs": error}))
    writer.seal()
    assert verify_cache(tmp_path).ok
    reader = CacheReader(tmp_path)
    for index, embedding in values.items():
        record = reader.read(key_of(index))
        assert record.parts["signs"].shape == (2,)
        np.testing.assert_array_equal(form.decode(record), np.sign(embedding))
    forged = replace(records[0], parts={"signs": np.full((1, 2), 255, np.uint8)})
    with refusal("argument-value", "end in zeros"):
        CacheWriter(tmp_path / "forged", job(1, forms=(form,))).write_shard(0, [forged], Errors({"signs": error}))
