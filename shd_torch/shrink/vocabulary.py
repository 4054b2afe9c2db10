"""A model whose vocabulary is cut to what texts use.

``Pieces`` says which pieces of a ``tokenizer.json`` texts need; ``cut_vocabulary`` renumbers tokenizer, embeddings
and special ids.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer
from shd_ref.teacher.sentence_folder import parse_file
from shd_ref.teacher.sources import Source, open_source
from shd_ref.tolerances import load_tolerances
from shd_torch.shrink.families import base_of
from shd_torch.shrink.folders import (
    READERS,
    count_positions,
    load_weights,
    new_folder,
    read_config,
    read_modules,
    save_student,
)
from shd_torch.shrink.sizes import count_parameters

_REMEDY: Final = "of the tokenizers library: load the tokenizer with AutoTokenizer and save it"


class Pieces:
    """A tokenizer of WordPiece, BPE, Unigram or whole words, from what its file holds.

    Attributes:
        ids: of the pieces of its model.
        fixed: ids that stay whatever the texts are: special pieces, single characters and bytes.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self._content, model = content, content["model"]
        self.ids: dict[str, int] = (
            {piece: number for number, (piece, _) in enumerate(model["vocab"])}
            if isinstance(model["vocab"], list)
            else dict(model["vocab"])
        )
        is_marked = model.get("end_of_word_suffix") or ("merges" in model and model.get("continuing_subword_prefix"))
        rule = "join characters as they are, without a prefix or a suffix of words"
        need(not is_marked, "shrink-unsupported", "merges", rule, model["type"])
        self._ranks = {_pair(merge): rank for rank, merge in enumerate(model.get("merges", ()))}
        self._joined = {left + right for left, right in self._ranks}
        self.added = {entry["id"] for entry in content["added_tokens"]}
        self.fixed = self.added | {number for piece, number in self.ids.items() if self._is_base(piece)}
        self.fixed |= {self.ids[model["unk_token"]]} if model.get("unk_token") in self.ids else set()
        if isinstance(model["vocab"], list):  # the lowest score decides what an unknown character costs
            scores = [score for _, score in model["vocab"]]
            self.fixed |= {scores.index(min(scores)), *([] if model["unk_id"] is None else [model["unk_id"]])}
        named: list[int] = []
        _renumber_template(content.get("post_processor"), named.append)
        self.fixed |= {*named, *([content["padding"]["pad_id"]] if content.get("padding") else [])}

    def _is_base(self, piece: str) -> bool:
        """Whether other pieces are made of it: a character, also within a word, a byte, or what no merge gives."""
        if self._ranks:
            return piece not in self._joined
        inner = piece.removeprefix(self._content["model"].get("continuing_subword_prefix") or "")
        return len(piece) == 1 or len(inner) == 1 or (len(piece) == 6 and piece.startswith("<0x"))

    def needed_for(self, number: int, names: dict[int, str]) -> set[int]:
        """The pieces that merges pass through on the way to one, itself among them."""
        needed, parts = {number}, list(names.get(number, ""))
        passed = set()
        while len(parts) > 1:
            # The merge of the lowest rank, of equal ones the leftmost, as the library does it.
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(parts)]
            at = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[at] == len(self._ranks):
                return needed  # merges do not give it: it is found whole
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            passed.add(self.ids[parts[at]])
        return needed | passed

    def choose(self, used: Iterable[int], size: int | None) -> set[int]:
        """The fixed pieces, and with all that they need the used ones, in their order, as far as ``size`` allows."""
        names = {number: piece for piece, number in self.ids.items()}
        kept = set(self.fixed)
        rule = f"be at least {len(kept)}, the special pieces and single characters or bytes"
        need(not (size is not None and size < len(kept)), "argument-value", "size", rule, size)
        for number in used:
            needed = set() if number in kept else self.needed_for(number, names) - kept
            if size is not None and len(kept) + len(needed) > size:
                break
            kept |= needed
        return kept

    def order(self, kept: set[int], others: set[int]) -> list[int]:
        """The old id of each new one: pieces of the model as they stood, then added ones, then rows of no piece."""
        own = set(self.ids.values())
        return [*sorted(kept & own), *sorted(kept - own), *sorted(others - kept)]

    def without_others(self, kept: Sequence[int]) -> dict[str, Any]:
        """The content of the file that has only these pieces, by old id, numbered in this order."""
        new = {old: number for number, old in enumerate(kept)}
        model = dict(self._content["model"])
        if isinstance(model["vocab"], list):
            model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in new]
            model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
        else:
            staying = sorted((new[number], piece) for piece, number in self.ids.items() if number in new)
            model["vocab"] = {piece: number for number, piece in staying}
        if "merges" in model:
            there = {piece for piece, number in self.ids.items() if number in new}
            model["merges"] = [
                merge for merge in model["merges"] if there.issuperset((*_pair(merge), "".join(_pair(merge))))
            ]
        added = [entry | {"id": new[entry["id"]]} for entry in self._content["added_tokens"]]
        content = self._content | {"model": model, "added_tokens": sorted(added, key=lambda entry: entry["id"])}
        content["post_processor"] = _renumber_template(content.get("post_processor"), new.__getitem__)
        if content.get("padding"):
            content["padding"] = content["padding"] | {"pad_id": new[content["padding"]["pad_id"]]}
        return content


