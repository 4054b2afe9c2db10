"""A real trained language model, causal, grouped queries: squeezed 8 -> 4, and a student taught from the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.binding.stories import Stories, load_stories
from support.exported_models import trace
from support.students import precompute
from torch.utils.data import DataLoader, StackDataset

from shd_ref.cache import CacheReader
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_sites, load_teacher
from shd_torch import SupervisedDataset, capture_attention
from shd_torch.data import check_cache
from shd_torch.maps import shd_loss

LENGTH = 64
NUM_SAMPLES = 48


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = shared_data / "stories260K"
    if not source.is_dir():
        pytest.skip(f"the language model is not there: no folder {source.name}")
    folder = tmp_path_factory.mktemp("stories")
    tokens = np.load(source / "self_sampled_1024x256_uint16.npy")[:NUM_SAMPLES, :LENGTH].astype(np.int64)
    np.savez(folder / "data.npz", input_ids=tokens)
    teacher = load_stories(source / "stories260K.bin")
    with torch.no_grad():
        logits = teacher(torch.from_numpy(tokens))
    loss = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens)[:, 1:].flatten()))
    assert loss < 1.5  # it was trained, and was read right
    trace(teacher, {"input_ids": torch.from_numpy(tokens[:2])}, folder / "teacher.onnx")
    return folder


@pytest.mark.slow
def test_student_of_a_real_language_model(folder: Path) -> None:
    sites = find_sites(load_teacher(folder / "teacher.onnx"))
    assert [(s.supported, s.num_heads, s.num_kv_heads, s.d_v, s.d_model) for s in sites] == [(True, 8, 4, 8, 64)] * 5
    with np.load(folder / "data.npz") as arrays:
        tokens = arrays["input_ids"]
    options = PrecomputeOptions(num_student_heads=4, num_student_layers=3)
    run = RunOptions(num_threads=1)
    summary = precompute(folder / "teacher.onnx", {"input_ids": tokens}, folder / "cache", options, run)
    assert summary.comparison.residual < summary.comparison.constant_residual
    assert summary.errors["attention"].kl_mean < 1e-3
    cache = CacheReader(folder / "cache")
    assert cache.manifest.attention.support == "causal"
    assert [(p.student_layer, p.teacher_layer) for p in cache.manifest.attention.layers] == [(0, 1), (1, 2), (2, 4)]

    torch.manual_seed(0)
    student = Stories(width=32, hidden=64, num_layers=3, num_heads=4, num_kv_heads=2, vocabulary=512, length=LENGTH)
    check_cache(cache, num_student_heads=4, num_student_layers=3, temperature=1.0)
    joined = SupervisedDataset(StackDataset(input_ids=torch.from_numpy(tokens)), cache, preload=True)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    base, shd = [], []
    for epoch in range(8):
        generator = torch.Generator().manual_seed(epoch)
        for batch, supervision in DataLoader(joined, 8, shuffle=True, generator=generator, collate_fn=joined.collate):
            ids = batch["input_ids"]
            with capture_attention(student, layers=3) as captured:
                logits = student(ids)
            base.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
            # The first call also checks the support: a causal student under a causal teacher.
            shd.append(shd_loss(supervision.decode(), captured.logits, check=len(shd) == 0))
            optimizer.zero_grad()
            (base[-1] + 0.1 * shd[-1]).backward()
            optimizer.step()
    first, last = (float(torch.stack(part).mean().detach()) for part in (shd[:6], shd[-6:]))
    assert last < 0.8 * first, (first, last)
    assert float(base[-1].detach()) < float(base[0].detach()) - 1.0
