"""Hidden states as servers write them, and the head of a Hugging Face folder: untrusted safetensors files.

vLLM's connector writes one file a request, speculators ``hs_<i>.safetensors``: ``token_ids`` ``(L,)`` and
``hidden_states`` ``(L, layers, D)``, or ``(L, D)``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import FinalNorm, TeacherHead
from shd_ref.cache.storage.documents import parse_json, read_json
from shd_ref.errors import ShdError, inputs_invalid
from shd_ref.teacher.sources.sentence_folder import find_home

_DTYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_MAX_HEADER: Final = 2**26
_NORMS: Final = ("model.norm", "model.final_layernorm", "transformer.ln_f", "gpt_neox.final_layer_norm")
_HEADS: Final = ("lm_head.weight", "embed_out.weight")
_TIED: Final = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
_MODELS: Final = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2"),
    *("phi", "phi3", "qwen2", "qwen3", "smollm3"),
)
"""Model types whose heads are known to be no more than what ``TeacherHead`` says."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file; bfloat16 as its bits."""

    dtype: str
    values: NDArray[Any]

    @property
    def wide(self) -> NDArray[Any]:
        """Numbers: float32 of bfloat16."""
        return (self.values.astype("<u4") << 16).view("<f4") if self.dtype == "BF16" else self.values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: ``inputs-invalid`` naming it for anything that is not as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"its header must have at most {min(_MAX_HEADER, size - 8)} bytes; got {length}")
            members = parse_json(file.read(length))
        start = 8 + length
        members.pop("__metadata__", None)
        tensors = {name: _map(path, about, start, size) for name, about in members.items()}
        if sum(tensor.values.nbytes for tensor in tensors.values()) != size - start:
            raise ValueError("its tensors must fill it")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise inputs_invalid(f"{path} must be a whole safetensors file: {error}: write it again") from error
    return tensors


def _map(path: Path, about: Mapping[str, Any], start: int, size: int) -> Tensor:
    kind, shape, (first, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if kind not in _DTYPES or not all(type(axis) is int and axis >= 0 for axis in (*shape, first, end)):
        raise ValueError(f"its tensors must be of {', '.join(_DTYPES)} and have shapes; got {str(about)[:80]}")
    dtype = np.dtype(_DTYPES[kind])
    if end - first != math.prod(shape) * dtype.itemsize or start + end > size:
        raise ValueError(f"a tensor {shape} of {kind} must have {math.prod(shape) * dtype.itemsize} bytes in it")
    if not math.prod(shape):
        return Tensor(kind, np.empty(shape, dtype))
    return Tensor(kind, np.memmap(path, dtype, "r", start + first, shape))


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
    tensors = read_tensors(path)
    absent = [name for name in ("token_ids", "hidden_states") if name not in tensors]
    if absent:
        raise inputs_invalid(f"{path} must hold token_ids and hidden_states; it lacks {', '.join(absent)}")
    tokens, states = tensors["token_ids"], tensors["hidden_states"].values
    if tokens.dtype not in ("I32", "I64") or tokens.values.ndim != 1 or not len(tokens.values):
        raise inputs_invalid(f"{path}: token_ids must be integers (L,); got {tokens.dtype} {tokens.values.shape}")
    classes, width = head.weight.shape
    if tensors["hidden_states"].dtype not in ("F32", "F16", "BF16") or states.ndim not in (2, 3):
        raise inputs_invalid(f"{path}: hidden_states must be real (L, layers, D) or (L, D); got {states.shape}")
    if len(states) != len(tokens.values) or states.shape[-1] != width:
        got = f"{states.shape} for {len(tokens.values)} tokens"
        raise inputs_invalid(
            f"{path}: hidden_states must have a row for each token and the head's width {width}; got {got}"
        )
    layers = states.shape[1] if states.ndim == 3 else 1
    if not -layers <= layer < layers:
        raise inputs_invalid(f"{path}: layer must be one of the {layers} that are there; got {layer}")
    ids = tokens.values.astype(np.int64)
    if ids.min() < 0 or ids.max() >= classes:
        raise inputs_invalid(f"{path}: token_ids must be below the head's {classes} classes; got {ids.max()}")
    layer_states = Tensor(tensors["hidden_states"].dtype, states[:, layer] if states.ndim == 3 else states)
    wide = np.asarray(layer_states.wide, np.float32)
    if not np.isfinite(wide).all():
        row = int(np.flatnonzero(~np.isfinite(wide).all(axis=-1))[0])
        raise ShdError(
            "not-finite", f"{path}: hidden_states must be finite; row {row} has NaN or infinity", "CACHE-194"
        )
    return ServerSample(path, ids, wide)


def read_hf_head(folder: Path, *, before_norm: bool) -> tuple[TeacherHead, str]:
    """The head of a Hugging Face folder, and the dtype of its matrix (bfloat16 is given as its bits).

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
    tensors = {name: tensor for path in server_files(folder) for name, tensor in read_tensors(path).items()}
    tensors |= {f"transformer.{name}": tensor for name, tensor in tensors.items() if kind == "gpt2"}
    tied = bool(config.get("tie_word_embeddings", True))
    name = next((name for name in (*_HEADS * (not tied), *_TIED, *_HEADS) if name in tensors), None)
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get("" if name is None else tensors[name].dtype)
    if name is None or dtype is None or tensors[name].values.ndim != 2:
        raise inputs_invalid(
            f"{folder} must hold the matrix of a head, one of {', '.join((*_HEADS, *_TIED))}; got none"
        )
    scale = _number(folder, config, "logit_scale", 1.0) / _number(folder, config, "logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    bias = tensors.get(name.replace("weight", "bias"))
    head = TeacherHead(
        tensors[name].values,
        None if bias is None else np.asarray(scale * bias.wide, np.float32),
        scale,
        None if cap is None else _number(folder, config, "final_logit_softcapping", 1.0),
        *(_read_norm(folder, config, tensors) if before_norm else (None, None, None)),
    )
    return head, dtype


def _number(folder: Path, config: Mapping[str, Any], name: str, default: float) -> float:
    """A number of an untrusted configuration, above 0."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise inputs_invalid(f"{name} in {folder / 'config.json'} must be a finite number above 0; got {value!r}")
    return float(value)


def _read_norm(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[FinalNorm, NDArray[np.float32], NDArray[np.float32] | None]:
    name = next((name for name in _NORMS if f"{name}.weight" in tensors), None)
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    epsilon_name = next((word for word in names if config.get(word) is not None), None)
    if name is None or epsilon_name is None:
        raise inputs_invalid(
            f"{folder} must hold the model's final norm, one of {', '.join(_NORMS)}, and its epsilon"
        )
    weight = np.asarray(tensors[f"{name}.weight"].wide, np.float32)
    weight = weight + 1 if str(config["model_type"]).startswith("gemma") else weight
    bias = tensors.get(f"{name}.bias")
    norm = FinalNorm(
        "rms" if epsilon_name == "rms_norm_eps" else "layer",
        _number(folder, config, epsilon_name, 1.0),
        bias is not None,
    )
    return norm, weight, None if bias is None else np.asarray(bias.wide, np.float32)


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
    margins = np.einsum("rd,rd->r", rows, _rows_of(head, following[differs]) - _rows_of(head, distant[differs]))
    margins *= np.sign(head.scale)
    return float(margins.mean() / max(margins.std(), 1e-30)), int(differs.sum())


def _rows_of(head: TeacherHead, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    rows = np.asarray(head.weight[ids])
    return Tensor("BF16", rows).wide if rows.dtype == np.uint16 else rows.astype(np.float32)
