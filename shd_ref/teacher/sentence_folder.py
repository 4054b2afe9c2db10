"""A sentence-transformers folder: how it reads texts, the modules after its model, and how they pool."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from shd_ref.cache.forms.rows import POOLINGS
from shd_ref.cache.storage.documents import parse_json
from shd_ref.errors import ShdError, argument_value
from shd_ref.integers import check_option

MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
MAX_WEIGHT_BYTES: Final = 1 << 28
"""Weights of one module after the model, such as a projection of its embeddings."""

PADS_FRONT: Final = (
    "the tokenizer pads in front (padding_side left) and the model counts positions from there, so what its library "
    "gives for a text changes with its batch: a text's own answer, alone, is what counts here"
)
"""Remark of a model that is right alone, or padded behind."""

_FOLDER: Final = re.compile(r"\w[\w.-]{0,62}")  # of at most 252 bytes in UTF-8, and systems refuse more than 255
_MODES: Final = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
_FLAGS: Final = {  # of folders saved before version 6
    **{"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"},
    **{f"pooling_mode_{mode}": mode for mode in ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")},
}
_NORMALIZE: Final = ",normalize"
_USUAL: Final[Mapping[str, object]] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
"""Settings of the model's module that are those of states of a text."""


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become its embedding (CACHE-182).

    Attributes:
        mode: ``"mean"``, ``"cls"`` (the first position), ``"max"`` or ``"last"`` (position), of those that count.
        normalize: whether the embedding is divided by its norm.

    Raises:
        ShdError: ``argument-value``.
    """

    mode: str
    normalize: bool = False

    def __post_init__(self) -> None:
        check_option("embeddings", self.mode, POOLINGS, "CACHE-182")

    def __str__(self) -> str:
        return self.mode + _NORMALIZE * self.normalize

    @classmethod
    def parse(cls, text: str) -> Pooling | None:
        """The pooling that ``str`` wrote; None for any other text."""
        mode = text.removesuffix(_NORMALIZE)
        return cls(mode, mode != text) if mode in POOLINGS else None


class TextSettings(NamedTuple):
    """How a folder's library reads a text: how many tokens it keeps (None: the tokenizer's limit, up to
    ``positions``), whether in lower case, what stands in front; and whether it drops the head of its model.
    """

    max_length: int | None = None
    positions: int | None = None
    lower: bool = False
    prompt: str = ""
    drops_head: bool = False


def read_texts(folder: Path) -> TextSettings:
    """How a folder reads texts; ``read-failed`` for settings that only sentence-transformers can follow."""
    if not os.path.exists(folder / MODULES):  # noqa: PTH110  (a path that no file has is none)
        return TextSettings()
    names = ("sentence_*_config.json", SETTINGS, "config.json")
    settings, shared, config = (_read_object(folder, name) for name in names)
    positions, name = config.get("max_position_embeddings"), shared.get("default_prompt_name")
    length, lower = settings.pop("max_seq_length", None), settings.pop("do_lower_case", False)
    prompts = shared.get("prompts")
    prompt = prompts.get(str(name)) or "" if isinstance(prompts, dict) else ""
    drops_head = settings.get("transformer_task", _USUAL["transformer_task"]) == _USUAL["transformer_task"]
    wrong = [key for key, value in settings.items() if drops_head and value and _USUAL.get(key) != value]
    wrong += ["max_seq_length"] * (length is not None and (not isinstance(length, int) or length < 1))
    wrong += ["prompts"] * (not isinstance(prompt, str))
    if wrong:
        rule = f"{folder} must read texts by max_seq_length, do_lower_case and a prompt; got {', '.join(wrong)}"
        raise ShdError("read-failed", f"{rule}: tokenise the texts, and give arrays")
    is_bounded = isinstance(positions, int) and positions > 0  # XLNet has -1 for any number
    return TextSettings(length, positions if is_bounded else None, bool(lower), prompt, drops_head)


def _read_object(folder: Path, pattern: str) -> dict[str, Any]:
    names = sorted(file.name for file in folder.glob(pattern))
    members = parse_file(folder, names[0]) if names else {}
    return members if isinstance(members, dict) else {}


def read_pooling(folder: Path) -> Pooling:
    """How a folder's modules make an embedding.

    Raises:
        ShdError: ``argument-value`` for no such folder, and for modules or a pooling that a cache has no name for;
            ``read-failed``.
    """
    try:
        is_folder = (folder / MODULES).exists()
    except OSError:  # such as of a name that is too long
        is_folder = False
    if not is_folder:
        modes = ", ".join(_MODES.values())
        rule = f"embeddings must be {modes}, each also with ,normalize, or a sentence-transformers folder"
        raise argument_value(f"{rule}, which has a {MODULES}; got {str(folder)!r}", "CACHE-182")
    modules = modules_after_model(folder)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:1] != ["Pooling"] or not set(kinds[1:]) <= {"Normalize", "Dropout"}:
        rule = f"{folder} must make embeddings by Pooling, and then Normalize or nothing"
        raise argument_value(f"{rule}, for a cache to hold them; got {', '.join(kinds) or 'no module'}", "CACHE-182")
    config = parse_file(folder, f"{modules[0]['path']}/config.json")
    members = config if isinstance(config, dict) else {}
    if members.get("include_prompt") is False and read_texts(folder).prompt:
        raise argument_value(f"{folder} must pool its prompt's tokens too; got include_prompt false", "CACHE-182")
    mode = members.get("pooling_mode") or [name for flag, name in _FLAGS.items() if members.get(flag) is True]
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode or "mean"
    if not isinstance(mode, str) or mode not in _MODES:
        raise argument_value(f"{folder} must pool by one of {', '.join(_MODES)}; got {mode}", "CACHE-182")
    return Pooling(_MODES[mode], "Normalize" in kinds)


def find_pooling(folder: Path) -> Pooling | None:
    """The same; None of a folder that pools in no way that a cache can hold, or not at all."""
    try:
        return read_pooling(folder)
    except ShdError:
        return None


def modules_after_model(folder: Path) -> list[dict[str, str]]:
    """Entries of ``modules.json`` after the model's, in order, each with its folder; ``read-failed``."""
    listed = parse_file(folder, MODULES)
    model, *others = sorted(listed, key=lambda entry: entry["idx"]) if _is_list(listed) else [{}]
    if model.get("path") not in ("", ".") or model["type"].rpartition(".")[2] != "Transformer":
        rule = f"{folder / MODULES} must list the modules, first the model, a Transformer, with an empty path"
        raise ShdError("read-failed", rule)
    paths = [module["path"] for module in others]
    if bad := [path for path in paths if not _FOLDER.fullmatch(path) or paths.count(path) > 1]:
        rule = f"{folder / MODULES} must name a folder of its own for each module"
        raise ShdError("read-failed", f"{rule}; got {bad!r:.100}")
    return others


