"""Encoder-decoders from the model to a taught student: encoder, decoder and cross attention, two lengths a sample."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from support.binding.models import sharpen
from support.exported_models import trace
from support.refusals import refusal
from torch.utils.data import DataLoader

from shd_ref.cache import CacheReader, verify_cache
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    PrecomputeOptions,
    RunOptions,
    find_kinds,
    find_sites,
    input_specs,
    load_teacher,
    recheck_records,
)
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset, attention_kl, capture_attention, layer_kls
from shd_torch.export import example_inputs
from shd_torch.maps import squeeze_heads, value_outputs

pytestmark = pytest.mark.slow  # every test stands on a large export

ENCODER_LENGTHS, DECODER_LENGTHS = (9, 5, 7, 9, 4, 6, 8), (3, 6, 6, 2, 5, 6, 4)
HEADS = 2
LAYERS = {"encoder": 1, "decoder": 1, "cross": 1}


def make_t5(heads: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 16 // heads, "d_ff": 24, "num_heads": heads}
    sizes |= {"num_layers": layers, "num_decoder_layers": layers}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(**sizes, **tokens, dropout_rate=0.0)
    return sharpen(transformers.T5ForConditionalGeneration(config), ("q.weight",), 4.0)


def make_bart(heads: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 24}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(**sizes, **tokens, forced_eos_token_id=None, dropout=0.0)
    return sharpen(transformers.BartForConditionalGeneration(config), ("q_proj.weight", "k_proj.weight"), 12.0)


MAKERS = {"t5": make_t5, "bart": make_bart}


class Made(NamedTuple):
    """What the way from model to cache left."""

    teacher: Any
    graph: Path
    cache: Path
    arrays: dict[str, NDArray[Any]]


def make_arrays() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for prefix, lengths in (("", ENCODER_LENGTHS), ("decoder_", DECODER_LENGTHS)):
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        arrays[f"{prefix}input_ids"] = np.where(mask, rng.integers(3, 40, mask.shape), 0)
        arrays[f"{prefix}attention_mask"] = mask.astype(np.int64)
    return arrays


@pytest.fixture(scope="module", params=list(MAKERS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    teacher = MAKERS[request.param](4, 2, seed=1).eval()
    # By the older exporter; the hub's models of this kind go by the newer one.
    trace(teacher, example_inputs(teacher), folder / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=HEADS, num_student_layers=LAYERS, codec="float32")
    run = RunOptions(batch_size=3, num_threads=1)
    precompute(folder / "teacher.onnx", make_arrays(), folder / "cache", options, run)
    return Made(teacher, folder / "teacher.onnx", folder / "cache", make_arrays())


def samples_of(arrays: dict[str, NDArray[Any]]) -> list[dict[str, torch.Tensor]]:
    return [
        {name: torch.from_numpy(array[number]) for name, array in arrays.items()}
        for number in range(len(ENCODER_LENGTHS))
    ]


def make_student(path: Made, layers: int = 1) -> Any:
    maker = make_t5 if type(path.teacher).__name__.startswith("T5") else make_bart
    return maker(HEADS, layers, seed=5)


def test_the_sites_of_the_graph_are_told_apart(path: Made) -> None:
    model = load_teacher(path.graph)
    sites = find_sites(model)
    kinds = find_kinds(sites, input_specs(model))
    assert [kinds.kind(site) for site in sites] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    manifest = CacheReader(path.cache).manifest
    assert manifest.inputs.decoder == ("decoder_attention_mask", "decoder_input_ids")
    assert (manifest.inputs.mask, manifest.inputs.decoder_mask) == ("attention_mask", "decoder_attention_mask")
    assert [layer.teacher_layer for layer in manifest.attention.layers] == [1, 4, 5]  # the last of each kind
    assert {each.kind: each.num_student_layers for each in manifest.attention.kinds} == LAYERS
    assert verify_cache(path.cache).ok
    assert recheck_records(path.cache, path.graph, path.arrays).records == len(ENCODER_LENGTHS)


def test_cached_maps_are_the_models_own_maps_merged(path: Made) -> None:
    reader = CacheReader(path.cache)
    joined = SupervisedDataset(samples_of(path.arrays), reader)
    limit = load_tolerances()["graph"]["probs"]["float32"]
    tensors = {name: torch.from_numpy(array) for name, array in path.arrays.items()}
    with torch.no_grad(), capture_attention(path.teacher, keep_values=True) as captured:
        path.teacher(**tensors, use_cache=False)
    for column, (kind, call) in enumerate(zip(LAYERS, (1, 4, 5), strict=True)):
        attention = captured.calls[call]
        projection = getattr(attention.module, "out_proj", None) or attention.module.o
        rows = tensors["attention_mask" if kind == "encoder" else "decoder_attention_mask"].bool()
        outputs = value_outputs(attention.value, projection.weight.detach().T)
        merged = squeeze_heads(captured.probs[call], outputs, HEADS, query_mask=rows).probs
        for number, (key, n, m) in enumerate(zip(joined.keys, ENCODER_LENGTHS, DECODER_LENGTHS, strict=True)):
            record = reader.read(key)
            assert record.shapes == ((n, n), (m, m), (m, n))
            num_rows, num_keys = record.shapes[column]
            expected = merged[number, :, :num_rows, :num_keys].detach().numpy()
            np.testing.assert_allclose(reader.decode(record, column), expected, atol=limit)


def test_hidden_states_are_those_of_the_models_decoder(path: Made, tmp_path: Path) -> None:
    """As Hugging Face counts them: T5's last one before the scale in front of its head."""
    options = PrecomputeOptions(num_student_heads=HEADS, num_student_layers=LAYERS, hidden=(0, 1, 2))
    precompute(path.graph, path.arrays, tmp_path / "cache", options, RunOptions(num_threads=1))
    tensors = {name: torch.from_numpy(array) for name, array in path.arrays.items()}
    with torch.no_grad():
        output = path.teacher(**tensors, output_hidden_states=True, use_cache=False)
    expected = dict(enumerate(output.decoder_hidden_states[:3]))
    joined = SupervisedDataset(samples_of(path.arrays), tmp_path / "cache")
    _, supervision = joined.collate([joined[index] for index in range(len(joined))])
    mask = tensors["decoder_attention_mask"].bool()
    for layer, states in supervision.hidden_states(mask.shape[1]).items():
        torch.testing.assert_close(states[mask], expected.pop(layer)[mask], rtol=2e-3, atol=2e-3)
    assert not expected


