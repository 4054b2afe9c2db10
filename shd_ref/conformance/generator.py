"""Valid calls of every operation, drawn by seed: options, sizes, contents and dtypes crossed.

An operation is a row of ``operations.txt``: its arguments, its results, and its *factors*, what can differ between
two calls, with a few *levels* each. ``covering_rows`` chooses levels so that every two of two factors meet in some
row, and every three of three options; ``draw_call`` makes a call of a row, each argument by the recipe of its name.
Nothing here knows an answer: ``sessions.py`` asks the reference.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.merging.plans import merge_plan
from shd_ref.tolerances import load_tolerances, row_sum_tolerance

Array: TypeAlias = NDArray[Any]
Levels: TypeAlias = Mapping[str, str]
Inputs: TypeAlias = dict[str, Any]

FACTORS: dict[str, dict[str, tuple[str, ...]]] = {}
ARGUMENTS: dict[str, dict[str, str]] = {}
OUTPUTS: dict[str, tuple[str, ...]] = {}
"""By operation: what can differ between two calls, the recipe of each argument, the results in their order."""
WORDS: list[str] = []
"""Options that are words, of which an implementation may lack some."""
_MOST: dict[str, dict[str, int]] = {}
_LONG = (6, 7, 9, 16, 17, 18, 33, 64, 65, 67, 70, 129, 131, 260, 300, 520)


def _read_operations() -> None:
    levels: dict[str, list[str]] = {"words": WORDS}
    for line in (Path(__file__).parent / "operations.txt").read_text(encoding="utf-8").splitlines():
        call, colon, factors = line.partition(" : ")
        name, *words = call.partition(" -> ")[0].split() or ["#"]
        if name == "#":
            continue
        if name == "most":
            _MOST[words[0]] = {word[0]: int(word[2:]) for word in words[1:]}
        elif colon:
            FACTORS[name] = {}
        else:
            levels.setdefault(name, []).extend(words)
        for factor, _, listed in (part.partition("=") for part in factors.split()):
            named = [word for level in levels.get(listed, listed.split(",")) for word in levels.get(level, [level])]
            FACTORS[name] |= {factor: tuple("" if w == "-" else w for w in named)} if listed else FACTORS[factor]
        if "->" in call:
            ARGUMENTS[name] = {word.partition(":")[0]: word.rpartition(":")[2] for word in words}
            OUTPUTS[name] = tuple(call.partition(" -> ")[2].split())


_read_operations()


def covering_rows(
    factors: Mapping[str, Sequence[str]], rng: np.random.Generator, threes: Sequence[str] = (), width: int = 16
) -> list[dict[str, str]]:
    """Rows of levels in which every two levels of two factors meet, and every three of three factors of ``threes``.

    Greedy: the best of ``width`` candidates, each of which starts from levels that have not met yet.
    """
    names = list(factors)
    sizes = np.array([*(len(factors[name]) for name in names), 1])
    triples = combinations([number for number, name in enumerate(names) if name in threes], 3)
    # A pair is written as three, the last of them a factor with a single level.
    groups = np.array([*((*pair, len(names)) for pair in combinations(range(len(sizes)), 2)), *triples])
    spans = sizes[groups]
    steps = np.stack([spans[:, 1] * spans[:, 2], spans[:, 2], spans[:, 2] ** 0], axis=1)
    offsets = np.concatenate(([0], np.cumsum(spans.prod(axis=1))))
    todo, rows = np.ones(int(offsets[-1]), dtype=bool), []
    while len(left := np.flatnonzero(todo)):
        candidates = (rng.random((width, len(sizes))) * sizes).astype(int)
        for candidate, cell in zip(candidates, left[rng.integers(len(left), size=width)], strict=True):
            group = int(np.searchsorted(offsets, cell, side="right")) - 1
            candidate[groups[group]] = (cell - offsets[group]) // steps[group] % spans[group]
        cells = offsets[:-1] + (candidates[:, groups] * steps).sum(axis=2)
        best = int(np.argmax(todo[cells].sum(axis=1)))
        todo[cells[best]] = False
        rows.append({name: factors[name][level] for name, level in zip(names, candidates[best], strict=False)})
    return rows


def _value(text: str) -> Any:
    """The value that a word of the table stands for."""
    kind, _, number = text.partition("(")
    if kind in ("float32", "float64", "int64"):
        return np.dtype(kind).type(float(number[:-1]))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class OwnDtype(np.ndarray[Any, np.dtype[Any]]):
    """A float array in a dtype of its own, not the one under judgement; an adapter leaves it in that dtype."""


def round_to(array: Array, dtype: str) -> Array:
    """A copy rounded to a dtype: float64, or float32 that holds only numbers of it, since NumPy has no bfloat16."""
    if dtype != "bfloat16":
        rounded = array.astype(dtype)
        return rounded if dtype == "float64" else rounded.astype(np.float32)
    # bfloat16 is the upper half of a float32: round to nearest, ties to even.
    single = np.ascontiguousarray(array, dtype=np.float32)
    bits = single.view(np.uint32)
    halves = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), halves.view(np.float32), single)


class Draw:
    """The random choices of one call at its levels, in the dtype under judgement.

    What has a recipe is an attribute, drawn once, as are the sizes of the axes B, H, L, S, D and G.
    """

    def __init__(
        self, operation: str, key: Sequence[int], dtype: str, levels: Levels, shapes: Sequence[int] = ()
    ) -> None:
        self.operation, self.rng, self.dtype, self.levels = operation, np.random.default_rng(key), dtype, levels
        # Sizes have a stream of their own, so that calls may share their shapes: some subjects compile for each.
        self.shapes = np.random.default_rng(shapes) if shapes else self.rng
        self.axis, self.kind = self.level("size"), self.level("dtype")
        self.long_left = 2 if self.axis == "LS" else 1
        self.same = int(self.shape((2, 3, 4)))
        self.coarse = dtype in ("float16", "bfloat16") or self.kind in ("half", "mixed")
        self.row_sum = row_sum_tolerance("float32" if self.kind == "single" else dtype)
        self.fine, self.whole = dtype == "float64" and not self.kind, self.kind in ("unsigned", "signed")
        self.item = 0  # of a calibration

    def __getattr__(self, name: str) -> Any:
        if name not in _RECIPES and name not in "BHLSDG":
            raise AttributeError(name)
        drawn = _RECIPES[name](self) if name in _RECIPES else self.size(name)
        return self.__dict__.setdefault(name, drawn)

    def level(self, name: str) -> str:
        """The level of a factor; "" where the operation has none."""
        return self.levels.get(name, "")

    def shape(self, values: Sequence[Any]) -> Any:
        """One of these, of what shapes depend on."""
        return values[int(self.shapes.integers(len(values)))]

    def pick(self, values: Sequence[Any]) -> Any:
        """One of the values."""
        return values[int(self.rng.integers(len(values)))]

    def chance(self, share: float) -> bool:
        """True in this share of all draws."""
        return bool(self.rng.random() < share)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument of the call; the default where the call does not give it."""
        recipe = ARGUMENTS[self.operation].get(name, "")
        if not recipe or (name in FACTORS[self.operation] and not self.level(name)):
            return default
        if recipe in _RECIPES:
            return getattr(self, recipe)
        return self.__dict__.setdefault(f"the {name}", _value(self.pick(self.level(name).split("|"))))

    def size(self, axis: str) -> int:
        """The size of an axis, long where this call has it long."""
        most = _MOST.get(self.operation, {}).get(axis, 131 if axis == "H" else 520)
        if self.axis == "equal":
            return min(self.same, most)
        if self.axis and axis in self.axis and self.long_left:
            self.long_left -= 1
            sizes = [n for n in _LONG if n <= min(most, 131 if self.axis == "LS" else 520)]
            return int(self.shape(sizes[self.shape((-1 if axis in "LS" else -8, -8, -8, -8, 0)) :]))
        return int(self.shape((1, 2, 2, 3, 3, 4, 5) if self.axis in ("", "D") else (1, 2, 2, 3)))

    def store(self, array: Any, *, whole: bool = False) -> Array:
        """Numbers in the dtype that the call gives them in; ``whole`` where they are integers already."""
        kind = self.pick(("", "single", "half")) if self.kind == "mixed" else self.kind
        if whole and kind in ("unsigned", "signed"):
            return np.asarray(array).astype(f"{'u' * (kind == 'unsigned')}int{self.pick((8, 8, 16, 32, 64))}")
        if kind in ("single", "half") and self.dtype in ("float64", "float32"):
            return np.asarray(array, np.float64).astype(np.float32 if kind == "single" else np.float16).view(OwnDtype)
        return round_to(np.asarray(array, np.float64), self.dtype)

    def maps(
        self, *shape: int, counted: Array | None = None, allowed: Array | None = None, positive: bool = False
    ) -> Array:
        """Attention maps ``(..., L, S)``: anything in rows not ``counted``, nothing on keys not ``allowed``."""
        rng, kind = self.rng, "onehot" if self.whole else self.level("maps")
        weights = rng.random(shape) + 1e-3
        if kind == "peaked":
            weights **= 12
        elif kind == "onehot":
            weights = np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]
        elif kind == "tiny":
            weights[..., 0] *= 2.0 ** -self.pick((12, 24, 28, 40, 100, 300))
        elif kind == "causal":
            weights *= np.tri(shape[-2], shape[-1], k=max(0, shape[-1] - shape[-2]))
        elif kind == "near" and len(shape) == 4:
            for first in range(0, shape[1] - 1, 2):
                # Distances on both sides of the threshold of ALPHA-6, and none.
                away = self.pick((0, 0, 1e-2, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7)) if self.chance(0.7) else 1.0
                weights[:, first + 1] = weights[:, first] + (weights[:, first + 1] - weights[:, first]) * away
        if kind == "zeros" or self.chance(0.15):
            weights[rng.random(shape) < 0.3] = 0.0
        if self.level("numbers") == "unread" and not self.fine:
            weights[weights < 2.0**-40] = 0.0  # the square of an output that reads less vanishes in float32
        weights = (weights + 0.05 * positive) * (True if allowed is None else allowed)
        maps: Array = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
        if self.coarse:  # few bits, and rows that sum to exactly one
            units = 2 ** (6 if self.dtype == "bfloat16" else 8)
            least = (weights > 0) * (positive and shape[-1] < units)
            counts = least + rng.multinomial(units - least.sum(axis=-1), maps)
            maps = np.where(maps.any(axis=-1, keepdims=True), counts / units, 0.0)
        if kind == "zeros":
            maps[rng.random(shape[:-1]) < 0.3] = 0.0
        if "at_most_one" in (self.level("row_sums"), self.level("sums")):
            mass = 0.98 * rng.random(shape[:-1]) ** (1 if self.coarse else self.pick((1, 1, 8, 40)))
            mass = mass if self.fine else np.maximum(mass, 2.0**-18)  # squares of smaller ones vanish in float32
            maps *= np.where(rng.random(shape[:-1]) < 0.3, 1.0, mass)[..., None]
            softened = self.operation == "soften" and not self.coarse
            if (self.fine or softened) and self.chance(0.5 if softened else 0.2):
                maps *= 2.0 ** -self.pick((30, 70, 100))  # next to nothing everywhere
        if kind == "off" and not self.coarse:
            maps *= 1 + self.pick((-0.9, -0.3, 0.3, 0.9)) * self.row_sum
        if counted is not None and (kind == "garbage" or self.chance(0.25)):
            odd = rng.integers(0, 9, size=shape) * self.pick((0.0, 0.25, 1.0, 8.0, 2.0**-80 if self.fine else 0.5))
            maps = np.where(np.broadcast_to(counted[:, None, :, None], shape), maps, odd)
        return self.store(maps, whole=bool(self.whole and (maps == np.floor(maps)).all()))

    def numbers(self, *shape: int, scaled: bool = True) -> Array:
        """Real numbers, for value outputs, values, queries and keys."""
        rng, kind = self.rng, self.level("numbers")
        if kind == "whole" or self.whole:
            high = self.pick((5, {"unsigned": 250, "signed": 120}.get(self.kind, 5)))
            return self.store(rng.integers(0 if self.kind == "unsigned" else -high, high, size=shape), whole=True)
        numbers = rng.normal(size=shape)
        if kind == "scaled" and scaled:
            narrow = self.coarse or bool(self.kind)
            powers = {"float64": (-200, -30, 24, 200), "float32": (-30, 24)}
            numbers *= 2.0 ** self.pick((-3, 3) if narrow else powers[self.dtype])
            numbers *= 2.0 ** (rng.integers(-14, 14, size=(shape[0], *(1,) * (len(shape) - 1))) * (not narrow))
        elif kind == "bias":
            numbers += rng.normal(size=(*shape[:-2], 1, shape[-1])) * self.pick((1, 100))
        elif kind == "alike" and self.chance(0.3):  # features that nearly depend on each other
            numbers[..., -1] = numbers[..., 0] + self.pick((1e-3, 1e-5, 1e-6)) * numbers[..., -1]
        elif kind == "alike" and self.chance(0.7 if self.axis == "equal" else 0.3):  # keys that are the same
            numbers[..., -1, :] = numbers[..., 0, :]
        elif kind == "alike" and len(shape) == 4 and shape[1] > 1:
            i, j = rng.permutation(shape[1])[:2]
            numbers[:, j] = self.pick((1, -1, -1, 0, 2)) * numbers[:, i] + self.pick((0, 1e-2)) * numbers[:, j]
        elif kind == "vanishing" and len(shape) == 4:
            numbers[rng.random(shape[0]) < 0.7] = 0.0
        return self.store(numbers)

    def outputs(self, maps: Array) -> Array:
        """Value outputs ``(B, H, S, D)`` for these maps; of "target" the alphas lie where something turns."""
        outputs = self.numbers(maps.shape[0], maps.shape[1], maps.shape[3], self.D)
        if self.level("numbers") == "unread" and not self.coarse and self.chance(0.8):
            # Nothing where a row of the head reads; else of one sign, as rounding would decide whether a sum is 0.
            is_read = (np.asarray(maps) != 0).any(axis=2)[..., None]
            return self.store(np.where(is_read, 0.0, np.abs(outputs)))
        if self.level("maps") != "target" or outputs.dtype.kind != "f":
            return outputs
        both = np.asarray(outputs, np.float64)
        for first in range(0, maps.shape[1] - 1, 2):
            share = self.turning(len(maps))[:, None, None]
            both[:, first + 1], both[:, first] = (1 - share) * both[:, first], share * both[:, first]
        return self.store(both)

    def turning(self, *shape: int) -> Array:
        """Alphas on both sides of 0, 1/2 and 1, at distances from the tolerance of alpha on."""
        tolerance = float(load_tolerances()["agreement"][self.dtype]["alpha"]["atol"])
        near, far = tolerance * (1.2 + 2 * self.rng.random(shape)), 10.0 ** -self.rng.uniform(1, 6, size=shape)
        away = np.where(self.rng.random(shape) < 0.6, near, far) * self.rng.choice([-1, 1], size=shape)
        return np.asarray(self.rng.choice([0.0, 1.0, 0.5], size=shape) + away)

    def shares(self, *shape: int) -> Array:
        alpha, units = self.rng.random(shape), {"ends": 1, "eighths": 8}.get(self.level("alphas"), 8 * self.coarse)
        alpha = np.round(alpha * units) / units if units else alpha
        return self.store(alpha, whole=bool((alpha == np.round(alpha)).all()))

    def logits(self, *shape: int, lowest: float = -1e30) -> Array:
        """Logits ``(..., L, S)``, -inf where a key is masked, or as low as ``lowest``."""
        rng, kind = self.rng, self.level("logits")
        logits = rng.normal(size=shape)
        if kind == "large":
            logits *= self.pick((5, 30, 300, 300 if self.coarse else 3e4))
        elif kind == "tied":
            logits = np.round(logits * 2) / 2
        elif kind == "floor":
            lowest = (-6e4 if self.coarse else lowest) * min(1.0, 0.5 * float(self.argument("temperature", 2)))
            logits = np.where(rng.random(shape) < 0.3, lowest * self.pick((1, 0.5, 0.1)), logits)
        elif kind == "shifted":
            logits += rng.choice([-1e3, 1e3] if self.coarse else [-1e4, -1e9, 1e3, 1e4], size=(*shape[:-1], 1))
        if self.whole:
            return self.store(np.abs(np.round(logits * 3)).clip(0, 100), whole=True)
        if kind in ("masked", "empty"):
            logits[rng.random(shape) < self.pick((0.2, 0.6))] = -np.inf
        if kind == "empty":
            logits[rng.random(shape[:-1]) < 0.4] = -np.inf
        return self.store(logits)

    def layered(self, draw: Callable[[int], Array]) -> Any:
        """One array, or a list with one a layer."""
        number = {"two": 2, "three": 3, "many": self.many_layers}.get(self.level("layers"), 1)
        return [draw(layer) for layer in range(number)] if self.level("layers") else draw(0)

    def count(self, number: int) -> Any:
        """A whole number, of NumPy's kinds where the level says so."""
        if self.level("counts") != "numpy":
            return number
        kinds = ("int8", "uint8", "int16", "int32", "int64", "uint64")
        return np.dtype(self.pick([kind for kind in kinds if number <= np.iinfo(kind).max][:3])).type(number)

    def divisor(self, heads: int) -> int:
        chosen = self.shape([n for n in range(1, heads + 1) if heads % n == 0])
        return int({"one": 1, "all": heads}.get(self.level("kv"), chosen))

    def multiple(self, kv: int) -> int:
        """Query heads of an indexer or its teacher: a multiple of the key heads and of the groups."""
        least = kv * int(self.argument("groups", 1))
        factor = -(-self.pick((5, 9, 17, 33, 66, 129)) // least) if self.axis == "H" else self.pick((1, 2))
        return least * int(factor)

    def scored(self, *shape: int) -> Array:
        numbers = self.rng.normal(size=shape) * (8 if self.level("scores") == "wide" else 1)
        if self.whole or self.tied:
            numbers = np.round(numbers).clip(0 if self.kind == "unsigned" else -2, 2)
        return self.store(numbers, whole=self.tied)

    def row_mask(self, name: str) -> Array | None:
        """``query_mask`` or ``loss_mask``."""
        level, rng, places = self.level(name), self.rng, np.arange(max(self.B, self.L))
        mask: Array = rng.random((self.B, self.L)) < float(self.pick((0.5, 0.8)))
        lengths = places[: self.L] < rng.integers(1, self.L + 1, size=(self.B, 1))
        sample = mask & (places[: self.B] != rng.integers(self.B))[:, None]
        named = {"lengths": lengths, "sample": sample, "none": mask & False, "all": mask | True}
        return named.get(level, mask) if level and (level != "first" or not self.item) else None

    def positions(self, name: str, size: int) -> Any:
        number = {"all": size, "one": 1}.get(self.level(name), int(self.rng.integers(1, size + 1)))
        return None if self.level(name) == "none" else self.rng.permutation(size)[:number].tolist()

    def token_groups(self, name: str, size: int) -> Any:
        """Weights of tokens in groups: by number, by spans that overlap, or of any kind; some tokens in none."""
        level, rng = self.level(name), self.rng
        if level == "none":
            return None
        lead = (self.B,) if level == "sample" else ()
        number = int(rng.integers(1, size + 1))
        if level in ("ids", "sample"):
            ids = rng.integers(-1 if self.chance(0.5) else 0, number, size=(*lead, 1, size))
            weights = (ids == np.arange(number)[:, None]).astype(float)
        elif level == "overlap":  # of two cuts of one line
            ends = [np.r_[0, np.sort(rng.integers(0, 50, size=count - 1)), 50] for count in (size, number)]
            (start, end), (first, last) = ((cut[:-1], cut[1:]) for cut in ends)
            both = np.minimum(end, last[:, None]) - np.maximum(start, first[:, None])
            weights = np.maximum(both, 0) * self.pick((1.0, 0.25))
        else:
            weights = rng.integers(0, 9, size=(number, size)) * (rng.random((number, size)) < 0.5) / 8
        return self.store(weights, whole=bool((weights == np.floor(weights)).all()))

    def maps_taught(self, layer: int) -> Array:
        """Supervision that has mass where the student may attend, mostly."""
        shape, logits = self.sides[layer], self.argument("student_logits")
        numbers = np.zeros(shape) if logits is None else np.asarray(logits[layer] if self.level("layers") else logits)
        may = ~np.isneginf(numbers) & (True if self.attn_mask is None else np.broadcast_to(self.attn_mask, shape))
        reverse = self.argument("divergence") == "reverse_kl"
        if logits is not None and not self.coarse and self.chance(0.08):
            # The student's own map with less mass: a divergence below zero.
            odds = np.where(may, np.exp(np.clip(np.asarray(numbers, np.float64), -30, 30)), 0.0)
            mass = 0.5 if self.level("row_sums") == "at_most_one" else 1 - 0.9 * self.row_sum
            return self.store(mass * odds / np.maximum(odds.sum(axis=-1, keepdims=True), 1e-30))
        fitting = reverse or self.argument("support") != "intersect" or self.chance(0.3)
        fitting = fitting and self.operation != "intersect_support" and self.chance(0.93)
        maps = self.maps(*shape, counted=self.loss_mask, allowed=may if fitting else None, positive=reverse)
        if fitting and maps.dtype.kind == "f" and not may.all() and not self.coarse and self.chance(0.08):
            place = np.unravel_index(int(may.argmin()), shape)
            little = 2.0 ** -self.pick((11, 14, 18))
            maps[place] = little * bool(maps[place[:-1]].any())  # of a row without any it would be no distribution
            maps /= np.maximum(maps.sum(axis=-1, keepdims=True), 1.0)
        return maps


def _num_heads(d: Draw) -> int:
    """The teacher's heads, more of them where no other axis is long."""
    if d.operation == "merge_plan":
        return int(d.pick((64, 65, 70, 100, 131, 200) if d.axis == "H" else (*range(1, 41), 48)))
    if d.operation == "solve_alpha":
        return 2
    if d.operation == "value_outputs":
        return max(int(d.H), int(d.shape((1, 2, 4, 6))))
    more = bool(d.H < 5) and d.axis in ("", "H", "D") and d.shapes.random() < 0.6
    most = _MOST.get(d.operation, {}).get("H", 131)
    heads = min(int(d.shape((4, 5, 6, 7, 8, 9, 12, 16, 18, 19))), most) if more else int(d.H)
    return max(heads, 2) if d.operation in _OF_PLANS else heads


def _students(d: Draw) -> int:
    named = {"all": d.num_heads, "one": 1, "many": max(1, d.num_heads - 1)}.get(d.level("heads"))
    named = d.num_heads if d.axis == "equal" and d.operation in ("mix_heads", "merge_plan") else named
    students = named or int(d.shapes.integers(1, d.num_heads + 1))
    return min(students, d.num_heads - d.chance(0.95)) if d.operation in _OF_PLANS else students


def _attn_mask(d: Draw) -> Array | None:
    """For logits of the call's shape; of indexers one for all heads."""
    level, shape = d.level("attn_mask"), (*d.lead, d.L, d.S)
    ones = (1,) * (len(shape) - 2)
    shapes = {"head": (*ones[1:], *shape[-3:]), "sample": (shape[0], *ones, shape[-1]), "matrix": shape[-2:]}
    size = {**shapes, "keys": shape[-1:], "rows": (*shape[:-1], 1)}.get(level, shape)
    mask: Array = d.rng.random(size) < float(d.pick((0.5, 0.8, 0.95)))
    if level == "matrix" and size[0] > 1 and d.chance(0.5):
        mask = np.tri(*size, dtype=bool)
    if level == "none":
        mask[d.rng.random(size[:-1]) < 0.5] = False
    return mask if level else None


def _plan(d: Draw) -> Any:
    """A kind of plan, or explicit rounds; rounds alone where the operation takes no other."""
    level: Any = d.level("plan") or d.level("kind")
    if level not in ("rounds", "numpy"):
        return merge_plan(d.num_heads, d.num_students, level) if d.operation in _OF_PLANS else level
    rounds, heads = [], d.num_heads
    while heads > d.num_students:
        count = int(d.rng.integers(1, min(heads // 2, heads - d.num_students) + 1))
        rounds.append(d.rng.permutation(heads)[: 2 * count].reshape(-1, 2))
        heads -= count
    if level == "numpy":
        return [[tuple(pair) for pair in pairs.astype(d.pick(("int64", "uint8", "int32")))] for pairs in rounds]
    lists = [pairs.tolist() for pairs in rounds]
    return lists if d.chance(0.7) else tuple(tuple(map(tuple, pairs)) for pairs in lists)


def _layers(d: Draw) -> tuple[int, int]:
    """Of teacher and student."""
    large = d.axis == "H" and not d.level("counts")
    teachers = int(d.pick((10**6, 2**31 + 1, 10**9 + 3)) if large else d.rng.integers(1, 127))
    students = int(d.pick(range(1, min(teachers, 13 if d.chance(0.5) else 120) + 1)))
    return teachers, teachers if d.axis == "equal" else students


def _layer_pairs(d: Draw) -> Any:
    teachers, students = d.layers
    number = students if d.level("pairs") == "all" else int(d.rng.integers(1, students + 1))
    whole = np.int64 if d.level("pairs") == "numpy" else int
    pairs = [(whole(s), whole(d.rng.integers(teachers))) for s in d.rng.permutation(students)[:number]]
    return None if d.level("pairs") == "none" else pairs


def _mixing(d: Draw) -> Array:
    shape, kind = (d.B, d.num_students, d.num_heads), d.level("mixing")
    weights = d.rng.random(shape) ** d.pick((1, 6))
    if kind in ("one", "onehot") or d.coarse:
        weights = np.eye(d.num_heads)[d.rng.integers(d.num_heads, size=shape[:2])]
        weights = (weights + np.roll(weights, 1, axis=-1)) / 2 if kind != "onehot" and d.num_heads > 1 else weights
    off = d.pick((-0.9, 0.9)) * d.row_sum * (kind == "off" and not d.coarse and not d.kind)
    return d.store(weights / weights.sum(2, keepdims=True) * (1 + off))


def _calibration(d: Draw) -> list[Any]:
    items: list[Any] = []
    for number in range({"two": 2, "three": 3}.get(d.level("items"), 1)):
        d.item = number
        for name in ("teacher_probs", "value_outputs", "query_mask", *"BLSD"):
            d.__dict__.pop(name, None)
        item = (d.teacher_probs, d.value_outputs, d.query_mask)
        items.append(item[:2] if item[2] is None else d.pick((tuple, list))(item))
    return items


def _gram(d: Draw) -> Array:
    """The gram tensor of a pool."""
    batch, heads, width, kind, rng = d.B, max(2, d.H), d.pick((1, 2, 3)), d.level("gram"), d.rng
    low = 0 if d.kind == "unsigned" else -3
    if kind == "below":  # as rounding leaves of a norm, on a larger scale
        half = rng.integers(low, 3, size=(batch, *(heads,) * 4))
        return d.store(half + half.transpose(0, 3, 4, 1, 2), whole=True)
    maps: Array = rng.random((batch, heads, d.pick((1, 2, 3)), d.pick((2, 3, 4))))
    outputs: Array = rng.normal(size=(batch, heads, maps.shape[3], width))
    maps /= maps.sum(axis=-1, keepdims=True)
    p, q = int(d.p), int(d.q)
    if kind == "near":
        maps[:, q] = maps[:, p] + (maps[:, q] - maps[:, p]) * d.pick((0, 1e-2, 1e-3, 1e-4))
        outputs[:, q] = d.pick((outputs[:, q], -outputs[:, p] * (1 + d.pick((1e-2, 3e-2)))))
    elif kind == "target":
        share = d.turning(batch)[:, None, None]
        outputs[:, p], outputs[:, q] = share * outputs[:, p], (1 - share) * outputs[:, p]
    elif kind == "scaled":
        outputs *= 2.0 ** d.pick((-40, -3, 20) if d.dtype == "float64" else (-4, 4))
    if kind in ("scaled", "near"):
        outputs *= 2.0 ** (rng.integers(-6, 6, size=(batch, 1, 1, 1)) * (not d.coarse))
    if kind == "whole" or d.coarse or d.whole:
        maps, outputs = rng.integers(0, 2, size=maps.shape), rng.integers(low, 4, size=outputs.shape)
    products = np.einsum("bils,bjsd->bijld", maps, outputs)
    gram = np.einsum("bijld,bmnld->bijmn", products, products)
    return d.store(gram, whole=bool((gram == np.round(gram)).all() and np.abs(gram).max() < 120))


def _outside(d: Draw) -> Any:
    shape, level = (d.B, d.teacher_heads, d.L), d.level("outside")
    far = (-1e4, -300.0, 40.0, 500.0, 1e4) if level == "far" else (0.0,)
    share = {"nothing": 1.0, "mixed": 0.4}.get(level, 0.0)

    def rest(_: int) -> Array:
        away = d.rng.choice(far, size=shape if d.chance(0.5) else ())
        return d.store(np.where(d.rng.random(shape) < share, -np.inf, d.rng.normal(size=shape) + away))

    return d.layered(rest)


def _segments(d: Draw) -> Array:
    ids = d.rng.integers(0, 3, size=(d.B, d.L))
    if d.level("segments") == "odd":
        return np.asarray(d.pick(([5, 2**32 + 5, -1], [2**24, 2**24 + 1, 0], [-7, 2**40, 1])))[ids]
    packed = np.sort(ids, axis=1).astype(d.pick(("int64", "int32", "uint8")))
    return ids if d.level("segments") == "returning" else packed


def _top_k(d: Draw) -> Any:
    most = {"most": (max(1, d.blocks - 1), max(1, d.blocks // 2)), "beyond": (d.blocks + 3,)}
    return d.pick(most.get(d.level("top_k")) or [_value(word) for word in d.level("top_k").split("|")])


def _weights(d: Draw) -> Array:
    weights = d.scored(d.B, d.scorer, d.L)
    return {"positive": np.abs(weights), "zeros": weights * 0}.get(d.level("weights"), weights).view(type(weights))


def _head(array: str, head: int) -> Callable[[Draw], Array]:
    return lambda d: getattr(d, array)[:, head].copy().view(type(getattr(d, array)))


def _sides(d: Draw) -> list[tuple[int, ...]]:
    """Shapes of the student's maps; heads differ between layers where no mask says otherwise."""
    alike = d.level("attn_mask") in ("full", "head", "rows", "none")
    return [(d.B, int(d.shape((1, 2, 3)) if layer and not alike else d.H), d.L, d.S) for layer in range(8)]


_OF_PLANS = ("plan_groups", "compose_mixing")
_LEAD = {"2": "", "3": "H", "5": "HBG"}
_RECIPES: dict[str, Callable[[Draw], Any]] = {
    # Shapes.
    "S": lambda d: d.L if d.level("segments") else d.size("S"),
    "num_heads": _num_heads,
    "num_students": _students,
    "many_layers": lambda d: int(d.shape((4, 5, 7))),
    "lead": lambda d: [
        getattr(d, n) for n in _LEAD.get(d.level("axes"), "BH" if "index" not in d.operation else "BO")
    ],
    "O": lambda _: 1,
    "sides": _sides,
    "width": lambda d: d.pick((1, 2, 3, 4)),
    "layers": _layers,
    # Masks.
    "query_mask": lambda d: d.row_mask("query_mask"),
    "loss_mask": lambda d: d.row_mask("loss_mask"),
    "attn_mask": _attn_mask,
    # Heads, plans, layers, positions.
    "num_teacher_heads": lambda d: d.count(d.num_heads),
    "num_student_heads": lambda d: d.count(d.num_students),
    "num_teacher_layers": lambda d: d.count(d.layers[0]),
    "num_student_layers": lambda d: d.count(d.layers[1]),
    "plan": _plan,
    "pairs": _layer_pairs,
    "rows": lambda d: d.positions("rows", d.L),
    "columns": lambda d: d.positions("columns", d.S),
    "row_groups": lambda d: d.token_groups("row_groups", d.L),
    "column_groups": lambda d: d.token_groups("column_groups", d.S),
    # The teacher.
    "teacher_probs": lambda d: d.maps(d.B, d.num_heads, d.L, d.S, counted=d.query_mask),
    "value_outputs": lambda d: d.outputs(d.teacher_probs),
    "probs_p": _head("teacher_probs", 0),
    "probs_q": _head("teacher_probs", 1),
    "value_outputs_p": _head("value_outputs", 0),
    "value_outputs_q": _head("value_outputs", 1),
    "attn_probs": lambda d: d.maps(*d.lead, d.L, d.S, counted=d.query_mask),
    "attn_logits": lambda d: d.logits(*d.lead, d.L, d.S, lowest=float(np.finfo(np.float32).min)),
    "values": lambda d: d.numbers(d.B, d.divisor(d.num_heads), d.S, d.shape((1, 2, 3))),
    "output_projection": lambda d: d.numbers(d.num_heads * d.values.shape[3], d.D, scaled=False),
    "mixing": _mixing,
    "alphas": lambda d: [d.shares(d.B, len(pairs)) for pairs in d.plan],
    "calibration": _calibration,
    "gram": _gram,
    "two": lambda d: [int(i) for i in d.rng.permutation(max(2, d.H))[:2]],
    "p": lambda d: d.count(d.two[0]),
    "q": lambda d: d.count(d.two[1]),
    "alpha": lambda d: d.shares(len(d.gram)),
    # The loss.
    "student_logits": lambda d: d.layered(lambda layer: d.logits(*d.sides[layer])),
    "supervision": lambda d: d.layered(d.maps_taught),
    "queries": lambda d: d.layered(lambda layer: d.numbers(*d.sides[layer][:3], d.width, scaled=False)),
    "keys": lambda d: d.layered(
        lambda layer: d.numbers(d.B, d.divisor(d.sides[layer][1]), d.S, d.width, scaled=False)
    ),
    # Indexers; the scorer's width may be long as well as the teacher's.
    "kv_heads": lambda d: d.pick((1, 1, 2)),
    "teacher_heads": lambda d: d.multiple(d.kv_heads),
    "teacher_queries": lambda d: d.layered(lambda _: d.numbers(d.B, d.teacher_heads, d.L, d.D, scaled=False)),
    "teacher_keys": lambda d: d.layered(lambda _: d.numbers(d.B, d.kv_heads, d.S, d.D, scaled=False)),
    "outside": _outside,
    "segments": _segments,
    "block_size": lambda d: d.S + 2 if d.level("block_size") == "beyond" else int(d.level("block_size")),
    "blocks": lambda d: -(-d.S // d.argument("block_size", 1)),
    "top_k": _top_k,
    "tied": lambda d: d.level("scores") == "tied" or d.chance(0.3),
    "scorer": lambda d: d.multiple(d.scorer_keys),
    "scorer_keys": lambda d: d.pick((1, 1, 2)),
    "scores": lambda d: d.scored(d.B, d.scorer, d.L, d.pick((d.D, 2, 3, 17, 33) if d.axis == "D" else (1, 2, 3, 4))),
    "score_keys": lambda d: d.scored(d.B, d.scorer_keys, d.blocks, d.scores.shape[3]),
    "weights": _weights,
}


def draw_call(operation: str, key: Sequence[int], dtype: str, levels: Levels, shapes: Sequence[int] = ()) -> Inputs:
    """One valid call of an operation, mostly: arguments by name."""
    d = Draw(operation, key, dtype, levels, shapes)
    names = [name for name in ARGUMENTS[operation] if name not in FACTORS[operation] or d.level(name)]
    return {name: d.argument(name) for name in names}


def relay(rng: np.random.Generator, value: Any) -> Any:
    """The same numbers, lying otherwise in memory (MAP-15)."""
    if isinstance(value, dict):
        return {name: relay(rng, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(relay(rng, item) for item in value)
    if not isinstance(value, np.ndarray) or value.ndim == 0 or rng.random() < 0.3:
        return value
    every, same = (slice(None, None, -1),) * value.ndim, (value == value[:1]).all()
    packed, wide = np.zeros(value.shape, [("other", "u1"), ("field", value.dtype)]), value.repeat(2, -1)
    packed["field"], wide[..., 1::2], fixed = value, 1, value.copy()
    fixed.flags.writeable = False
    ways = [
        *(np.asfortranarray(value), value[..., ::-1].copy()[..., ::-1], value[every].copy()[every], fixed),
        *(wide[..., ::2], packed["field"], value.T.copy().T, value.astype(value.dtype.newbyteorder())),
        np.broadcast_to(value[:1], value.shape) if same else value,
    ]
    return ways[int(rng.integers(len(ways)))].view(type(value))
