"""Whisper and Perceiver as the hub has them: exported, cached, and equal to the model's own maps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from support.students import precompute

from shd_ref.cache import CacheReader, sample_key, trim_inputs, verify_cache
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    PrecomputeOptions,
    RunOptions,
    find_kinds,
    find_sites,
    input_specs,
    load_teacher,
    measure_fidelity,
)
from shd_torch import export_teacher

pytestmark = pytest.mark.slow  # torch.export takes seconds to start

HEADS = 4
LENGTHS, DECODER_LENGTHS = (9, 5, 7, 4), (3, 6, 2, 4)
KINDS = {"whisper": ("encoder", "decoder", "cross"), "perceiver": ("cross", "decoder")}
OWN_MAPS = {
    "whisper": ("encoder_attentions", "decoder_attentions", "cross_attentions"),
    "perceiver": ("cross_attentions", "attentions"),
}
"""The model's names for the maps of each site."""


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "d_model": 16}
    if name == "whisper":
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": 24}
        sizes |= {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, "dropout": 0.0}
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config: Any = transformers.WhisperConfig(begin_suppress_tokens=None, suppress_tokens=None, **sizes)
        model: Any = transformers.WhisperForConditionalGeneration(config)
    else:
        sizes |= {"num_latents": 3, "d_latents": 16, "num_blocks": 1, "num_self_attends_per_block": 1}
        sizes |= {"num_self_attention_heads": HEADS, "num_cross_attention_heads": HEADS, "qk_channels": 16}
        sizes |= {"v_channels": 16, "max_position_embeddings": 9, "attention_probs_dropout_prob": 0.0}
        config = transformers.PerceiverConfig(**sizes)
        reads = transformers.models.perceiver.modeling_perceiver.PerceiverTextPreprocessor(config)
        model = transformers.PerceiverModel(config, input_preprocessor=reads)
    with torch.no_grad():  # maps that are not nearly uniform
        for parameter in model.parameters():
            parameter *= 6.0 if parameter.ndim == 2 else 1.0
    return model.eval()


def make_data(name: str) -> dict[str, NDArray[Any]]:
    """Token numbers and their mask, zero behind each length; for Whisper of the decoder, beside features."""
    lengths, prefix = (DECODER_LENGTHS, "decoder_") if name == "whisper" else (LENGTHS, "")
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.where(mask, np.random.default_rng(len(prefix)).integers(3, 40, mask.shape), 0)
    tokens = {"decoder_input_ids" if prefix else "inputs": ids, f"{prefix}attention_mask": mask.astype(np.int64)}
    features = np.random.default_rng(0).normal(size=(4, 8, 20)).astype(np.float32)
    return ({"input_features": features} if prefix else {}) | tokens


@pytest.mark.parametrize("name", KINDS)
def test_records_hold_the_models_own_maps(name: str, tmp_path: Path) -> None:
    model, data, teacher = make_model(name), make_data(name), tmp_path / "teacher.onnx"
    tensors = {key: torch.from_numpy(array) for key, array in data.items()}
    decoder = [key for key in data if key.startswith("decoder_")]
    axes = {key: {0: "batch"} | ({1: "decoder_sequence"} if key in decoder else {}) for key in data}
    export_teacher(model, tensors, teacher, dynamic=axes)

    graph = load_teacher(teacher)
    sites = find_sites(graph)
    assert [site.reason for site in sites] == [None] * len(sites)
    kinds = find_kinds(graph, sites, input_specs(graph))
    assert tuple(str(kinds.kind(site)) for site in sites) == KINDS[name]

    # As many heads as the teacher's: a record holds its maps as they are.
    precompute(teacher, data, tmp_path / "cache", PrecomputeOptions(HEADS, codec="float32"), RunOptions(batch_size=3))
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    if name == "whisper":  # Perceiver has no other attention
        model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**tensors, output_attentions=True)
    limit = load_tolerances()["graph"]["probs"]["float32"]
    masks = [key if key in data else None for key in ("attention_mask", "decoder_attention_mask")]
    for number, (n, m) in enumerate(zip(LENGTHS, DECODER_LENGTHS, strict=True)):
        sample = {key: array[number] for key, array in data.items()}
        record = reader.read(sample_key(trim_inputs(sample, masks[0], decoder, masks[1])[0]))
        assert record.shapes == (((10, 10), (m, m), (m, 10)) if name == "whisper" else ((3, 3), (3, n)))
        for column, layer in enumerate(reader.manifest.attention.layers):
            own = outputs[OWN_MAPS[name][layer.teacher_layer]][-1][number].numpy()
            rows, columns = record.shapes[column]
            maps = reader.decode(record, column)
            assert maps.std() > 0.01, "maps that are all alike compare nothing"
            np.testing.assert_allclose(maps, own[:, :rows, :columns], atol=limit)

    first = measure_fidelity(teacher, data, PrecomputeOptions(2), RunOptions(batch_size=3))[0]
    assert len(first.plans) == len(sites)
    assert 0 < first.attention_error < 1
