"""Cached queries and keys in PyTorch: the maps of the reference, and a training step without any map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exported_models import trace
from support.makers import FACTORS, MEASURED, WINDOWED, first_of, job, key_of, length_of, records_of
from torch import Tensor

from shd_ref.cache import FACTORED_CODECS, CacheReader, CacheWriter, Factors, codec_error
from shd_torch import ShdError, SupervisedDataset
from shd_torch.supervision import CachedSupervision
from shd_torch.supervision.cached import pack_records

INDICES = (3, 0, 7, 3)


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
@pytest.mark.parametrize("indices", [INDICES, (5, 5)], ids=["ragged", "even"])
def test_makes_the_maps_of_the_reference(tmp_path: Path, codec: str, support: str, indices: tuple[int, ...]) -> None:
    reader = convex(tmp_path, codec=codec, support=support)
    batch = batch_of(reader, indices)
    longest = max(map(length_of, indices))
    for size in (longest, longest + 3):
        layers = batch.supervise(size)
        assert batch.query_mask(size).sum(1).tolist() == [length_of(i) for i in indices]
        for layer, supervision, maps in zip((1, 2), layers, batch.decode(size), strict=True):
            supervision.check(None, layer)
            assert supervision.shape == tuple(maps.shape) == (len(indices), 2, size, size)
            torch.testing.assert_close(supervision.mass(), maps.sum(-1))
            for number, index in enumerate(indices):
                n = length_of(index)
                expected = reader.decode(reader.read(key_of(index)), layer)
                np.testing.assert_allclose(maps[number, :, :n, :n].numpy(), expected, rtol=1e-4, atol=1e-6)
                assert not maps[number, :, n:].any()
                assert not maps[number, :, :, n:].any()
    with pytest.raises(ShdError, match="at least the longest"):
        batch.supervise(longest - 1)


@pytest.mark.parametrize("support", ["full", "causal"])
@pytest.mark.parametrize("codec", FACTORED_CODECS)
def test_windows_and_padding_in_front(tmp_path: Path, codec: str, support: str) -> None:
    reader = convex(tmp_path, codec=codec, support=support, factors=WINDOWED, padding="around")
    indices = (7, 0, 2, 5)
    batch = batch_of(reader, indices).to("cpu")
    assert batch.firsts == tuple(first_of(index) for index in indices)
    size = max(map(length_of, indices)) + 1
    for layer, supervision, maps in zip((1, 2), batch.supervise(size), batch.decode(size), strict=True):
        torch.testing.assert_close(supervision.mass(), maps.sum(-1))
        for number, index in enumerate(indices):
            n = length_of(index)
            assert batch.query_mask(size)[number].nonzero()[0, 0] == first_of(index)
            expected = np.zeros((2, size, size), dtype=np.float32)
            expected[:, :n, :n] = reader.decode(reader.read(key_of(index)), layer)
            np.testing.assert_array_equal(maps[number].numpy() > 0, expected > 0)
            np.testing.assert_allclose(maps[number].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_every_temperature_is_right(tmp_path: Path) -> None:
    reader = convex(tmp_path, codec="float16")
    (first, _) = batch_of(reader, (4,)).supervise()
    queries, keys = (
        torch.from_numpy(part)[None] for part in reader.manifest.attention.decode_factors(reader.read(key_of(4)), 1)
    )
    maps = (FACTORS[0].scale * queries @ keys.repeat_interleave(2, 1).mT / 3.0).softmax(-1)
    torch.testing.assert_close(
        first.probs(temperature=3.0), (first.mixing[:, :, :, None, None] * maps[:, None]).sum(2)
    )


# From a teacher's export to the gradient of a student.


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.inputs.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "windows"), [("mistral", [4]), ("gemma2", [4, None])])
def test_decoders_with_windows_and_padding_in_front(name: str, windows: list[int | None], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
    pytest.importorskip("transformers", reason="these teachers come from transformers")
    from support.binding.architectures import HEADS, make_inputs, make_model

    from shd_ref.teacher import PrecomputeOptions, RunOptions
    from shd_ref.teacher.precompute.engine import precompute

    model = make_model(name, **({"attn_logit_softcapping": None} if name == "gemma2" else {}))
    inputs = make_inputs(name, batch=6, length=12)
    firsts = [0, 1, 5, 2, 8, 11]
    inputs["attention_mask"] = (torch.arange(12) >= torch.tensor(firsts)[:, None]).long()
    teacher = trace(model, make_inputs(name), tmp_path / "teacher.onnx")
    arrays = {key: tensor.numpy() for key, tensor in inputs.items()}
    run = RunOptions(num_threads=1, batch_size=2)
    options = PrecomputeOptions(HEADS, form="factored", factored_codec="float16")
    precompute(teacher, arrays, tmp_path / "cache", options, run)
    joined = SupervisedDataset(Tokens(inputs), tmp_path / "cache")
    manifest = joined.cache.manifest
    assert isinstance(manifest.attention, Factors)
    assert [layer.window for layer in manifest.attention.factors] == windows
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
