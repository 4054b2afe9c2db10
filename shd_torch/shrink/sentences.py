"""What a sentence-transformers folder adds to its model: pooling, normalisation, projections, prompts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError
from shd_torch.shrink.folders import find_home
from shd_torch.shrink.sizes import Sizes

MAX_WEIGHT_BYTES: Final = 1 << 28
"""Weights of one module after the model, such as a projection of its embeddings."""

_MODULES: Final = "modules.json"
_SETTINGS: Final = re.compile(r"config_sentence_transformers\.json|sentence_\w+_config\.json")
_FOLDER: Final = re.compile(r"\w[\w.-]*")
_WIDTHS: Final = ("embedding_dimension", "word_embedding_dimension")
_FREE: Final = frozenset({"Pooling", "Normalize", "Dropout"})
_WIDE: Final = frozenset({"Dense", "LayerNorm"})


def read_modules(folder: Path, teacher: Sizes, student: Sizes) -> dict[str, bytes]:
    """Contents of the files that make the student a sentence-transformers folder, by name; none for other folders.

    A pooling module is given the student's width. Weights are taken from safetensors only.

    Raises:
        ShdError: ``shrink-unsupported`` for a module that does not fit the student; ``read-failed``.
    """
    if not (folder / _MODULES).exists():
        return {}
    names = [_MODULES, *sorted(file.name for file in folder.iterdir() if _SETTINGS.fullmatch(file.name))]
    files = {name: _read(folder, name) for name in names}
    for module in _modules_after_model(folder):
        kind = module["type"].rpartition(".")[2]
        known = module["type"].startswith("sentence_transformers.") and kind in _FREE | _WIDE
        if not known or (kind in _WIDE and student.hidden != teacher.hidden):
            rule = f"modules of a sentence-transformers folder must be {', '.join(sorted(_FREE))}"
            rule += f", or with the teacher's hidden size {' and '.join(sorted(_WIDE))}"
            raise ShdError(
                "shrink-unsupported",
                f"{rule}; got {module['type']}: remove {_MODULES} to make a student without modules",
                "STUDENT-8",
            )
        files |= _read_module(folder, module["path"], teacher.hidden, student.hidden)
    return files


def _modules_after_model(folder: Path) -> list[dict[str, str]]:
    listed = _parse(folder, _MODULES)
    model, *others = sorted(listed, key=lambda entry: entry["idx"]) if _is_list(listed) else [{}]
    if model.get("path") not in ("", "."):
        raise ShdError(
            "read-failed", f"{folder / _MODULES} must list the modules, first the model with an empty path"
        )
    paths = [module["path"] for module in others]
    if bad := [path for path in paths if not _FOLDER.fullmatch(path) or paths.count(path) > 1]:
        raise ShdError("read-failed", f"{folder / _MODULES} must name a folder of its own for each module; got {bad}")
    return others


def _is_list(listed: object) -> bool:
    members: Mapping[str, type] = {"idx": int, "path": str, "type": str}
    return (
        isinstance(listed, list)
        and listed != []
        and all(
            isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in members.items())
            for entry in listed
        )
    )


def _read_module(folder: Path, path: str, width: int, new_width: int) -> dict[str, bytes]:
    """Its configuration and its weights; a module without parameters and options has an empty folder, or none."""
    files: dict[str, bytes] = {}
    if (folder / path / "config.json").exists():
        config = _parse(folder, f"{path}/config.json")
        if not isinstance(config, dict):
            raise ShdError("read-failed", f"{folder / path / 'config.json'} must hold a JSON object")
        resized = {name: new_width for name in _WIDTHS if config.get(name) == width != new_width}
        text = json.dumps(config | resized, indent=2)
        files[f"{path}/config.json"] = text.encode() if resized else _read(folder, f"{path}/config.json")
    if (folder / path / "model.safetensors").exists():
        files[f"{path}/model.safetensors"] = _read(folder, f"{path}/model.safetensors")
    elif (folder / path / "pytorch_model.bin").exists():
        message = f"{folder / path} must hold its weights as safetensors: save the SentenceTransformer again"
        raise ShdError("read-failed", message)
    return files


def _parse(folder: Path, name: str) -> Any:
    _read(folder, name)  # refuses links out of the folder
    try:
        return read_json(folder / name)
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{folder / name} must hold JSON: {error}") from error


def _read(folder: Path, name: str) -> bytes:
    real = Path(os.path.realpath(folder / name))
    if not real.is_file() or not real.is_relative_to(find_home(folder)):
        raise ShdError("read-failed", f"{str(folder)!r} must hold its own files; {name!r} is none of them")
    if real.stat().st_size > MAX_WEIGHT_BYTES:
        raise ShdError("read-failed", f"{folder / name} must have at most {MAX_WEIGHT_BYTES} bytes")
    try:
        return real.read_bytes()
    except OSError as error:
        raise ShdError("read-failed", f"{folder / name} could not be read: {error}") from error
