"""Hidden states as servers write them, and the head of a Hugging Face folder: untrusted safetensors files.

vLLM's connector writes one file a request, speculators ``hs_<i>.safetensors``: ``token_ids`` ``(L,)`` and
``hidden_states`` ``(L, layers, D)``, or ``(L, D)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import FinalNorm, TeacherHead
from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError, inputs_invalid
from shd_ref.teacher.sources.sentence_folder import find_home
from shd_ref.teacher.sources.source import import_package

_REAL: Final = ("F32", "F16", "BF16")
_NORMS: Final = ("model.norm", "model.final_layernorm", "transformer.ln_f", "gpt_neox.final_layer_norm")
_HEADS: Final = ("lm_head.weight", "embed_out.weight")
_TIED: Final = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
_MODELS: Final = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2"),
    *("phi", "phi3", "qwen2", "qwen3", "smollm3"),
)
"""Model types whose heads are known to be no more than what ``TeacherHead`` says."""


def open_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, which slices read; ``inputs-invalid`` for one that is not as it says."""
    library = import_package("safetensors")
    import_package("ml_dtypes")  # which teaches NumPy bfloat16
    try:
        file = library.safe_open(path, framework="numpy")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (OSError, library.SafetensorError) as error:
        raise inputs_invalid(f"{path} must be a whole safetensors file: {error}: write it again") from error


@dataclass(frozen=True, eq=False)
class ServerSample:
    """A file of a server: tokens ``(L,)`` and the states of one layer ``(L, D)``, float32."""

    path: Path
    tokens: NDArray[np.int64]
    states: NDArray[np.float32]


def server_files(folder: Path) -> list[Path]:
    """Its files, ascending by name; ``inputs-invalid`` for a folder without."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
        home = find_home(folder)
        away = [path for path in paths if not path.resolve().is_relative_to(home)]
    except OSError as error:
        raise inputs_invalid(f"{folder} must be a folder of a server's files: {error}") from error
    if away:
        raise inputs_invalid(f"{folder} must hold its own files; {away[0].name} is a link to {away[0].resolve()}")
    if not paths:
        raise inputs_invalid(f"{folder} must hold .safetensors files with token_ids and hidden_states; got none")
    return paths


def read_sample(path: Path, layer: int, head: TeacherHead) -> ServerSample:
    """A file, checked as far as it can be by itself: ``inputs-invalid`` and ``not-finite`` name it."""
    tensors = open_tensors(path)
    absent = [name for name in ("token_ids", "hidden_states") if name not in tensors]
    if absent:
        raise inputs_invalid(f"{path} must hold token_ids and hidden_states; it lacks {', '.join(absent)}")
    tokens, states = tensors["token_ids"], tensors["hidden_states"]
    length, shape = tuple(tokens.get_shape()), tuple(states.get_shape())
    if tokens.get_dtype() not in ("I32", "I64") or len(length) != 1 or not length[0]:
        raise inputs_invalid(f"{path}: token_ids must be integers (L,); got {tokens.get_dtype()} {length}")
    classes, width = head.weight.shape
    if states.get_dtype() not in _REAL or len(shape) not in (2, 3):
        raise inputs_invalid(f"{path}: hidden_states must be real (L, layers, D) or (L, D); got {shape}")
    if (shape[0], shape[-1]) != (*length, width):
        got = f"{shape} for {length[0]} tokens"
        raise inputs_invalid(
            f"{path}: hidden_states must have a row for each token and the head's width {width}; got {got}"
        )
    layers = shape[1] if len(shape) == 3 else 1
    if not -layers <= layer < layers:
        raise inputs_invalid(f"{path}: layer must be one of the {layers} that are there; got {layer}")
    ids = tokens[:].astype(np.int64)
    if ids.min() < 0 or ids.max() >= classes:
        raise inputs_invalid(f"{path}: token_ids must be below the head's {classes} classes; got {ids.max()}")
    wide = np.asarray(states[:, layer % layers] if len(shape) == 3 else states[:], np.float32)
    if not np.isfinite(wide).all():
        row = int(np.flatnonzero(~np.isfinite(wide).all(axis=-1))[0])
        raise ShdError(
            "not-finite", f"{path}: hidden_states must be finite; row {row} has NaN or infinity", "CACHE-194"
        )
    return ServerSample(path, ids, wide)


def read_hf_head(folder: Path, *, before_norm: bool) -> TeacherHead:
    """The head of a Hugging Face folder.

    Raises ``inputs-invalid`` for a folder without one, or of a model whose head is not known.
    """
    try:
        config = read_json(folder / "config.json")
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise inputs_invalid(f"{folder / 'config.json'} must be a model's configuration: {error}") from error
    if kind not in _MODELS:
        raise inputs_invalid(
            f"the head of {folder} must be of a model of type {', '.join(sorted(_MODELS))}; got {kind!r}"
        )
    tensors = {name: tensor for path in server_files(folder) for name, tensor in open_tensors(path).items()}
    tensors |= {f"transformer.{name}": tensor for name, tensor in tensors.items() if kind == "gpt2"}
    tied = bool(config.get("tie_word_embeddings", True))
    name = next((name for name in (*_HEADS * (not tied), *_TIED, *_HEADS) if name in tensors), None)
    if name is None or tensors[name].get_dtype() not in _REAL or len(tensors[name].get_shape()) != 2:
        raise inputs_invalid(
            f"{folder} must hold the matrix of a head, one of {', '.join((*_HEADS, *_TIED))}; got none"
        )
    scale = _number(folder, config, "logit_scale", 1.0) / _number(folder, config, "logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    biases = (
        _read_wide(tensors, matrix.replace("weight", "bias")) for matrix in _HEADS
    )  # tied ones may have one too
    bias = next((bias for bias in biases if bias is not None), None)
    return TeacherHead(
        tensors[name][:],
        None if bias is None else np.asarray(scale * bias, np.float32),
        scale,
        None if cap is None else _number(folder, config, "final_logit_softcapping", 1.0),
        *(_read_norm(folder, config, tensors) if before_norm else (None, None, None)),
    )


def _read_wide(tensors: Mapping[str, Any], name: str) -> NDArray[np.float32] | None:
    return np.asarray(tensors[name][:], np.float32) if name in tensors else None


def _number(folder: Path, config: Mapping[str, Any], name: str, default: float) -> float:
    """A number of an untrusted configuration, above 0."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise inputs_invalid(f"{name} in {folder / 'config.json'} must be a finite number above 0; got {value!r}")
    return float(value)


