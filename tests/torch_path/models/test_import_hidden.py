"""Files as vLLM's connector and speculators write them become a cache; a damaged one is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="texts are tokenised")
pytest.importorskip("transformers", reason="the teacher is one of its models")

import safetensors.torch
import transformers
from support.commands import shd
from support.makers import contents
from support.refusals import refusal
from support.shrink.stories import load_llama

from shd_ref.cache import CacheReader, TeacherHead, sample_key, verify_cache
from shd_ref.teacher.precompute.imported import import_hidden
from shd_ref.teacher.sources import open_source
from shd_ref.teacher.sources.server_files import read_hf_head, read_sample


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A folder with a teacher, its texts, and a server's files: bfloat16 states before the final norm."""
    folder, stories = tmp_path_factory.mktemp("served"), shared_data / "stories260K"
    if not stories.is_dir():
        pytest.skip(f"the language model is not there: no folder {stories.name}")
    model = load_llama(stories / "stories260K.bin")
    model.save_pretrained(folder / "teacher")
    vocabulary = {f"t{number}": number for number in range(512)}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    rules = {"version": "1.0", "model": words, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    rules |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "teacher" / "tokenizer.json").write_text(json.dumps(rules | {"added_tokens": []}))
    tokens = np.load(stories / "self_sampled_1024x256_uint16.npy")[:6, :96].astype(np.int64)
    texts = [ids[: 96 - 8 * (number == 3)] for number, ids in enumerate(tokens)]
    lines = [json.dumps({"text": " ".join(f"t{token}" for token in ids)}) for ids in texts]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    (folder / "states").mkdir()
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][0]))
    for number, ids in enumerate(texts):  # in an order of the server's own
        with torch.no_grad():
            first = model(torch.tensor(ids)[None], output_hidden_states=True).hidden_states[1][0]
        write(folder / "states" / f"hs_{5 - number}.safetensors", ids, torch.stack((first, seen[-1]), 1))
    hook.remove()
    return folder


def write(path: Path, ids: Any, states: torch.Tensor, **more: torch.Tensor) -> None:
    tensors = {"token_ids": torch.as_tensor(np.asarray(ids)), "hidden_states": states.bfloat16().contiguous()}
    safetensors.torch.save_file(tensors | more, path)


def run(served: Path, out: Path, folder: Path | None = None, **options: Any) -> Any:
    source = open_source(served / "texts.jsonl", tokenizer=served / "teacher")
    return import_hidden(folder or served / "states", source, served / "teacher", out, **options)


def test_a_servers_files_give_the_models_logits(served: Path, shared_data: Path, tmp_path: Path) -> None:
    words = ["import-hidden", str(served / "states"), "--inputs", str(served / "texts.jsonl")]
    words += ["--tokenizer", str(served / "teacher"), "--teacher", str(served / "teacher"), "--codec", "float32"]
    said = shd(*words, "--out", str(tmp_path / "cache"))
    assert "rms norm" in said
    assert verify_cache(tmp_path / "cache").ok
    reader = CacheReader(tmp_path / "cache")
    head, model = reader.read_head(), load_llama(shared_data / "stories260K" / "stories260K.bin")
    for path in sorted((served / "states").iterdir()):
        ids = safetensors.torch.load_file(path)["token_ids"].numpy()
        record = reader.read(sample_key({"input_ids": ids, "attention_mask": np.ones_like(ids)}))
        with torch.no_grad():
            expected = model(torch.tensor(ids)[None]).logits[0]
        moved = torch.tensor(head.logits(reader.decode_last(record))).softmax(-1) - expected.softmax(-1)
        assert moved.abs().sum(-1).max() / 2 < 0.05  # the states are bfloat16


