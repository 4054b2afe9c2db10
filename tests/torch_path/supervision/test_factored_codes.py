"""Cached queries and keys in PyTorch: the maps of the reference, and a training step without any map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exported_models import trace
from support.makers import FACTORS, MEASURED, WINDOWED, first_of, job, key_of, length_of, records_of

from shd_ref.cache import FACTORED_CODECS, CacheReader, CacheWriter, Factors, codec_error
from shd_torch import ShdError, SupervisedDataset
from shd_torch.supervision import CachedSupervision
from shd_torch.supervision.cached import pack_records


def batch_of(reader: CacheReader, indices: tuple[int, ...], layers: tuple[int, ...] = (1, 2)) -> CachedSupervision:
    return pack_records([reader.read(key_of(index)) for index in indices], reader.manifest, layers)


def convex(folder: Path, **changes: Any) -> CacheReader:
    """A cache whose mixing is convex, as that of a teacher is and that of ``makers`` is not."""
    manifest = job(8, **({"factors": FACTORS} | changes))
    writer = CacheWriter(folder, manifest)
    for shard in writer.missing_shards():
        records = records_of(manifest, shard)
        for record in records:
            assert "mixing" in record.parts
            record.parts["mixing"][:, 0, 2:] = 0  # the plan's groups
            record.parts["mixing"][:, 1, :2] = 0
            record.parts["mixing"][...] /= record.parts["mixing"].sum(-1, keepdims=True)
        writer.write_shard(shard, records, MEASURED)
    writer.seal()
    return CacheReader(folder)


@pytest.mark.parametrize("support", ["full", "causal"])
@pytest.mark.parametrize("codec", FACTORED_CODECS)
@pytest.mark.parametrize(
    ("indices", "changes"),
    [((3, 0, 7, 3), {}), ((5, 5), {}), ((7, 0, 2, 5), {"factors": WINDOWED, "padding": "around"})],
    ids=["ragged", "even", "windows and padding in front"],
)
def test_makes_the_maps_of_the_reference(
    tmp_path: Path, codec: str, support: str, indices: tuple[int, ...], changes: dict[str, Any]
) -> None:
    reader = convex(tmp_path, codec=codec, support=support, **changes)
    batch = batch_of(reader, indices).to("cpu")
    firsts = tuple(first_of(index) if changes else 0 for index in indices)
    assert batch.firsts == firsts if changes else not any(batch.firsts)
    longest = max(map(length_of, indices))
    for size in (longest, longest + 3):
        layers, positions = batch.supervise(size), np.arange(size)
        stored = [(positions >= first) & (positions < length_of(i)) for first, i in zip(firsts, indices, strict=True)]
        np.testing.assert_array_equal(batch.query_mask(size), stored)
        for layer, supervision, maps in zip((1, 2), layers, batch.decode(size), strict=True):
            supervision.check(None, layer)
            assert supervision.shape == tuple(maps.shape) == (len(indices), 2, size, size)
            torch.testing.assert_close(supervision.mass(), maps.sum(-1))
            for number, index in enumerate(indices):
                n, expected = length_of(index), np.zeros((2, size, size), dtype=np.float32)
                expected[:, :n, :n] = reader.decode(reader.read(key_of(index)), layer)
                np.testing.assert_array_equal(maps[number] > 0, expected > 0)
                np.testing.assert_allclose(maps[number], expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ShdError, match="at least the longest"):
        batch.supervise(longest - 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_decoders_with_windows_and_padding_in_front(tmp_path: Path) -> None:
    """Gemma 2 has a layer with a window and one without."""
    pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
    pytest.importorskip("transformers", reason="these teachers come from transformers")
    from support.binding.architectures import HEADS, make_inputs, make_model

    from shd_ref.teacher import PrecomputeOptions, RunOptions
    from shd_ref.teacher.precompute.engine import precompute

    model = make_model("gemma2", attn_logit_softcapping=None)
    inputs = make_inputs("gemma2", batch=6, length=12)
    firsts = [0, 1, 5, 2, 8, 11]
    inputs["attention_mask"] = (torch.arange(12) >= torch.tensor(firsts)[:, None]).long()
    teacher = trace(model, make_inputs("gemma2"), tmp_path / "teacher.onnx")
    arrays = {key: tensor.numpy() for key, tensor in inputs.items()}
    run = RunOptions(num_threads=1, batch_size=2)
    options = PrecomputeOptions(HEADS, form="factored", factored_codec="float16")
    precompute(teacher, arrays, tmp_path / "cache", options, run)
    samples = [{name: tensor[i] for name, tensor in inputs.items()} for i in range(6)]
    joined = SupervisedDataset(samples, tmp_path / "cache")
    manifest = joined.cache.manifest
    assert isinstance(manifest.attention, Factors)
    assert [layer.window for layer in manifest.attention.factors] == [4, None]
    assert (manifest.attention.support, manifest.attention.padding) == ("causal", "around")
    _, codes = joined.collate([joined[i] for i in range(6)])
    assert codes.firsts == tuple(firsts)
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    counted = inputs["attention_mask"].bool()[:, None, :, None]
    # As many heads as the teacher has: nothing is merged, so the maps are the model's own.
    for maps, expected in zip(codes.decode(12), attentions, strict=True):
        exact = torch.where(counted, expected, 0.0)
        torch.testing.assert_close(maps, exact, atol=2e-3, rtol=0)
        assert torch.equal(maps > 0, exact > 0)
        assert codec_error(exact.numpy(), maps.numpy()).kl_max < 1e-5