def _is_list(listed: object) -> bool:
    members: Mapping[str, type] = {"idx": int, "path": str, "type": str}
    entries = listed if isinstance(listed, list) else []
    return bool(entries) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in members.items())
        for entry in entries
    )


def parse_file(folder: Path, name: str) -> Any:
    """The value of a JSON file of the folder; ``read-failed``."""
    data = read_file(folder, name)
    try:
        return parse_json(data)
    except ValueError as error:
        raise ShdError("read-failed", f"{folder / name} must hold JSON: {error}") from error


def read_file(folder: Path, name: str) -> bytes:
    """A file that lies in the folder; ``read-failed`` for links out of it, and above ``MAX_WEIGHT_BYTES``."""
    real = Path(os.path.realpath(folder / name))
    if not real.is_file() or not real.is_relative_to(find_home(folder)):
        raise ShdError("read-failed", f"{str(folder)!r} must hold its own files; {name!r} is none of them")
    if real.stat().st_size > MAX_WEIGHT_BYTES:
        raise ShdError("read-failed", f"{folder / name} must have at most {MAX_WEIGHT_BYTES} bytes")
    try:
        return real.read_bytes()
    except OSError as error:
        raise ShdError("read-failed", f"{folder / name} could not be read: {error}") from error


def find_home(folder: Path) -> Path:
    """Where a folder's files may lie: the hub's cache keeps snapshots/REVISION/FILE as a link to blobs/HASH."""
    root = folder.resolve()
    return root.parents[1] if root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir() else root
