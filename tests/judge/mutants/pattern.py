"""Edits of Python as patterns of its syntax: names of local variables and the layout are free."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_BUILTINS = frozenset(dir(builtins))
_BLOCKS = ("body", "orelse", "finalbody")
_Code: TypeAlias = ast.expr | list[ast.stmt]
_IGNORED = ("ctx", "kind", "type_comment")


def rewrite(tree: ast.Module, old: str, new: str, function: str = "") -> ast.AST:
    """Put ``new`` at the one place of a module that ``old`` fits.

    Both are an expression or statements. In ``old`` a name that is neither of the module nor of Python, nor a
    parameter, stands for any local variable, the same one throughout; in ``new`` it is what it stood for. A statement
    ``...`` fits any number of statements; in ``new`` it is those. The place is inside ``function``, which comes back,
    or anywhere in the module. A ``LookupError`` where it is none or several, or ``new`` reads what ``old`` hides.
    """
    before, after = parse_pair(old, new)
    places = [place for scope in _scopes(tree) if function in ("", scope.name) for place in scope.find(before)]
    if len(places) != 1:
        raise LookupError(
            f"{function or 'the chapter'} must hold this once, not {len(places)} times; adapt it:\n{old}"
        )
    places[0].fill(after)
    return places[0].scope.root


def locals_of(function: ast.FunctionDef) -> set[str]:
    """The variables of a function that are not its parameters, those of functions inside it among them."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            names.add(node.name)
    return names - _parameters(function)


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


@dataclass
class _Scope:
    """A function of the module, or all that is in none."""

    name: str
    root: ast.AST
    free: set[str]  # its locals, which a pattern may call anything
    fixed: set[str]  # names that mean the same in a pattern

    def find(self, old: _Code) -> Iterator[_Place]:
        """Each place that a pattern fits."""
        for parent in _walk(self.root, inside=bool(self.name)):
            for key, value in ast.iter_fields(parent):
                if isinstance(old, list):
                    starts = range(len(value)) if key in _BLOCKS and isinstance(value, list) else ()
                    for start in starts:
                        if type(value[start]) is not type(old[0]):
                            continue
                        place = _Place(self, parent, key, start)
                        place.stop = place.fits_block(old, value, start, anchored=False)
                        if place.stop:
                            yield place
                    continue
                for number, node in enumerate(value if isinstance(value, list) else [value]):
                    if type(node) is type(old) and (place := _Place(self, parent, key, number)).fits(old, node):
                        yield place


@dataclass
class _Place:
    """Where a pattern is tried: a field of a node, what its names stand for, and the statements that ``...`` fits."""

    scope: _Scope
    parent: ast.AST
    key: str
    start: int
    stop: int = 0
    names: dict[str, str] = field(default_factory=dict)
    gaps: list[list[ast.stmt]] = field(default_factory=list)

    def fits(self, old: Any, node: Any) -> bool:
        """Whether a piece of the pattern is a piece of the module."""
        if type(old) is not type(node):
            return False
        if isinstance(old, list):
            if any(_is_gap(one) for one in old):
                return self.fits_block(old, node, 0, anchored=True) > 0
            return len(old) == len(node) and all(map(self.fits, old, node))
        if not isinstance(old, ast.AST):
            return bool(old == node)
        for key in old._fields:
            one, other = getattr(old, key, None), getattr(node, key, None)
            if _is_name(old, key) and isinstance(one, str):
                if not self._same_name(one, other):
                    return False
            elif key not in _IGNORED and not self.fits(one, other):
                return False
        return True

    def fits_block(self, old: list[ast.stmt], block: list[ast.stmt], start: int, *, anchored: bool) -> int:
        """Where the statements end that begin at ``start`` and fit; 0 where none do."""
        if not old:
            return 0 if anchored and start != len(block) else start
        if _is_gap(old[0]):
            for stop in range(start, len(block) + 1):
                names, num_gaps = dict(self.names), len(self.gaps)
                self.gaps.append(block[start:stop])
                end = self.fits_block(old[1:], block, stop, anchored=anchored)
                if end or (anchored and len(old) == 1 and stop == len(block)):
                    return max(end, 1)
                self.names, self.gaps = names, self.gaps[:num_gaps]
            return 0
        if start < len(block) and self.fits(old[0], block[start]):
            return self.fits_block(old[1:], block, start + 1, anchored=anchored)
        return 0

    def _same_name(self, old: str, name: Any) -> bool:
        if name not in self.scope.free or old in self.scope.fixed:
            return bool(old == name)
        known = self.names.setdefault(old, name) == name
        return known and list(self.names.values()).count(name) == 1

    def fill(self, new: _Code) -> None:
        """Put the new text here."""
        nodes = new if isinstance(new, list) else [new]
        stored = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and not _reads(n)}
        stored |= {n.arg for node in nodes for n in ast.walk(node) if isinstance(n, ast.arg)}
        known = self.scope.fixed | set(self.names) | (stored - self.scope.free)
        for node in nodes:
            for name in (n for n in ast.walk(node) if isinstance(n, ast.Name)):
                if name.id not in known:
                    raise LookupError(f"the old text must show what {name.id} is:\n{ast.unparse(node)}")
        gaps = iter(self.gaps)
        written = [_Writer(self.names, gaps).visit(node) for node in nodes]
        value = getattr(self.parent, self.key)
        if isinstance(new, list):
            value[self.start : self.stop] = [s for one in written for s in (one if isinstance(one, list) else [one])]
        elif isinstance(value, list):
            value[self.start] = written[0]
        else:
            setattr(self.parent, self.key, written[0])


class _Writer(ast.NodeTransformer):
    """Puts the product's names for those of a pattern, and its statements for ``...``."""

    def __init__(self, names: Mapping[str, str], gaps: Iterator[list[ast.stmt]]) -> None:
        self.names, self.gaps = names, gaps

    def generic_visit(self, node: ast.AST) -> Any:
        if _is_gap(node):
            return next(self.gaps)
        for key in node._fields:
            value = getattr(node, key, None)
            if _is_name(node, key) and isinstance(value, str):
                setattr(node, key, self.names.get(value, value))
        return super().generic_visit(node)


def parse_pair(old: str, new: str) -> tuple[_Code, _Code]:
    """Both as an expression, or where one is none as statements."""
    try:
        return ast.parse(old, mode="eval").body, ast.parse(new, mode="eval").body
    except SyntaxError:
        return ast.parse(old).body, ast.parse(new).body


def _scopes(tree: ast.Module) -> Iterator[_Scope]:
    names = {node.id for node in tree.body for node in ast.walk(node) if isinstance(node, ast.Name)}
    module: set[str] = set(_BUILTINS)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            module.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            module |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    yield _Scope("", tree, set(), module | names)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield _Scope(node.name, node, locals_of(node), module | _parameters(node))


def _walk(root: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    """All nodes below and at the root; outside functions without theirs."""
    todo = [root]
    for node in todo:
        yield node
        todo += (n for n in ast.iter_child_nodes(node) if inside or not isinstance(n, ast.FunctionDef))


def _is_name(node: ast.AST, key: str) -> bool:
    """Whether this field of a node is a variable's name."""
    return (type(node), key) in {(ast.Name, "id"), (ast.arg, "arg"), (ast.FunctionDef, "name")}


def _is_gap(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _reads(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)