def read_pieces(content: Any, rows: int) -> Pieces:
    """The pieces of a file that the tokenizers library has read, for so many embeddings; ``shrink-unsupported``."""
    try:
        pieces = Pieces(content)
        if not pieces.fixed.union(pieces.ids.values()) <= set(range(rows)):
            raise ValueError(f"ids that are not below {rows}, the model's rows of embeddings")
        return pieces
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"tokenizer.json must be that of WordPiece, BPE, Unigram or words {_REMEDY}; got {error!r}"
        raise ShdError("shrink-unsupported", message) from error


def _pair(merge: Any) -> tuple[str, str]:
    """What a merge joins; older files write it as one text."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _renumber_template(node: Any, change: Callable[[int], int | None]) -> Any:
    """What adds special pieces, with other ids: ``ids`` of templates, ``sep`` and ``cls`` of older files."""
    if isinstance(node, list):
        return [_renumber_template(entry, change) for entry in node]
    if not isinstance(node, dict):
        return node
    renumbered = {name: _renumber_template(entry, change) for name, entry in node.items()}
    if isinstance(node.get("ids"), list):
        renumbered["ids"] = [change(number) for number in node["ids"]]
    return renumbered | {name: [node[name][0], change(node[name][1])] for name in ("sep", "cls") if name in node}


FORMAT: Final = 1
_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_REPORT: Final = "shrink.json"
_STALE: Final = frozenset(name for name in READERS if name.startswith(("vocab", "merges", "added_tokens")))
"""Besides sentencepiece's models: the vocabulary for other programs, in which the old pieces still are."""
_ID: Final = "_token_id"
_LISTED: Final = ("suppress_tokens", "begin_suppress_tokens")
_LONGEST: Final = 2**31 - 1  # tokens of a text: a model's own limit may be another one than its tokenizer's
_COMPARED: Final = 4  # texts on which the model is run, old and new