def test_an_import_goes_on_where_it_stopped(served: Path, tmp_path: Path) -> None:
    run(served, tmp_path / "cache")
    whole = contents(tmp_path / "cache")
    (tmp_path / "cache" / "SEALED.json").unlink()
    for path in (tmp_path / "cache").rglob("000002.*"):
        path.unlink()
    with refusal("cache-mismatch"):
        run(served, tmp_path / "cache", codec="int8")
    run(served, tmp_path / "cache")
    assert contents(tmp_path / "cache") == whole


def cut(path: Path, others: dict[str, Any]) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change(**tensors: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path, dict[str, Any]], None]:
    def apply(path: Path, others: dict[str, Any]) -> None:
        held = safetensors.torch.load_file(path)
        made = {name: tensors.get(name, lambda one: one)(tensor).contiguous() for name, tensor in held.items()}
        safetensors.torch.save_file(made, path)

    return apply


def filled(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(states: torch.Tensor) -> torch.Tensor:
        states[row, -1, 3] = value
        return states

    return fill


def swap(path: Path, others: dict[str, Any]) -> None:
    """The states of another text of the same length."""
    write(path, safetensors.torch.load_file(path)["token_ids"], others["hs_0.safetensors"]["hidden_states"])


def rename(path: Path, others: dict[str, Any]) -> None:
    held = safetensors.torch.load_file(path)
    safetensors.torch.save_file({"tokens": held["token_ids"], "hidden_states": held["hidden_states"]}, path)


DAMAGES: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None]]] = {
    "truncated": ("inputs-invalid", cut),
    "empty": ("inputs-invalid", lambda path, _: path.write_bytes(b"")),
    "no header": ("inputs-invalid", lambda path, _: path.write_bytes(b"\xff" * 64)),
    "other tokens": ("inputs-invalid", change(token_ids=lambda ids: ids.flip(0))),
    "a token fewer": ("inputs-invalid", change(token_ids=lambda ids: ids[:-1])),
    "tokens beyond the vocabulary": ("inputs-invalid", change(token_ids=lambda ids: ids + 600)),
    "tokens that are real": ("inputs-invalid", change(token_ids=lambda ids: ids.float())),
    "another name": ("inputs-invalid", rename),
    "swapped": ("inputs-invalid", swap),
    "shifted": ("inputs-invalid", change(hidden_states=lambda states: states.roll(1, 0))),
    "another width": ("inputs-invalid", change(hidden_states=lambda states: states[..., :-2])),
    "NaN": ("not-finite", change(hidden_states=filled(5, float("nan")))),
    "infinity": ("not-finite", change(hidden_states=filled(95, float("inf")))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(served: Path, tmp_path: Path, damage: str) -> None:
    code, apply = DAMAGES[damage]
    folder = tmp_path / "states"
    shutil.copytree(served / "states", folder)
    others = {path.name: safetensors.torch.load_file(path) for path in folder.iterdir()}
    apply(folder / "hs_4.safetensors", others)
    with refusal(code) as refused:
        run(served, tmp_path / "cache", folder)
    assert "hs_4.safetensors" in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_every_cut_and_every_bit_of_its_header_is_refused(tmp_path: Path) -> None:
    path, head = tmp_path / "hs_0.safetensors", TeacherHead(np.ones((24, 8), np.float32))
    write(path, np.arange(24), torch.ones(24, 2, 8))
    whole = path.read_bytes()
    read_sample(path, -1, head)
    damaged = [whole[:size] for size in range(len(whole))]
    for offset in range(8 + int.from_bytes(whole[:8], "little")):
        flipped = (bytes([whole[offset] ^ 1 << bit]) for bit in range(8))
        damaged += [whole[:offset] + byte + whole[offset + 1 :] for byte in flipped]
    for data in damaged:
        path.write_bytes(data)
        with refusal("inputs-invalid", "hs_0.safetensors"):
            read_sample(path, -1, head)


def test_a_text_without_a_file_another_head_and_another_layer_are_told(served: Path, tmp_path: Path) -> None:
    shutil.copytree(served / "states", tmp_path / "states")
    (tmp_path / "states" / "hs_2.safetensors").unlink()
    with refusal("inputs-invalid", "1 have none, first text 3"):
        run(served, tmp_path / "cache", tmp_path / "states")
    with refusal("inputs-invalid", "layer must be one of the 2"):
        run(served, tmp_path / "cache", layer=2)
    shutil.copytree(served / "teacher", tmp_path / "teacher")
    tensors = safetensors.torch.load_file(tmp_path / "teacher" / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(100, 0).contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "teacher" / "model.safetensors")
    source = open_source(served / "texts.jsonl", tokenizer=served / "teacher")
    with refusal("inputs-invalid", "with this head no better than chance, over 5"):
        import_hidden(served / "states", source, tmp_path / "teacher", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (tmp_path / "few").mkdir()
    shutil.copy(served / "states" / "hs_5.safetensors", tmp_path / "few")
    (tmp_path / "one.jsonl").write_text((served / "texts.jsonl").read_text().splitlines()[0])
    few = open_source(tmp_path / "one.jsonl", tokenizer=served / "teacher")
    _, remark = import_hidden(tmp_path / "few", few, tmp_path / "teacher", tmp_path / "cache")
    assert "too few to tell" in str(remark)
    _, remark = run(served, tmp_path / "right")
    assert remark is None


@pytest.mark.parametrize("name", ["logit_scale", "final_logit_softcapping", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["3", float("nan"), 0, True])
def test_numbers_of_the_configuration_are_checked(served: Path, tmp_path: Path, name: str, value: Any) -> None:
    shutil.copytree(served / "teacher", tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | {name: value}))
    source = open_source(served / "texts.jsonl", tokenizer=served / "teacher")
    with refusal("inputs-invalid", "config.json" if value != value else f"{name} in "):
        import_hidden(served / "states", source, tmp_path / "teacher", tmp_path / "cache")


SMALL = {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
GPT: dict[str, Any] = {"vocab_size": 53, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere": {**SMALL, "logit_scale": 0.25},
    "Gemma": {**SMALL, "head_dim": 8},
    "Gemma2": {**SMALL, "head_dim": 8, "final_logit_softcapping": 5.0},
    "Gemma3": {**SMALL, "head_dim": 8},
    "GPT2": GPT,
    "GPTNeoX": SMALL,
    "Granite": {**SMALL, "logits_scaling": 8.0},
    "Llama": SMALL,
    "Mistral": SMALL,
    "Olmo2": SMALL,
    "Phi": SMALL,
    "Phi3": SMALL,
    "Qwen2": SMALL,
    "Qwen3": {**SMALL, "head_dim": 8},
    "SmolLM3": SMALL,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_folder_makes_the_models_logits(tmp_path: Path, family: str, tied: bool) -> None:
    """From states before and after the final norm; tied heads may have a bias."""
    torch.manual_seed(1)
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    config = getattr(transformers, config_name)(**FAMILIES[family], tie_word_embeddings=tied)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    states: list[torch.Tensor] = []
    names = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
    norm = next(getattr(model.base_model, name) for name in names if hasattr(model.base_model, name))
    norm.register_forward_hook(lambda _, arguments, made: states.extend((arguments[0][0], made[0])))
    with torch.no_grad():
        expected = model(torch.arange(3, 12)[None]).logits[0]
    for before_norm, rows in zip((True, False), states, strict=True):
        logits = read_hf_head(tmp_path, before_norm=before_norm).logits(rows.numpy())
        np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_link_out_of_the_folder_is_refused(served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    shutil.copytree(served / "states", folder)
    (folder / "hs_0.safetensors").unlink()
    (folder / "hs_0.safetensors").symlink_to(served / "states" / "hs_0.safetensors")
    with refusal("inputs-invalid", "hs_0.safetensors is a link to"):
        run(served, tmp_path / "cache", folder)
