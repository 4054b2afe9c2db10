"""The pieces of a ``tokenizer.json``: which of them texts need, and the file without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from shd_ref.errors import ShdError

_REMEDY: Final = "of the tokenizers library: load the tokenizer with AutoTokenizer and save it again"


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
        if model.get("end_of_word_suffix") or ("merges" in model and model.get("continuing_subword_prefix")):
            rule = "merges must join characters as they are, without a prefix or a suffix of words"
            raise ShdError("shrink-unsupported", f"{rule}; got {model['type']}")
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
        if size is not None and size < len(kept):
            rule = f"size must be at least {len(kept)}, the special pieces and single characters or bytes"
            raise ShdError("argument-value", f"{rule}; got {size}")
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
