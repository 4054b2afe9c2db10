"""The states that a head reads, and the head: of exported language models, their logits are the models' own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.commands import shd
from support.exported_models import trace
from support.refusals import refusal

from shd_ref.cache import CacheReader, verify_cache
from shd_ref.errors import ShdError
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.options import LAST
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import export_teacher

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = {"vocab_size": 53, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = (
    TOKENS
    | {"pad_token_id": 0, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
)
GPT = TOKENS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "untied": ("Llama", {**SMALL, "tie_word_embeddings": False}, {}),
    "tied": ("Llama", {**SMALL, "tie_word_embeddings": True}, {}),
    "soft cap": ("Gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 5.0}, {"soft_cap": 5.0}),
    "scale": ("Cohere", {**SMALL, "logit_scale": 0.25}, {"scale": 0.25}),
    "divided": ("Granite", {**SMALL, "logits_scaling": 8.0}, {"scale": 0.125}),
    "bias": ("Phi", {**SMALL}, {"bias": True}),
    "layer norm": ("GPT2", GPT, {}),
}
RUN = RunOptions(batch_size=3, num_threads=1)
ALONE = PrecomputeOptions(form="none", hidden=(LAST,), hidden_codec="float32")


def export(folder: Path, name: str, exporter: Any = trace) -> tuple[Any, Path]:
    family, settings, _ = MODELS[name]
    torch.manual_seed(1)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    exporter(model, tokens(), folder / "teacher.onnx")
    return model, folder / "teacher.onnx"


def tokens() -> dict[str, Any]:
    ids = np.random.default_rng(3).integers(3, 53, (5, 9))
    mask = np.ones_like(ids)
    mask[1, 6:] = mask[3, 2:] = 0
    return {"input_ids": torch.tensor(ids * mask), "attention_mask": torch.tensor(mask)}


def arrays() -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tokens().items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return export(tmp_path_factory.mktemp("llama"), "untied")


@pytest.mark.parametrize(
    ("name", "exporter"),
    # "divided" is untied too; rotary positions of "scale" are fixed by the older exporter.
    [(name, trace) for name in MODELS if name not in ("untied", "scale")]
    + [pytest.param(name, export_teacher, marks=pytest.mark.nightly) for name in MODELS],
)
def test_head_and_states_make_the_models_logits(tmp_path: Path, name: str, exporter: Any) -> None:
    model, graph = export(tmp_path, name, exporter)
    precompute(graph, arrays(), tmp_path / "cache", ALONE, RUN)
    assert verify_cache(tmp_path / "cache").ok
    assert recheck_records(tmp_path / "cache", graph, arrays(), num_records=5).target_rows == 9 * 3 + 6 + 2
    reader = CacheReader(tmp_path / "cache")
    form, head = reader.manifest.exact, reader.read_head()
    assert form is not None
    for member, value in {"scale": 1.0, "soft_cap": None, "bias": False, **MODELS[name][2]}.items():
        assert getattr(form.head, member) == value
    with torch.no_grad():
        expected = model(**tokens()).logits.numpy()
    for record in (reader.read(key) for key in reader):
        made = head.logits(reader.decode_last(record))
        np.testing.assert_allclose(made, expected[record.index, : record.length], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_codecs_stay_within_their_bounds(llama: tuple[Any, Path], tmp_path: Path, codec: str) -> None:
    model, graph = llama
    precompute(graph, arrays(), tmp_path / "cache", replace(ALONE, hidden_codec=codec), RUN)
    reader = CacheReader(tmp_path / "cache")
    form, head = reader.manifest.exact, reader.read_head()
    assert form is not None
    assert form.row_sizes == ({"float16": 32, "int8": 20}[codec],)
    with torch.no_grad():
        exact = model.model(**tokens()).last_hidden_state.numpy()
    widest = np.abs(head.weight).sum(axis=-1).max()
    for record in (reader.read(key) for key in reader):
        states, stored = exact[record.index, : record.length], reader.decode_last(record)
        bound = form.coded[0][1].bound(states)
        assert (np.abs(stored - states).max(axis=-1) <= bound + 2e-5).all()
        log_p, log_q = (torch.log_softmax(torch.tensor(head.logits(side)).double(), -1) for side in (states, stored))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).numpy()
        assert (kl <= (widest * (bound + 2e-5)) ** 2 / 2 + 1e-9).all()  # CACHE-193


def test_the_command_writes_them_beside_other_forms(llama: tuple[Any, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays())
    words = ["precompute", str(llama[1]), "--inputs", str(tmp_path / "data.npz"), "--student-heads", "1"]
    words += ["--hidden", "1,last", "--hidden-codec", "int8", "--logits", "topk", "--logits-top", "4"]
    output = shd(*words, "--out", str(tmp_path / "cache"))
    assert "exact" in output
    listed = shd("ls", str(tmp_path / "cache"))
    assert "53 classes, float32" in listed
    assert verify_cache(tmp_path / "cache").ok
    again = ("--teacher", str(llama[1]), "--inputs", str(tmp_path / "data.npz"))
    assert "same" in shd("verify", str(tmp_path / "cache"), *again)


def test_classes_that_pad_the_vocabulary_are_left_out(llama: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(ShdError, match="vocab_size must cut padding alone"):
        precompute(llama[1], arrays(), tmp_path / "a", replace(ALONE, vocab_size=50), RUN)
    with pytest.raises(ShdError, match="vocab_size must be at most 53"):
        precompute(llama[1], arrays(), tmp_path / "a", replace(ALONE, vocab_size=54), RUN)
    assert not (tmp_path / "a").exists()


def test_another_head_is_refused(llama: tuple[Any, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    precompute(llama[1], arrays(), cache, ALONE, RUN)
    path = cache / "teacher_head.safetensors"
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for harmed, code in (
        (flipped, "cache-corrupt"),
        (whole[::-1], "cache-corrupt"),
        (whole[:-1], "cache-incomplete"),
    ):
        path.write_bytes(harmed)
        with refusal(code, "teacher_head.safetensors"):
            CacheReader(cache).read_head()
        assert [problem.code for problem in verify_cache(cache).problems] == [code]
    path.unlink()
    with refusal("cache-incomplete", "teacher_head.safetensors"):
        CacheReader(cache).read_head()
    precompute(llama[1], arrays(), cache, ALONE, RUN)  # writes it again
    assert verify_cache(cache).ok
    assert path.read_bytes() == whole
