"""Hidden states: what is stored of them, what that costs, what is refused (CACHE-175 to 179)."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.makers import FORMS, HIDDEN_FLOAT16, HIDDEN_INT8, hidden_of, job, key_of, length_of, write_cache
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, SampleRecord
from shd_ref.cache.forms.rows import VectorCodec

CODECS = {"int8": HIDDEN_INT8, "float16": HIDDEN_FLOAT16}


def rows_of(count: int = 9, scale: float = 3.0) -> NDArray[np.float32]:
    rows = np.random.default_rng(1).standard_normal((count, 7)).astype(np.float32) * np.float32(scale)
    rows[2] = 0
    rows[3] *= 100  # an outlier costs its own row alone
    return rows


@pytest.mark.parametrize("codec", CODECS)
def test_numbers_are_within_the_stated_bound(codec: str) -> None:
    form, rows = CODECS[codec], rows_of()
    codes = form.encode(rows, layer=11)
    assert codes.shape == (9, form.row_sizes[-1]) == (9, 11 if codec == "int8" else 14)
    found = form.decode(SampleRecord(0, key_of(0), 9, {"H11": codes.reshape(-1)}), 11)
    assert (found.shape, found.dtype) == ((9, 7), np.float32)
    moved = np.abs(found - rows.astype(np.float64)).max(axis=-1)
    assert (moved <= VectorCodec(form.codec, 7).bound(rows)).all()
    assert moved[2] == 0
    assert moved[3] > 20 * moved[4]


@pytest.mark.parametrize("codec", CODECS)
def test_errors_are_measured_as_the_format_says(codec: str) -> None:
    form, rows = CODECS[codec], rows_of()
    codes = form.encode(rows, layer=11)
    error = form.measure(rows, codes, layer=11)
    steps = codes[:, :4].copy().view("<f4").astype(np.float64)
    decoded = (
        codes.view("<f2").astype(np.float64)
        if codec == "float16"
        else codes[:, 4:].view(np.int8).astype(float) * steps
    )
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1)
    relative = np.linalg.norm(decoded - rows, axis=-1) / np.where(norms, norms, 1)
    np.testing.assert_allclose(error.relative_mean, relative.mean(), rtol=1e-4)
    np.testing.assert_allclose(error.relative_max, relative.max(), rtol=1e-4)
    counted = np.arange(9) < 4
    assert form.measure(rows, codes, counted, 11).rows == 4
    assert form.measure(rows, codes, np.zeros(9, np.bool_), 11) == type(error)(0.0, 0.0, 0)
    bound = np.sqrt(7) * VectorCodec(form.codec, 7).bound(rows) / np.where(norms, norms, 1)
    assert (relative <= bound).all()


def test_numbers_beyond_float16_and_layers_that_are_not_stored() -> None:
    with pytest.raises(ShdError, match=r"below 65520 for float16; got .*: use int8"):
        HIDDEN_FLOAT16.encode(rows_of(scale=1e4), layer=11)
    large = rows_of(scale=1e30)
    assert HIDDEN_INT8.measure(large, HIDDEN_INT8.encode(large, layer=11), layer=11).relative_max < 0.01
    with refusal("argument-value", r"must be one of the teacher's \[0, 11\]; got 3"):
        HIDDEN_INT8.encode(rows_of(), layer=3)


def test_only_the_layers_that_are_asked_for_are_read(tmp_path: Path) -> None:
    manifest = job(**FORMS["topk"])
    reader = CacheReader(write_cache(tmp_path, manifest))
    record = reader.read(key_of(4), layers=[2], logits=False, hidden=[11])
    assert list(record.parts) == ["alphas", "mixing", "L02", "H11"]
    found = reader.decode_hidden(record, 11)
    assert np.abs(found - hidden_of(manifest, 4, 11)).max() <= 4 / 254 * 1.001
    assert len(found) == length_of(4)
    with pytest.raises(ShdError, match="must be read with hidden layer 0 to decode it"):
        reader.decode_hidden(record, 0)
    with pytest.raises(ShdError, match=r"hidden must be among \[0, 11\]; got 3"):
        reader.read(key_of(4), hidden=[3])
    with pytest.raises(ShdError, match="must hold hidden states for this"):
        CacheReader(write_cache(tmp_path / "plain", job())).decode_hidden(record, 11)
