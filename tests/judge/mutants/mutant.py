"""What a mutant is: the reference with one thing wrong, written as a change of its syntax."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import numpy as np
from judge.mutants.pattern import rewrite

import shd_ref
from shd_ref.conformance import OUTPUTS, Result, Status, cases
from shd_ref.conformance.adapter import as_adapter
from shd_ref.conformance.runner import Item, run_item

_SOURCES = Path(shd_ref.__file__).parent
_COPY = "mutated_shd"
_ALPHAS = ("solve_alpha", "squeeze_heads")
_GRADIENTS = ("shd_loss_gradient", "shd_loss_gradient_qk")
_LOSS = ("shd_loss", *_GRADIENTS)

# The chapters of the reference, with the operations that show what is wrong in one.
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "merging.alpha": (*_ALPHAS, "matched_plan"),
    "attention": tuple(OUTPUTS),
    "gradients": _GRADIENTS,
    "merging.gram": ("gram_tensor", "solve_alpha_from_gram", "merge_gram"),
    "indexer": ("indexer_target", "indexer_loss", "indexer_loss_gradient"),
    "layers": ("layer_map",),
    "loss": _LOSS,
    "merging.matching": ("matched_plan",),
    "merging.mixing": ("squeeze_heads", "mix_heads", "compose_mixing"),
    "merging.oracles": ("diagnose",),
    "merging.plans": ("merge_plan", "plan_groups", "squeeze_heads"),
    "support": ("intersect_support", "align_tokens", *_LOSS),
    "tokens": ("align_tokens",),
}


@dataclass(frozen=True)
class Edit:
    """One change: in a chapter, or in one function of it, ``old`` becomes ``new``, as ``rewrite`` describes."""

    chapter: str
    old: str
    new: str
    function: str = ""


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation, made of the reference's text by edits."""

    name: str
    wrong: str  # what it does, in one sentence
    edits: tuple[Edit, ...]
    operations: tuple[str, ...]  # what is run to find the items that catch it
    mistake: str = ""  # in ``specs/mistakes.json``, where the report of a failure must name it
    dtype: str = "float32"  # float64 for a mistake that the tolerances of float32 allow


@contextmanager
def built(edits: Iterable[Edit] = ()) -> Iterator[SimpleNamespace]:
    """All operations, in a copy of the reference with these edits; without any, in a true copy."""
    finder = _Finder(tuple(edits))
    sys.meta_path.insert(0, finder)
    try:
        chapters = [importlib.import_module(f"{_COPY}.{name}") for name in SHOWN_BY]
        homes = {name: chapter for chapter in chapters for name in OUTPUTS if hasattr(chapter, name)}
        yield SimpleNamespace(**{name: getattr(chapter, name) for name, chapter in homes.items()})
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == _COPY]:
            del sys.modules[name]


def run(implementation: object, items: Iterable[Item], dtype: str = "float32") -> list[Result]:
    """What the judge says about these items, those left out that do not run at this dtype."""
    adapter = as_adapter(implementation)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [run_item(item, adapter, dtype) for item in items if dtype in item.dtypes]


def failures(wrong: Mutant, items: Iterable[Item], dtype: str = "") -> list[Result]:
    """The items that catch a mutant; at its own dtype unless another is named."""
    with built(wrong.edits) as implementation:
        return [
            result for result in run(implementation, items, dtype or wrong.dtype) if result.status is Status.FAILED
        ]


@cache
def items_by_id() -> dict[str, Item]:
    """Every vector case and law."""
    return {item.id: item for item in cases()}


def items_on(operations: Sequence[str]) -> list[Item]:
    """The cases and laws that call one of these operations."""
    return [item for item in items_by_id().values() if set(item.operations) & set(operations)]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the copy's chapters, which import each other and otherwise what the reference imports."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.edits = edits

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != _COPY:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=name.partition(".")[2] not in SHOWN_BY)

    def exec_module(self, module: ModuleType) -> None:
        _, _, chapter = module.__name__.partition(".")
        if chapter in SHOWN_BY:
            exec(_compile(chapter, tuple(e for e in self.edits if e.chapter == chapter)), vars(module))


def parse_chapter(chapter: str) -> ast.Module:
    """The syntax of a chapter of the reference."""
    return ast.parse(_path(chapter).read_text(encoding="utf-8"))


def apply(tree: ast.Module, edits: Iterable[Edit]) -> list[ast.AST]:
    """Make these changes in a chapter's syntax; the functions that they change."""
    return [rewrite(tree, edit.old, edit.new, edit.function) for edit in edits]


@cache
def _compile(chapter: str, edits: tuple[Edit, ...]) -> CodeType:
    tree = parse_chapter(chapter)
    apply(tree, edits)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).removeprefix("shd_ref.") in SHOWN_BY:
            node.module = str(node.module).replace("shd_ref", _COPY, 1)
    return compile(ast.fix_missing_locations(tree), f"{_path(chapter)} with edits", "exec")


def _path(chapter: str) -> Path:
    return _SOURCES / f"{chapter.replace('.', '/')}.py"