def _read_norm(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[FinalNorm, NDArray[np.float32], NDArray[np.float32] | None]:
    name = next((name for name in _NORMS if f"{name}.weight" in tensors), "")
    weight, bias = (_read_wide(tensors, f"{name}.{kind}") for kind in ("weight", "bias"))
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    epsilon_name = next((word for word in names if config.get(word) is not None), None)
    if weight is None or epsilon_name is None:
        raise inputs_invalid(
            f"{folder} must hold the model's final norm, one of {', '.join(_NORMS)}, and its epsilon"
        )
    weight = weight + 1 if str(config["model_type"]).startswith("gemma") else weight
    kind = "rms" if epsilon_name == "rms_norm_eps" else "layer"
    return FinalNorm(kind, _number(folder, config, epsilon_name, 1.0), bias is not None), weight, bias


def predictions(sample: ServerSample, head: TeacherHead) -> tuple[float, int]:
    """How well its states tell their own next tokens from others of the file: mean over deviation, and rows.

    Only two logits a row are made: that of the next token, and that of a token half the file away.
    """
    states, following = sample.states[:-1], sample.tokens[1:]
    distant = np.roll(following, max(len(following) // 2, 1))
    differs = following != distant
    if differs.sum() < 2:
        return 0.0, 0
    rows = head.normed(states[differs])
    own, others = (np.asarray(head.weight[ids[differs]], np.float32) for ids in (following, distant))
    margins = np.einsum("rd,rd->r", rows, own - others)
    margins *= np.sign(head.scale)
    return float(margins.mean() / max(margins.std(), 1e-30)), int(differs.sum())
