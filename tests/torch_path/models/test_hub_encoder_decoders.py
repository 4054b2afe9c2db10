"""A Perceiver as the hub has it, whose cross attention comes first: exported, cached, and equal to its own maps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shd_ref.cache import CacheReader, sample_key, trim_inputs, verify_cache
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_kinds, find_sites, input_specs, load_teacher
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import export_teacher

pytestmark = pytest.mark.nightly  # test_encoder_decoders.py has the kinds of attention in every run

HEADS = 4
LENGTHS = (9, 5, 7, 4)


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "num_latents": 3, "d_latents": 16, "num_blocks": 1}
    sizes |= {"num_self_attention_heads": HEADS, "num_cross_attention_heads": HEADS, "qk_channels": 16}
    sizes |= {"v_channels": 16, "max_position_embeddings": 9, "attention_probs_dropout_prob": 0.0}
    config = transformers.PerceiverConfig(**sizes, num_self_attends_per_block=1)
    reads = transformers.models.perceiver.modeling_perceiver.PerceiverTextPreprocessor(config)
    model = transformers.PerceiverModel(config, input_preprocessor=reads)
    with torch.no_grad():  # maps that are not nearly uniform
        for parameter in model.parameters():
            parameter *= 6.0 if parameter.ndim == 2 else 1.0
    return model.eval()


def test_records_hold_the_models_own_maps(tmp_path: Path) -> None:
    model, teacher = make_model(), tmp_path / "teacher.onnx"
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.where(mask, np.random.default_rng(0).integers(3, 40, mask.shape), 0)
    data = {"inputs": ids, "attention_mask": mask.astype(np.int64)}
    tensors = {key: torch.from_numpy(array) for key, array in data.items()}
    export_teacher(model, tensors, teacher, dynamic={key: {0: "batch"} for key in data})

    graph = load_teacher(teacher)
    sites = find_sites(graph)
    assert [site.reason for site in sites] == [None] * len(sites)
    kinds = find_kinds(sites, input_specs(graph))
    assert [str(kinds.kind(site)) for site in sites] == ["cross", "decoder"]

    # As many heads as the teacher's: a record holds its maps as they are.
    precompute(teacher, data, tmp_path / "cache", PrecomputeOptions(HEADS, codec="float32"), RunOptions(batch_size=3))
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    with torch.no_grad():
        outputs = model(**tensors, output_attentions=True)
    limit = load_tolerances()["graph"]["probs"]["float32"]
    for number, n in enumerate(LENGTHS):
        sample = {key: array[number] for key, array in data.items()}
        record = reader.read(sample_key(trim_inputs(sample, "attention_mask", [], None)[0]))
        assert record.shapes == ((3, 3), (3, n))
        for column, layer in enumerate(reader.manifest.attention.layers):
            name = ("cross_attentions", "attentions")[layer.teacher_layer]
            rows, columns = record.shapes[column]
            maps = reader.decode(record, column)
            assert maps.std() > 0.01, "maps that are all alike compare nothing"
            np.testing.assert_allclose(maps, outputs[name][-1][number].numpy()[:, :rows, :columns], atol=limit)
