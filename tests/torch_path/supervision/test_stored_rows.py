"""Cached logits and hidden states in PyTorch: what the reference decodes, to the bit, in a padded batch."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.makers import ALL_CLASSES, FACTORS, FORMS, NARROW, TOPK, job, key_of, length_of, padding_of, write_cache
from support.refusals import refusal
from torch import Tensor
from torch.utils.data import DataLoader

from shd_ref.cache import Attention, CacheReader, Logits
from shd_torch import SupervisedDataset, SupervisedStream
from shd_torch.supervision import cached as targets

INDICES = (3, 0, 7, 3)
WHOLE = replace(ALL_CLASSES, rows="positions")
BESIDE: dict[str, dict[str, Any]] = FORMS | {"whole": {"logits": WHOLE, "hidden": FORMS["topk"]["hidden"]}}
ATTENTION: dict[str, dict[str, Any]] = {
    "none": {"attention": None},
    "maps": {},
    "u4": {"codec": "u4", "support": "causal"},
    "factored": {"factors": FACTORS},
    "padded": {"factors": FACTORS, "padding": "around", "codec": "float16"},
}


def sample(index: int) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(index, index + length_of(index))}


def collate(samples: list[dict[str, Tensor]]) -> list[Tensor]:
    return [each["input_ids"] for each in samples]


def joined(folder: Path, **options: Any) -> SupervisedDataset:
    return SupervisedDataset([sample(index) for index in range(8)], folder, **options)


def batches(dataset: Any, **options: Any) -> list[Any]:
    loader: Any = DataLoader(dataset, collate_fn=dataset.collate_with(collate), **options)
    return [batch for _, batch in loader]


def fields_of(targets: Any) -> list[Tensor]:
    return [targets] if isinstance(targets, Tensor) else list(targets[:3])


def assert_decodes(batch: Any, reader: CacheReader, indices: tuple[int, ...], size: int | None) -> None:
    longest = size or max(map(length_of, indices))
    targets, states = batch.targets(size), batch.hidden_states(size)
    if reader.manifest.logits is None:
        assert targets is None
    for number, index in enumerate(indices):
        record, n, first = reader.read(key_of(index)), length_of(index), padding_of(reader.manifest, index)
        if reader.manifest.logits is not None:
            rows = reader.decode_logits(record)
            by_sample = reader.manifest.logits.rows == "sample"
            if by_sample:  # a trainer says the second axis of the student's logits: two classes, say
                assert all(map(torch.equal, fields_of(batch.targets(2)), fields_of(targets)))
            fields = [rows[0] if by_sample else rows] if isinstance(rows, np.ndarray) else rows[:3]
            for got, expected in zip(fields_of(targets), fields, strict=True):
                own = got[number] if by_sample else got[number, first:n]
                if by_sample:  # what a trainer gives of a student's (B, V) is no length
                    assert torch.equal(fields_of(batch.targets(1))[0], got)
                assert torch.equal(own.double(), torch.from_numpy(expected).to(own.dtype).double())
                if not by_sample:
                    assert got.shape[:2] == (len(indices), longest)
                    assert not got[number, n:].any()
                    assert not got[number, :first].any()
            if not isinstance(rows, np.ndarray):
                assert (targets.temperature, targets.vocab_size) == (rows.temperature, rows.vocab_size)
        assert list(states) == ([] if reader.manifest.hidden is None else reader.manifest.hidden.teacher_layers)
        for layer, state in states.items():
            assert state.shape[:2] == (len(indices), longest)
            assert np.array_equal(state[number, first:n].numpy(), reader.decode_hidden(record, layer))
            assert not state[number, n:].any()
            assert not state[number, :first].any()


@pytest.mark.parametrize(
    ("attention", "beside"),
    [(each, beside) for each in ATTENTION for beside in BESIDE if each in ("none", "factored") or beside == "topk"],
)
def test_decodes_what_the_reference_does(tmp_path: Path, attention: str, beside: str) -> None:
    manifest = job(8, **ATTENTION[attention], **BESIDE[beside])
    write_cache(tmp_path, manifest)
    reader = CacheReader(tmp_path)
    held = manifest.find(Attention) is not None
    for options in ({}, {"preload": True}, {"layers": [2]} if held else {}):
        dataset = joined(tmp_path, **options)
        (batch,) = batches(dataset, sampler=INDICES, batch_size=4)
        for size in (None, 12):
            assert_decodes(batch, reader, INDICES, size)
        maps = [layer.probs() for layer in batch.supervise()]
        assert len(maps) == len(dataset.layers)
        starts = torch.tensor([padding_of(manifest, index) for index in INDICES])
        positions = torch.arange(max(map(length_of, INDICES)))
        stored = positions < torch.tensor([length_of(index) for index in INDICES])[:, None]
        assert torch.equal(batch.query_mask(), stored & (positions >= starts[:, None]))
        if not held:
            continue
        alone = joined(tmp_path, logits=False, hidden=[], **options)
        (bare,) = batches(alone, sampler=INDICES, batch_size=4)
        assert bare.targets() is None
        assert bare.hidden_states() == {}
        for one, other in zip(maps, bare.supervise(), strict=True):
            assert torch.equal(one, other.probs())  # attention is read as without the rows beside it
        assert len(bare.buffer) < len(batch.buffer)


@pytest.mark.parametrize("beside", ["topk", "narrow"])
@pytest.mark.parametrize("attention", ["maps", "factored"])
def test_rows_pass_through_workers_streams_and_devices(tmp_path: Path, attention: str, beside: str) -> None:
    write_cache(tmp_path, job(8, **ATTENTION[attention], **BESIDE[beside]))
    reader, indices = CacheReader(tmp_path), tuple(range(8))
    for batch in (
        *batches(joined(tmp_path), batch_size=8, num_workers=1),
        *batches(SupervisedStream([sample(index) for index in range(8)], tmp_path), batch_size=8),
        *batches(joined(tmp_path), batch_size=8),
    ):
        assert_decodes(batch, reader, indices, None)
        assert_decodes(pickle.loads(pickle.dumps(batch)), reader, indices, 10)
        moved = batch.to("meta")
        assert moved.targets().ids.device.type == "meta"
        assert all(state.device.type == "meta" for state in moved.hidden_states().values())


def test_some_hidden_states_alone(tmp_path: Path) -> None:
    write_cache(tmp_path, job(8, **BESIDE["hidden"]))
    (both,) = batches(joined(tmp_path), batch_size=8)
    (one,) = batches(joined(tmp_path, hidden=[11]), batch_size=8)
    assert list(one.hidden_states()) == [11]
    assert torch.equal(one.hidden_states()[11], both.hidden_states()[11])
    with refusal("argument-value", r"hidden must be among \[0, 11\]; got 3"):
        joined(tmp_path, hidden=[3])[0]
    with refusal("argument-shape", "at least the longest"):
        one.hidden_states(4)


@pytest.mark.parametrize("vocab_size", [2, 512, 32_000, 151_936])
@pytest.mark.parametrize(("head", "bits"), [(1, 4), (2, 16), (32, 8), (64, 7)])
def test_rows_of_every_size(vocab_size: int, head: int, bits: int) -> None:
    """Many rows, in one go and in parts; a head that is the whole vocabulary too."""
    kept = {"head": min(head, vocab_size), "value_bits": bits}
    form = Logits(codec="topk", rows="positions", tensor="t", vocab_size=vocab_size, temperature=1.5, **kept)
    rng = np.random.default_rng(vocab_size + head)
    logits = (4 * rng.standard_normal((24, vocab_size))).astype(np.float32)
    logits[0] = 0.0
    logits[1, 1:] -= 1e4  # next to nothing outside of one class
    rows = form.encode(logits)
    expected = form.decode_rows(rows)[:3]
    copies = 1 + 2**19 // (8 * rows.size)  # more than are decoded in one go
    many = targets.decode_rows(form, torch.from_numpy(np.tile(rows, (copies, 1))))
    for got, want in zip(many, expected, strict=True):
        assert got.shape == (copies * len(want), *want.shape[1:])
        decoded = torch.from_numpy(want).to(got.dtype).double()
        assert all(torch.equal(part.double(), decoded) for part in got.split(len(want)))


def test_bytes_that_no_encoder_writes_stay_within_the_vocabulary() -> None:
    for form in (TOPK, NARROW):
        for fill in (0, 255):
            rows = torch.full((3, form.row_sizes[0]), fill, dtype=torch.uint8)
            ids = targets.decode_rows(form, rows)[0]
            assert ids.shape == (3, form.head)
            assert 0 <= int(ids.min()) <= int(ids.max()) < form.vocab_size