def test_a_student_learns_every_kind(path: Made) -> None:
    joined = SupervisedDataset(samples_of(path.arrays), path.cache)
    loader = DataLoader(joined, 4, collate_fn=joined.collate)
    student = make_student(path)
    optimizer = torch.optim.Adam(student.parameters(), 0.01)
    history = []
    for step in range(12):
        sums: dict[int, float] = {}
        for batch, supervision in loader:
            with capture_attention(student, layers=supervision.layers) as captured:
                student(**batch)
            terms = layer_kls(captured, supervision, check=step == 0)
            sizes = [(call.query.shape[2], call.key.shape[2]) for call in captured.calls]
            if step == 0:  # the same from a loop of one's own, and from maps
                assert [size[0] == size[1] for size in sizes] == [True, True, False]
                taught = supervision.supervise(sizes)
                for number, call in enumerate(captured.calls):
                    alone = attention_kl(call.query, call.key, taught[number], check=True, **call.mask_keywords)
                    torch.testing.assert_close(alone, terms[number])
                    torch.testing.assert_close(taught[number].probs(), supervision.decode(sizes)[number])
            optimizer.zero_grad()
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            sums = {layer: sums.get(layer, 0.0) + float(term.detach()) for layer, term in terms.items()}
        history.append(sums)
    assert sorted(history[0]) == [0, 1, 2]
    for layer, first in history[0].items():
        assert history[-1][layer] < 0.85 * first, (list(LAYERS)[layer], first, history[-1][layer])


def test_a_student_of_another_depth_is_refused(path: Made) -> None:
    joined = SupervisedDataset(samples_of(path.arrays), path.cache)
    batch, supervision = joined.collate([joined[0], joined[1]])
    student = make_student(path, layers=2)
    with (
        capture_attention(student, layers=supervision.layers),
        refusal("cache-mismatch", "encoder=1, decoder=1, cross=1; got encoder=2, decoder=2, cross=2"),
    ):
        student(**batch)


@pytest.mark.parametrize("layers", [2, {"encoder": 1, "sideways": 1}])
def test_a_number_for_each_kind_is_asked_for(path: Made, tmp_path: Path, layers: Any) -> None:
    options = PrecomputeOptions(num_student_heads=HEADS, num_student_layers=layers)
    with refusal("layers-invalid", "--student-layers encoder=2,decoder=2,cross=2"):
        precompute(path.graph, path.arrays, tmp_path / "cache", options)
    assert not (tmp_path / "cache").exists()


def test_one_kind_alone_is_one_number(path: Made, tmp_path: Path) -> None:
    options = PrecomputeOptions(num_student_heads=HEADS, num_student_layers=1, sites="cross")
    precompute(path.graph, path.arrays, tmp_path / "cache", options, RunOptions(num_threads=1))
    joined = SupervisedDataset(samples_of(path.arrays), tmp_path / "cache")
    assert [(each.kind, each.num_student_layers) for each in joined.cache.manifest.attention.kinds] == [("cross", 1)]
    batch, supervision = joined.collate([joined[0], joined[1]])
    student = make_student(path)
    with capture_attention(student, layers=supervision.layers) as captured:
        student(**batch)
    assert captured.calls[0].key.shape[2] == max(ENCODER_LENGTHS)
    assert sorted(layer_kls(captured, supervision, check=True)) == [0]
