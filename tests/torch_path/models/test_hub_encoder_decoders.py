"""Whisper, Marian and Perceiver as the hub has them: exported, cached, and equal to the model's own maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from support.exported_models import trace
from support.students import precompute

from shd_ref.cache import CacheReader, sample_key, trim_inputs, verify_cache
from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.graph.inputs import input_specs
from shd_ref.teacher.graph.kinds import find_kinds
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.study.fidelity import FidelityOptions, measure_fidelity
from shd_ref.tolerances import load_tolerances
from shd_torch import export_teacher

pytestmark = pytest.mark.slow  # torch.export takes seconds to start

HEADS = 4
LENGTHS, DECODER_LENGTHS = (9, 5, 7, 4), (3, 6, 2, 4)
SIZES = {"vocab_size": 40, "d_model": 16, "dropout": 0.0, "pad_token_id": 0}
LAYERS = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip


def tokens(lengths: tuple[int, ...], prefix: str = "", name: str = "input_ids") -> dict[str, NDArray[Any]]:
    """Token numbers and their mask, zero behind each length."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.where(mask, np.random.default_rng(len(prefix)).integers(3, 40, mask.shape), 0)
    return {f"{prefix}{name}": ids, f"{prefix}attention_mask": mask.astype(np.int64)}


def make_whisper() -> Any:
    config = transformers.WhisperConfig(
        num_mel_bins=8, max_source_positions=10, max_target_positions=16, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None, **SIZES, **LAYERS,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def make_marian() -> Any:
    config = transformers.MarianConfig(
        max_position_embeddings=32,
        eos_token_id=2,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        **SIZES,
        **LAYERS,
    )
    return transformers.MarianMTModel(config)


def make_perceiver() -> Any:
    config = transformers.PerceiverConfig(
        num_latents=3, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1, vocab_size=40,
        num_self_attention_heads=HEADS, num_cross_attention_heads=HEADS, qk_channels=16, v_channels=16,
        max_position_embeddings=9, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.PerceiverModel(
        config, input_preprocessor=transformers.models.perceiver.modeling_perceiver.PerceiverTextPreprocessor(config)
    )


class Case(NamedTuple):
    """A model, its data, its open axes besides the batch, and what its graph and records are to hold.

    ``maps`` names the model's own maps of each site; ``shape`` gives a record's from its two lengths.
    """

    make: Callable[[], Any]
    data: dict[str, NDArray[Any]]
    axes: dict[str, str]
    kinds: tuple[str, ...]
    maps: tuple[str, ...]
    shapes: Callable[[int, int], tuple[tuple[int, int], ...]]


OWN_MAPS = ("encoder_attentions", "decoder_attentions", "cross_attentions")
CASES = {
    "whisper": Case(
        make_whisper,
        {
            "input_features": np.random.default_rng(0).normal(size=(4, 8, 20)).astype(np.float32),
            **tokens(DECODER_LENGTHS, "decoder_"),
        },
        {"decoder_input_ids": "decoder_sequence", "decoder_attention_mask": "decoder_sequence"},
        ("encoder", "decoder", "cross"),
        OWN_MAPS,
        lambda n, m: ((10, 10), (m, m), (m, 10)),
    ),
    "marian": Case(
        make_marian,
        tokens(LENGTHS) | tokens(DECODER_LENGTHS, "decoder_"),
        {
            "input_ids": "sequence",
            "attention_mask": "sequence",
            "decoder_input_ids": "decoder_sequence",
            "decoder_attention_mask": "decoder_sequence",
        },
        ("encoder", "decoder", "cross"),
        OWN_MAPS,
        lambda n, m: ((n, n), (m, m), (m, n)),
    ),
    "perceiver": Case(
        make_perceiver,
        tokens(LENGTHS, name="inputs"),
        {},
        ("cross", "decoder"),
        ("cross_attentions", "attentions"),
        lambda n, m: ((3, 3), (3, n)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_records_hold_the_models_own_maps(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():  # maps that are not nearly uniform
        for parameter in model.parameters():
            parameter *= 6.0 if parameter.ndim == 2 else 1.0
    data = case.data
    tensors = {each: torch.from_numpy(array) for each, array in data.items()}
    axes = {each: {0: "batch"} | ({1: case.axes[each]} if each in case.axes else {}) for each in data}
    teacher = tmp_path / "teacher.onnx"
    if name == "marian":  # BART's attention, which the newer exporter meets in Whisper: the older one is faster
        trace(model, tensors, teacher)
    else:
        export_teacher(model, tensors, teacher, dynamic=axes)

    graph = load_teacher(teacher)
    sites = find_sites(graph)
    assert [site.reason for site in sites] == [None] * len(sites)
    kinds = find_kinds(graph, sites, input_specs(graph))
    assert tuple(str(kinds.kind(site)) for site in sites) == case.kinds

    # As many heads as the teacher's: a record holds its maps as they are.
    precompute(teacher, data, tmp_path / "cache", PrecomputeOptions(HEADS, codec="float32"), RunOptions(batch_size=3))
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    if name != "perceiver":  # which has no other attention
        model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**tensors, output_attentions=True)
    limit = load_tolerances()["graph"]["probs"]["float32"]
    pairs = ("attention_mask", "decoder_attention_mask")
    masks = [each if each in data else None for each in pairs]
    decoder = [each for each in data if each.startswith("decoder_")]
    for number in range(len(LENGTHS)):
        sample = {each: array[number] for each, array in data.items()}
        record = reader.read(sample_key(trim_inputs(sample, masks[0], decoder, masks[1])[0]))
        assert record.shapes == case.shapes(LENGTHS[number], DECODER_LENGTHS[number])
        for place, layer in enumerate(reader.manifest.attention.layers):
            own = outputs[case.maps[layer.teacher_layer]][-1][number].numpy()
            rows, columns = record.shapes[place]
            found = reader.decode(record, place)
            assert found.std() > 0.01, "maps that are all alike compare nothing"
            np.testing.assert_allclose(found, own[:, :rows, :columns], atol=limit)

    options = FidelityOptions((2,), ("progressive",), ("shd",), ("map",))
    report = measure_fidelity(teacher, data, options, RunOptions(batch_size=3))
    assert len(report.sites) == len(sites)
    assert 0 < report.results[0].attention_error < 1