def cut_vocabulary(
    source: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int | None = None,
    text_column: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Write a model again with the pieces of its vocabulary that texts use; its outputs on them stay.

    Args:
        source: the folder of a Hugging Face model of text with a ``tokenizer.json``; see ``load_teacher``.
        data: texts, as ``open_source`` reads them; prompts of a sentence-transformers folder are added.
        out: a new folder for the model.
        size: at most so many pieces, the most frequent ones; default all that the texts use. With fewer than those
            some texts fall to smaller pieces.
        text_column: of the data; default ``text``.
        progress: called with the numbers of texts read and of all, twice over, and what is done.

    Returns:
        The contents of ``vocabulary.json``: ``size`` and ``old_size``, ``texts``, ``changed_texts`` (those whose
        pieces are not as before), ``old_parameters`` and ``parameters``, and ``kept``, the old id of each new one.

    Raises:
        ShdError: ``shrink-unsupported``, ``argument-value``, ``inputs-invalid``, ``read-failed``, ``write-failed``,
            ``dependency-missing``.
    """
    source, folder = Path(source), new_folder(out)
    model = load_weights(source, read_config(source, "model"))  # a student's too, or of no family
    kind, is_text = f"a {type(model).__name__}", getattr(model, "main_input_name", None) == "input_ids"
    need(is_text, "shrink-unsupported", "the model", "be one of text", kind)
    embeddings = model.get_input_embeddings().weight
    rows, width = (int(length) for length in embeddings.shape)
    files = read_modules(source, width, width)
    content = _read(source, _TOKENIZER)
    need(content is not None, "shrink-unsupported", repr(str(source)), f"hold a tokenizer.json {_REMEDY}", "none")
    pieces = read_pieces(content, rows)
    texts = _open(data, source, text_column)
    total, steps = np.zeros(rows, np.int64), 2 * len(texts)
    tell = progress or (lambda *_: None)
    for number, ids in enumerate((*_read_prompts(source, files), *_ids_of(texts))):
        tell(number, steps, "texts are counted")
        total += np.bincount(ids, minlength=rows)
    used = [int(number) for number in np.argsort(-total, kind="stable") if total[number]]
    special = {number for number in _special_ids(model) if 0 <= number < rows}
    if size is not None:
        size = check_integer("size", size, 1, rows) - len(special - pieces.fixed)
    kept = pieces.order(pieces.choose(used, size), special)
    student = _make(model, kept, rows)
    files |= {_TOKENIZER: _bytes(pieces.without_others(kept))} | _other_files(source, kept)
    with TemporaryDirectory() as draft:
        (Path(draft) / _TOKENIZER).write_bytes(files[_TOKENIZER])
        changed = 0
        renumbered = _ids_of(_open(data, Path(draft), text_column))
        for number, (before, after) in enumerate(zip(_ids_of(texts), renumbered, strict=True)):
            tell(len(texts) + number, steps, "texts are compared")
            is_same = np.array_equal(before, np.asarray(kept)[after])
            changed += not is_same
            if is_same and number < _COMPARED:
                _compare(model, student, before, after)
    report: dict[str, Any] = {"format": FORMAT, "size": len(kept), "old_size": rows, "texts": len(texts)}
    report |= {"changed_texts": changed, "old_parameters": count_parameters(model)}
    report |= {"parameters": count_parameters(student), "kept": kept}
    files["vocabulary.json"] = _bytes(report)
    shrunk = _read(source, _REPORT)
    if isinstance(shrunk, dict) and isinstance(shrunk.get("student"), dict):  # what shrink said about the model
        shrunk["student"]["parameters"] = report["parameters"]
    save_student(student, shrunk if isinstance(shrunk, dict) else None, folder, modules=files)
    return report


def _read(folder: Path, name: str) -> Any:
    """The JSON of a file of a folder; None where there is none."""
    return parse_file(folder, name) if (folder / name).exists() else None


def _bytes(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def _open(data: str | os.PathLike[str], tokenizer: Path, text_column: str | None) -> Source:
    return open_source(Path(data), tokenizer=tokenizer, text_column=text_column, max_length=_LONGEST)


def _ids_of(texts: Source) -> Iterator[NDArray[np.int64]]:
    return (row["input_ids"] for row in texts.rows(("input_ids",)))


def _read_prompts(source: Path, files: Mapping[str, bytes]) -> Iterator[NDArray[np.int64]]:
    """Of a sentence-transformers folder, what it puts before its texts."""
    settings = json.loads(files.get("config_sentence_transformers.json", b"{}"))
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    lines = [json.dumps({"text": prompt}) for prompt in dict(prompts or {}).values() if prompt]
    if lines:
        with TemporaryDirectory() as draft:
            file = Path(draft) / "prompts.jsonl"
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            yield from _ids_of(_open(file, source, None))


def _all_settings(*settings: Any) -> Iterator[Any]:
    """Where special pieces are named: configurations, those of generation among them, and those inside them."""
    for holder in settings:
        if holder is not None:
            yield holder
            yield from _all_settings(*(value for value in vars(holder).values() if hasattr(value, "get_text_config")))


def _special_ids(model: Any) -> set[int]:
    holders = _all_settings(model.config, getattr(model, "generation_config", None))
    values = [value for holder in holders for name, value in vars(holder).items() if name.endswith(_ID)]
    numbers = [number for value in values for number in (value if isinstance(value, list) else [value])]
    return {number for number in numbers if isinstance(number, int) and not isinstance(number, bool)}


@torch.no_grad()
def _make(model: Any, kept: list[int], rows: int) -> Any:
    """The model with these rows of what has a row for each piece, and its special ids renumbered."""
    new = {old: number for number, old in enumerate(kept)}

    def renumber(value: Any) -> Any:
        return [renumber(one) for one in value] if isinstance(value, list) else new.get(value, value)

    config, generation = copy.deepcopy((model.config, getattr(model, "generation_config", None)))
    config.get_text_config().vocab_size = len(kept)
    for settings in _all_settings(config, generation):
        for name, value in list(vars(settings).items()):
            if name.endswith(_ID) and value is not None:
                setattr(settings, name, renumber(value))
            elif name in _LISTED and value is not None:
                setattr(settings, name, [new[number] for number in value if number in new])
    student = type(model)(config).to(device=model.device, dtype=model.dtype).eval()
    if generation is not None:
        student.generation_config = generation
    state, index = model.state_dict(), torch.tensor(kept, device=model.device)
    for name, target in student.state_dict().items():
        weight = state[name]
        axes = [
            axis for axis, lengths in enumerate(zip(weight.shape, target.shape, strict=True)) if len({*lengths}) > 1
        ]
        fits = not axes or (len(axes) == 1 and weight.shape[axes[0]] == rows)
        rule, shape = "have a row for each piece of the vocabulary, or none", f"{name} {tuple(weight.shape)}"
        need(fits, "shrink-unsupported", "a weight", rule, shape)
        target.copy_(weight.index_select(axes[0], index) if axes else weight)
    return student


@torch.no_grad()
def _compare(model: Any, student: Any, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
    """Both on one text: refuses models in which a number of a piece means more than its row."""
    longest = count_positions(model.config) or len(before)
    outputs = []
    for network, ids in ((model, before), (student, after)):
        inputs = {"input_ids": torch.tensor(ids[:longest])[None].to(model.device)}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        outputs.append(base_of(network)(**inputs)[0].float())
    gap, size = float((outputs[0] - outputs[1]).abs().max()), float(outputs[0].abs().max())
    is_same = gap <= load_tolerances()["graph"]["probs"]["float32"] * max(1.0, size)
    rule, got = "give the same output for the same pieces under other numbers", f"a difference of {gap:.3g}"
    remedy = "its code reads the numbers of pieces"
    need(is_same, "shrink-unsupported", "the model", rule, got, remedy=remedy)


def _other_files(source: Path, kept: list[int]) -> dict[str, bytes]:
    """The tokenizer's other files: renumbered, as they are, or left out where they hold the old vocabulary."""
    files: dict[str, bytes] = {}
    for name in READERS:
        if name in _STALE or name.endswith(".model") or name == _TOKENIZER:
            continue
        with suppress(FileNotFoundError):
            files[name] = (source / name).read_bytes()
    settings = _read(source, _SETTINGS)
    if isinstance(settings, dict) and "auto_map" not in settings:
        new = {str(old): str(number) for number, old in enumerate(kept)}
        named = settings.get("added_tokens_decoder")
        if isinstance(named, dict):
            settings["added_tokens_decoder"] = {new[old]: entry for old, entry in named.items() if old in new}
        files[_SETTINGS] = _bytes(settings)
    else:
        files.pop(_SETTINGS, None)
    return files
