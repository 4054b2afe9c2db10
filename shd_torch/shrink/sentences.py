"""What a sentence-transformers folder adds to its model: pooling, normalisation, projections, prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from shd_ref.errors import ShdError
from shd_ref.teacher.sentence_folder import MODULES, modules_after_model, parse_file, read_file

_SETTINGS: Final = re.compile(r"config_sentence_transformers\.json|sentence_\w+_config\.json")
_WIDTHS: Final = ("embedding_dimension", "word_embedding_dimension")
_FREE: Final = frozenset({"Pooling", "Normalize", "Dropout"})
_WIDE: Final = frozenset({"Dense", "LayerNorm"})


def read_modules(folder: Path, width: int, new_width: int) -> dict[str, bytes]:
    """Contents of the files that make the student a sentence-transformers folder, by name; none for other folders.

    A pooling module as wide as the teacher's hidden size, ``width``, is given the student's, ``new_width``. Weights
    are taken from safetensors only.

    Raises:
        ShdError: ``shrink-unsupported`` for a module that does not fit the student; ``read-failed``.
    """
    if not (folder / MODULES).exists():
        return {}
    names = [MODULES, *sorted(file.name for file in folder.iterdir() if _SETTINGS.fullmatch(file.name))]
    files = {name: read_file(folder, name) for name in names}
    for module in modules_after_model(folder):
        kind = module["type"].rpartition(".")[2]
        known = module["type"].startswith("sentence_transformers.") and kind in _FREE | _WIDE
        if not known or (kind in _WIDE and new_width != width):
            rule = f"modules of a sentence-transformers folder must be {', '.join(sorted(_FREE))}"
            rule += f", or with the teacher's hidden size {' and '.join(sorted(_WIDE))}"
            raise ShdError(
                "shrink-unsupported",
                f"{rule}; got {module['type']}: remove {MODULES} to make a student without modules",
            )
        files |= _read_module(folder, module["path"], width, new_width)
    return files


def _read_module(folder: Path, path: str, width: int, new_width: int) -> dict[str, bytes]:
    """Its configuration and its weights; a module without parameters and options has an empty folder, or none."""
    files: dict[str, bytes] = {}
    if (folder / path / "config.json").exists():
        config = parse_file(folder, f"{path}/config.json")
        if not isinstance(config, dict):
            raise ShdError("read-failed", f"{folder / path / 'config.json'} must hold a JSON object")
        resized = {name: new_width for name in _WIDTHS if config.get(name) == width != new_width}
        text = json.dumps(config | resized, indent=2)
        files[f"{path}/config.json"] = text.encode() if resized else read_file(folder, f"{path}/config.json")
    if (folder / path / "model.safetensors").exists():
        files[f"{path}/model.safetensors"] = read_file(folder, f"{path}/model.safetensors")
    elif (folder / path / "pytorch_model.bin").exists():
        message = f"{folder / path} must hold its weights as safetensors: save the SentenceTransformer again"
        raise ShdError("read-failed", message)
    return files
