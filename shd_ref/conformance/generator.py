"""Valid calls of every operation, drawn by seed: options, sizes, contents and dtypes crossed.

What can differ between two calls is a *factor* with a few *levels*: an option and its values, which axis is long,
what a map holds, in which dtype arrays come. ``covering_rows`` chooses levels so that every two of them meet in
some row; ``draw_call`` makes one call of a row. Nothing here knows an answer: ``sessions.py`` asks the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.tolerances import load_tolerances, row_sum_tolerance

Array: TypeAlias = NDArray[Any]
Levels: TypeAlias = Mapping[str, str]
Inputs: TypeAlias = dict[str, Any]

# Levels by name. An absent option is the level "-"; words of the text are their own values; of everything else a
# function below knows what it means.
_LEVELS = """
ROWS - some lengths sample none all
KEYS - full head sample matrix keys rows
SUMS - one at_most_one
TEMPERATURE - one soft sharp far near numpy
RULE - least_squares as_printed
PLAN - progressive balanced rounds numpy
LAYERS - one two three many
MAPS dense exact onehot peaked tiny near causal zeros garbage off target
NUMBERS - scaled alike bias whole vanishing
LOGITS - large masked empty floor shifted tied
SIZE - B H L S D LS equal
"""
# Factors that several operations share, and the operations; a factor is NAME=LEVELS, or the name of a group.
_FACTORS = """
ARRAYS dtype=-,-,single,half,mixed,unsigned,signed layout=-,-,odd
TEACHER size=SIZE maps=MAPS numbers=NUMBERS ARRAYS
SIDE layers=LAYERS size=SIZE maps=MAPS ARRAYS
LOSS beta=-,zero,number,numpy loss_mask=ROWS attn_mask=KEYS temperature=TEMPERATURE reduction=-,sum,mean divergence=-,kl,reverse_kl,js,mse support=-,error,intersect row_sums=SUMS
TARGET groups=-,one,two,three block_size=-,one,two,three,beyond attn_mask=-,sample,matrix,rows,keys,none segments=-,packed,returning,odd outside=-,numbers,nothing,far,mixed layers=-,one,two,three teacher_scale=-,negative,large,zero,numpy size=SIZE numbers=-,scaled,whole,alike ARRAYS
INDEXER weights=-,any,positive,zeros relu=-,yes,no top_k=-,none,one,two,three,most,beyond restriction=-,renormalised,mask_first,unnormalised,student_all reduction=-,sum,rows,samples loss_mask=ROWS scale=-,negative,large,zero,small scores=-,tied,wide TARGET
softmax attn_mask=KEYS temperature=TEMPERATURE logits=LOGITS size=SIZE axes=-,2,3,5 ARRAYS
value_outputs size=SIZE numbers=NUMBERS kv=-,one,some,all ARRAYS
merge_plan kind=PLAN size=-,H,equal counts=-,numpy
solve_alpha query_mask=ROWS rule=RULE row_sums=SUMS TEACHER
mix_heads mixing=-,one,onehot,off,mixed size=SIZE maps=MAPS sums=-,at_most_one ARRAYS
squeeze_heads plan=PLAN strategy=-,shd,constant,hard,mean query_mask=ROWS temperature=TEMPERATURE alpha_rule=RULE alpha_from=-,teacher,softened row_sums=SUMS heads=-,all,one,many TEACHER
shd_loss LOSS logits=LOGITS SIDE
soften row_sums=SUMS temperature=one,soft,sharp,far,near,numpy size=SIZE maps=MAPS axes=-,2,3,5 ARRAYS
plan_groups plan=progressive,balanced,rounds,numpy size=-,H,equal counts=-,numpy
compose_mixing plan=progressive,balanced,rounds,numpy size=-,B,H alphas=-,ends,exact ARRAYS
shd_loss_gradient LOSS logits=LOGITS SIDE
shd_loss_gradient_qk LOSS scale=-,negative,large,zero,numpy kv=-,one,all numbers=-,whole SIDE
intersect_support loss_mask=ROWS attn_mask=KEYS row_sums=SUMS logits=LOGITS size=SIZE maps=MAPS ARRAYS
layer_map pairs=-,some,all,none,numpy size=-,H,equal counts=-,numpy
align_tokens rows=-,some,all,one,none columns=-,some,all,one,none query_mask=ROWS row_sums=SUMS size=SIZE maps=MAPS ARRAYS
gram_tensor query_mask=ROWS row_sums=SUMS kv=-,one,all TEACHER
solve_alpha_from_gram size=-,B,H gram=-,near,exact,target,scaled,below,edge counts=-,numpy ARRAYS
merge_gram size=-,B,H gram=-,exact,scaled,any alphas=-,ends counts=-,numpy ARRAYS
matched_plan by=-,residual,similarity row_sums=SUMS items=-,two,three query_mask=-,some,sample,first heads=-,all,one,many TEACHER
diagnose plan=PLAN strategies=-,one,two,all,tuple query_mask=ROWS row_sums=SUMS heads=-,all,one TEACHER
indexer_target TARGET
indexer_loss INDEXER
indexer_loss_gradient INDEXER
"""  # noqa: E501 (a table)


def _read_factors() -> dict[str, dict[str, tuple[str, ...]]]:
    """By operation, the levels of each factor, "" for "-"."""
    levels = {name: words for name, *words in map(str.split, _LEVELS.strip().splitlines())}
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, *parts in map(str.split, _FACTORS.strip().splitlines()):
        found[name] = {}
        for factor, _, words in (part.partition("=") for part in parts):
            named = levels.get(words, words.split(","))
            found[name] |= {factor: tuple(word.strip("-") for word in named)} if words else found[factor]
    return {name: factors for name, factors in found.items() if name.islower()}


FACTORS = _read_factors()
"""By operation, what can differ between two calls, and how."""


def covering_rows(
    factors: Mapping[str, Sequence[str]], rng: np.random.Generator, width: int = 24
) -> list[dict[str, str]]:
    """Rows of levels in which every two levels of two factors meet; greedy, the best of ``width`` candidates.

    A candidate starts from two levels that have not met yet, so that each row covers something new.
    """
    names = list(factors)
    sizes = np.array([len(factors[name]) for name in names])
    groups = np.array(list(combinations(range(len(names)), min(2, len(names)))))
    spans = np.prod(sizes[groups], axis=1)
    offsets = np.concatenate(([0], np.cumsum(spans)[:-1]))
    factor = np.ones_like(groups)
    factor[:, 0] = sizes[groups[:, -1]] if groups.shape[1] > 1 else 1
    todo = np.ones(int(spans.sum()), dtype=bool)
    rows = []
    while len(left := np.flatnonzero(todo)):
        candidates = (rng.random((width, len(names))) * sizes).astype(int)
        for number, cell in enumerate(left[rng.integers(len(left), size=width)]):
            group = int(np.searchsorted(offsets, cell, side="right")) - 1
            candidates[number, groups[group]] = (cell - offsets[group]) // factor[group] % sizes[groups[group]]
        cells = offsets + (candidates[:, groups] * factor).sum(axis=2)
        best = int(np.argmax(todo[cells].sum(axis=1)))
        todo[cells[best]] = False
        rows.append({name: factors[name][level] for name, level in zip(names, candidates[best], strict=True)})
    return rows


_LONG = (6, 7, 9, 16, 17, 18, 33, 64, 65, 67, 70, 129, 131, 260)
_BITS = {"float64": 20, "float32": 14, "float16": 8, "bfloat16": 6}  # of maps whose sums of products are exact
_HALVES = ("float16", "bfloat16")


class Draw:
    """The random choices of one call at its levels, in the dtype under judgement."""

    def __init__(self, key: Sequence[int], dtype: str, levels: Levels, shapes: Sequence[int] = ()) -> None:
        self.rng, self.dtype, self.levels = np.random.default_rng(key), dtype, levels
        # Sizes have a stream of their own, so that calls may share their shapes: some subjects compile for each.
        self.shapes = np.random.default_rng(shapes) if shapes else self.rng
        self.axis = self.level("size")
        self.long_left = 2 if self.axis == "LS" else 1
        self.same = int(self.shape((2, 3, 4)))
        self.exact = self.level("maps") == "exact" or "exact" in (self.level("gram"), self.level("alphas"))
        # Of options that are neither words nor arrays.
        self.temperature = self.of(
            "temperature",
            one=(1, 1.0),
            soft=(2, 3.7, 1.25),
            sharp=(0.5, 0.75, 0.05),
            far=(150.0, 0.01, 1e4),
            near=(1.04, 0.97, 1.001),
            numpy=(np.float32(2), np.int64(3), np.float64(0.3)),
        )

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

    def of(self, name: str, **values: Sequence[Any]) -> Any:
        """A value for the level of a factor: one of those listed for it, the level itself, or None where it is ""."""
        level = self.level(name)
        return self.pick(values[level]) if level in values else level or None

    def given(self, **options: Any) -> Inputs:
        """Those of these options whose level says that the call gives them."""
        return {name: value for name, value in options.items() if self.level(name)}

    def size(self, axis: str, most: int = 260) -> int:
        """The size of an axis, long where this call has it long."""
        if self.axis == "equal":
            return min(self.same, most)
        if self.axis and axis in (self.axis if self.axis != "LS" else ("L", "S")) and self.long_left:
            self.long_left -= 1
            sizes = [n for n in _LONG if n <= (most if self.axis != "LS" else min(most, 131))]
            return int(self.shape(sizes[-8:] if self.shapes.random() < 0.7 else sizes))
        return int(self.shape((1, 2, 2, 3, 3, 4, 5) if self.axis in ("", "D") else (1, 2, 2, 3)))

    def store(self, array: Any, *, whole: bool = False) -> Array:
        """Numbers in the dtype that the call gives them in; ``whole`` where they are integers already."""
        kind = self.level("dtype")
        kind = self.pick(("", "single", "half")) if kind == "mixed" else kind
        if whole and kind in ("unsigned", "signed"):
            kinds = (
                ("uint8", "uint8", "uint16", "uint32", "uint64")
                if kind == "unsigned"
                else ("int8", "int16", "int32", "int64")
            )
            return np.asarray(array).astype(self.pick(kinds))
        if kind in ("single", "half") and self.dtype in ("float64", "float32"):
            return np.asarray(array, np.float64).astype(np.float32 if kind == "single" else np.float16).view(OwnDtype)
        return round_to(np.asarray(array, np.float64), self.dtype)

    @property
    def coarse(self) -> bool:
        """Whether some array comes in half precision, so that maps must be sums of few powers of two."""
        return self.dtype in _HALVES or self.level("dtype") in ("half", "mixed")

    # --- arrays ---------------------------------------------------------------------------------------------------

    def maps(
        self, *shape: int, counted: Array | None = None, allowed: Array | None = None, positive: bool = False
    ) -> Array:
        """Attention maps ``(..., L, S)``: anything in rows not ``counted``, nothing on keys not ``allowed``."""
        rng, kind = self.rng, self.level("maps")
        if self.level("dtype") in ("unsigned", "signed"):
            kind = "onehot"
        weights = rng.random(shape) + 1e-3
        if kind == "peaked":
            weights **= 12
        elif kind == "onehot":
            weights = np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]
        elif kind == "tiny":
            weights[..., 0] *= 2.0 ** -self.pick((12, 24, 28, 40, 100, 300))
        elif kind == "causal":
            weights = np.where(np.tri(shape[-2], shape[-1], k=max(0, shape[-1] - shape[-2])), weights, 0.0)
        if kind == "zeros" or self.chance(0.15):
            weights = np.where(rng.random(shape) < 0.3, 0.0, weights)
        if kind == "near" and len(shape) == 4 and shape[1] > 1:
            for first in range(0, shape[1] - 1, 2):
                # Distances on both sides of the threshold of ALPHA-6, and none.
                away = self.pick((0, 0, 1e-2, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7)) if self.chance(0.7) else 1.0
                weights[:, first + 1] = weights[:, first] + (weights[:, first + 1] - weights[:, first]) * away
        if positive:
            weights = weights + 0.05
        if allowed is not None:
            weights = np.where(allowed, weights, 0.0)
        maps = self._normalised(weights, positive)
        if kind == "exact" and len(shape) == 4 and shape[1] > 1 and self.chance(0.6):
            self._move_units(maps)
        if kind == "zeros":
            maps[rng.random(shape[:-1]) < 0.3] = 0.0
        if "at_most_one" in (self.level("row_sums"), self.level("sums")):
            mass = (
                rng.random(shape[:-1]) ** self.pick((1, 1, 8, 40))
                if not self.coarse
                else 2.0 ** -rng.integers(0, 3, size=shape[:-1])
            )
            if self.dtype != "float64" or self.level("dtype"):  # squares of smaller masses vanish in float32
                mass = np.maximum(mass, 2.0**-18)
            maps *= np.where(rng.random(shape[:-1]) < 0.3, 1.0, mass)[..., None]
            if self.dtype == "float64" and self.level("dtype") == "" and self.chance(0.15):
                maps *= 2.0 ** -self.pick((30, 70, 100))  # next to nothing everywhere
        if kind == "off" and not self.coarse:
            maps *= 1 + self.pick((-0.9, -0.3, 0.3, 0.9)) * row_sum_tolerance(
                "float32" if self.level("dtype") == "single" else self.dtype
            )
        if counted is not None and (kind == "garbage" or self.chance(0.2)):
            odd = rng.integers(0, 9, size=shape) * self.pick(
                (0.0, 0.25, 1.0, 8.0, 2.0**-80 if self.dtype == "float64" and not self.level("dtype") else 0.5)
            )
            maps = np.where(np.broadcast_to(counted[:, None, :, None], shape), maps, np.minimum(odd, 200.0))
        if self.level("dtype") in ("unsigned", "signed") and (maps == np.floor(maps)).all():
            return self.store(maps, whole=True)
        return self.store(maps)

    def _normalised(self, weights: Array, positive: bool) -> Array:
        """Rows that sum to one; to exactly one, in few bits, where the content is exact or an array is coarse."""
        totals = weights.sum(axis=-1, keepdims=True)
        if not (self.exact or self.coarse):
            return np.asarray(np.where(totals > 0, weights / np.where(totals > 0, totals, 1.0), 0.0))
        units = 2 ** (min(_BITS[self.dtype], 8) if self.coarse else self.pick((8, _BITS[self.dtype])))
        units = (
            max(units, 2 ** int(np.ceil(np.log2(weights.shape[-1] + 1))))
            if positive and self.dtype not in _HALVES
            else units
        )
        least = (weights > 0) * 1.0 if positive and weights.shape[-1] < units else np.zeros_like(weights)
        free = units - least.sum(axis=-1, keepdims=True)
        counts = least + np.floor(free * weights / np.where(totals > 0, totals, 1.0))
        counts[..., 0] += 0.0
        missing = np.where(totals > 0, units - counts.sum(axis=-1, keepdims=True), 0.0)
        rank = np.cumsum(weights > 0, axis=-1)
        holders = np.maximum((weights > 0).sum(axis=-1, keepdims=True), 1)
        counts += (weights > 0) * (np.floor(missing / holders) + (rank <= missing % holders))
        return np.asarray(counts / units)

    def _move_units(self, maps: Array) -> None:
        """Head 1 is head 0 but for single units of some rows: exact, and near the threshold of ALPHA-6."""
        maps[:, 1] = maps[:, 0]
        unit = 2.0 ** -(
            min(_BITS[self.dtype], 8)
            if self.coarse
            else self.pick((_BITS[self.dtype], 18 if self.dtype != "float32" else 16))
        )
        holder = maps[:, 1].argmax(axis=-1)
        for b, row in np.ndindex(*holder.shape):
            key, other = holder[b, row], int(self.rng.integers(maps.shape[-1]))
            if other != key and maps[b, 1, row, key] >= 2 * unit and maps[b, 1, row, other] > 0 and self.chance(0.5):
                maps[b, 1, row, key] -= unit
                maps[b, 1, row, other] += unit

    def numbers(self, *shape: int, scaled: bool = True) -> Array:
        """Real numbers, for value outputs, values, queries and keys."""
        rng, kind = self.rng, self.level("numbers")
        if self.exact or kind == "whole" or self.level("dtype") in ("unsigned", "signed"):
            high = {"unsigned": 250, "signed": 120}.get(self.level("dtype"), 5)
            high = 5 if self.exact else self.pick((5, high))
            whole = rng.integers(0 if self.level("dtype") == "unsigned" else -high, high, size=shape)
            return self.store(whole, whole=True)
        numbers = rng.normal(size=shape)
        if kind == "scaled" and scaled:
            fine = not self.coarse and self.level("dtype") == ""
            powers = {"float64": (-200, -30, 24, 200), "float32": (-30, 24)}.get(self.dtype, (-3, 3))
            numbers = numbers * 2.0 ** self.pick(powers if fine else (-3, 3))
            if self.chance(0.5) and fine:
                numbers = numbers * 2.0 ** rng.integers(-14, 14, size=(shape[0],) + (1,) * (len(shape) - 1))
        elif kind == "bias":
            numbers = numbers + rng.normal(size=(*shape[:-2], 1, shape[-1])) * self.pick((1, 100))
        elif kind == "alike" and shape[-1] > 1 and self.chance(0.4):  # features that nearly depend on each other
            numbers[..., -1] = numbers[..., 0] + 10.0 ** -self.pick((3, 5, 6)) * numbers[..., -1]
        elif kind == "alike" and len(shape) == 4 and shape[1] > 1:
            i, j = rng.permutation(shape[1])[:2]
            numbers[:, j] = self.pick((1, -1, 0, 2)) * numbers[:, i] + self.pick((0, 0, 1e-2)) * numbers[:, j]
        elif kind == "vanishing" and len(shape) == 4:
            numbers[rng.random(shape[0]) < 0.7] = 0.0
        return self.store(numbers)

    def outputs(self, maps: Array, width: int) -> Array:
        """Value outputs ``(B, H, S, D)`` for these maps; of "target" the alphas lie where something turns."""
        shape = (maps.shape[0], maps.shape[1], maps.shape[3], width)
        outputs = self.numbers(*shape)
        if (
            self.level("maps") not in ("target", "exact")
            or outputs.dtype.kind != "f"
            or (self.exact and self.chance(0.4))
        ):
            return outputs
        both = np.asarray(outputs, np.float64) * (4 if self.exact else 1)
        for first in range(0, shape[1] - 1, 2):
            shares = self.rng.integers(-2, 7, size=shape[0]) / 4.0 if self.exact else self.alphas(shape[0], near=True)
            share = np.asarray(shares)[:, None, None]
            both[:, first + 1], both[:, first] = (1 - share) * both[:, first], share * both[:, first]
        return self.store(both)

    def alphas(self, *shape: int, near: bool = False) -> Array:
        """Alphas in [0, 1], or on both sides of 0, 1/2 and 1 at distances from the tolerance of alpha on."""
        if not near:
            return self.rng.random(shape)
        tolerance = float(load_tolerances()["agreement"][self.dtype]["alpha"]["atol"])
        away = np.where(
            self.rng.random(shape) < 0.6,
            tolerance * (1.2 + 2 * self.rng.random(shape)),
            10.0 ** -self.rng.uniform(1, 6, size=shape),
        )
        return np.asarray(self.rng.choice([0.0, 1.0, 0.5], size=shape) + self.rng.choice([-1, 1], size=shape) * away)

    def logits(self, *shape: int, lowest: float = float(np.finfo(np.float32).min)) -> Array:
        """Logits ``(..., L, S)``, -inf where a key is masked, or as low as ``lowest``."""
        rng, kind = self.rng, self.level("logits")
        logits = rng.normal(size=shape) * (
            self.pick((5, 30, 300, 3e4)[: 3 if self.coarse else 4]) if kind == "large" else 1
        )
        if kind == "tied" or self.exact:
            logits = np.round(logits * 2) / 2
        elif kind == "floor":
            lowest = -6e4 if self.coarse else lowest
            lowest *= min(1.0, 0.5 * float(self.temperature or 2))
            logits = np.where(rng.random(shape) < 0.3, lowest * self.pick((1, 0.5, 0.1)), logits)
        elif kind == "shifted":
            logits = logits + rng.choice(
                [-1e4, -1e9, 1e3, 1e4] if not self.coarse else [-1e3, 1e3], size=(*shape[:-1], 1)
            )
        if self.level("dtype") in ("unsigned", "signed"):
            return self.store(np.abs(np.round(logits * 3)).clip(0, 100), whole=True)
        if kind in ("masked", "empty"):
            logits = np.where(rng.random(shape) < self.pick((0.2, 0.6)), -np.inf, logits)
        if kind == "empty":
            logits[rng.random(shape[:-1]) < 0.4] = -np.inf
        return self.store(logits)

    def row_mask(self, name: str, batch: int, rows: int) -> Array | None:
        """``query_mask`` or ``loss_mask`` at its level, ``(B, L)``."""
        level, rng = self.level(name), self.rng
        if not level:
            return None
        mask: Array = rng.random((batch, rows)) < float(self.pick((0.5, 0.8)))
        if level == "lengths":
            mask = np.arange(rows)[None] < rng.integers(1, rows + 1, size=(batch, 1))
        elif level == "sample":
            mask[int(rng.integers(batch))] = False
        elif level in ("none", "all"):
            mask[:] = level == "all"
        return mask

    def key_mask(self, shape: tuple[int, ...]) -> Array | None:
        """``attn_mask`` at its level, for logits of this shape."""
        level, ones = self.level("attn_mask"), (1,) * (len(shape) - 3)
        shapes = {
            "": None, "full": shape, "none": shape, "head": (*ones, *shape[-3:]),
            "sample": (shape[0], *(1,) * (len(shape) - 2), shape[-1]),
            "matrix": shape[-2:], "keys": shape[-1:], "rows": (*shape[:-1], 1),
        }  # fmt: skip
        wanted = shapes[level]
        if wanted is None:
            return None
        mask: Array = self.rng.random(wanted) < float(self.pick((0.5, 0.8, 0.95)))
        if level == "matrix" and self.chance(0.5):
            mask = np.tri(*wanted, dtype=bool) if wanted[0] > 1 else mask
        if level == "none":
            mask[self.rng.random(wanted[:-1]) < 0.5] = False
        return mask

    # --- plans ----------------------------------------------------------------------------------------------------

    def heads(self, most: int = 131) -> tuple[int, int]:
        """Teacher's and student's heads."""
        teacher = self.size("H", most)
        if teacher < 5 and self.axis not in ("equal", "B", "L", "S", "LS") and self.shapes.random() < 0.6:
            teacher = min(most, int(self.shape((4, 5, 6, 7, 8, 9, 12, 16, 18, 19))))
        return teacher, {"all": teacher, "one": 1, "many": max(1, teacher - 1)}.get(
            self.level("heads"), int(self.shapes.integers(1, teacher + 1))
        )

    def plan(self, heads: int, students: int, name: str = "plan") -> Any:
        """A kind of plan, or explicit rounds that leave this many heads."""
        level = self.level(name)
        if level in ("", "progressive", "balanced"):
            return level or "progressive"
        rounds = []
        while heads > students:
            count = int(self.rng.integers(1, min(heads // 2, heads - students) + 1))
            rounds.append(self.rng.permutation(heads)[: 2 * count].reshape(-1, 2))
            heads -= count
        if level == "numpy":
            return [[tuple(pair) for pair in one.astype(self.pick(("int64", "uint8", "int32")))] for one in rounds]
        as_lists = [one.tolist() for one in rounds]
        return as_lists if self.chance(0.7) else tuple(tuple(map(tuple, one)) for one in as_lists)

    def count(self, number: int) -> Any:
        """A whole number, of NumPy's kinds where the level says so."""
        if self.level("counts") != "numpy":
            return number
        kinds = [
            kind for kind in ("int8", "uint8", "int16", "int32", "int64", "uint64") if number <= np.iinfo(kind).max
        ]
        return np.dtype(self.pick(kinds[:3])).type(number)


class OwnDtype(np.ndarray[Any, np.dtype[Any]]):
    """A float array in a dtype of its own, not the one under judgement; an adapter leaves it in that dtype."""


def round_to(array: Array, dtype: str) -> Array:
    """A copy rounded to a dtype: float64, or float32 that holds only numbers of it, since NumPy has no bfloat16."""
    if dtype != "bfloat16":
        kept = array.astype(dtype)
        return kept if dtype == "float64" else kept.astype(np.float32)
    # bfloat16 is the upper half of a float32: round to nearest, ties to even.
    single = np.ascontiguousarray(array, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


# --- the operations -----------------------------------------------------------------------------------------------


def _shape(d: Draw) -> tuple[int, ...]:
    """Of logits or maps with any leading axes."""
    lead = ("H", "B", "H")[-(int(d.level("axes") or 4) - 2) :] if d.level("axes") != "2" else ()
    return (*(d.size(axis) for axis in lead), d.size("L"), d.size("S"))


def _softmax(d: Draw) -> Inputs:
    shape = _shape(d)
    return {"attn_logits": d.logits(*shape), **d.given(attn_mask=d.key_mask(shape), temperature=d.temperature)}


def _soften(d: Draw) -> Inputs:
    return {"attn_probs": d.maps(*_shape(d)), "temperature": d.temperature, **d.given(row_sums=d.of("row_sums"))}


def _projected(d: Draw, heads: int, width: int, most: int = 40) -> Inputs:
    """Values ``(B, H_kv, S, d_v)`` and an output projection."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    kv = {"one": 1, "all": heads}.get(d.level("kv"), d.shape(divisors))
    batch, keys, out = d.size("B"), d.size("S"), d.size("D", most)
    return {
        "values": d.numbers(batch, kv, keys, width),
        "output_projection": d.numbers(heads * width, out, scaled=False),
    }


def _value_outputs(d: Draw) -> Inputs:
    return _projected(d, max(d.size("H", 131), d.shape((1, 2, 4, 6))), d.shape((1, 2, 3)), 260)


def _merge_plan(d: Draw) -> Inputs:
    heads = d.pick((64, 65, 70, 100, 131, 200)) if d.axis == "H" else d.pick((*range(1, 41), 48))
    students = heads if d.axis == "equal" else int(d.rng.integers(1, heads + 1))
    return {
        "num_teacher_heads": d.count(heads), "num_student_heads": d.count(students),
        **d.given(kind=d.plan(heads, students, "kind")),
    }  # fmt: skip


def _explicit(d: Draw, most: int = 131) -> tuple[int, Any]:
    """Heads, and rounds of a plan as a caller has them."""
    from shd_ref import merge_plan

    heads, students = d.heads(most)
    heads, students = max(heads, 2), min(students, max(heads, 2) - d.chance(0.95))
    plan = d.plan(heads, students) or "progressive"
    return heads, merge_plan(heads, students, plan) if isinstance(plan, str) else plan


def _plan_groups(d: Draw) -> Inputs:
    heads, plan = _explicit(d)
    return {"plan": plan if plan is not None else [], "num_teacher_heads": d.count(heads)}


def _compose_mixing(d: Draw) -> Inputs:
    heads, plan = _explicit(d)
    batch, alphas = d.size("B"), []
    for one in plan or ():
        alpha = d.alphas(batch, len(one))
        alpha = (
            np.round(alpha)
            if d.level("alphas") == "ends"
            else np.round(alpha * 8) / 8
            if d.exact or d.coarse
            else alpha
        )
        alphas.append(d.store(alpha, whole=bool((alpha == np.round(alpha)).all())))
    return {"alphas": alphas, "plan": plan or [], "num_teacher_heads": d.count(heads)}


def _teacher(
    d: Draw, heads: int, most: int = 260, width: int = 131, *, masked: bool = True
) -> tuple[Array, Array, Array | None]:
    """Maps, value outputs and ``query_mask`` of a teacher."""
    batch, rows, keys = d.size("B", min(most, 131)), d.size("L", most), d.size("S", most)
    counted = d.row_mask("query_mask", batch, rows) if masked else None
    maps = d.maps(batch, heads, rows, keys, counted=counted)
    return maps, d.outputs(maps, d.size("D", width)), counted


def _solve_alpha(d: Draw) -> Inputs:
    maps, outputs, counted = _teacher(d, 2)
    pair = {
        f"{name}_{side}": array[:, number].copy()
        for name, array in (("probs", maps), ("value_outputs", outputs))
        for number, side in enumerate("pq")
    }
    pair = {name: array.view(type(maps)) for name, array in pair.items()}
    return {**pair, **d.given(query_mask=counted, rule=d.of("rule"), row_sums=d.of("row_sums"))}


def _mix_heads(d: Draw) -> Inputs:
    heads, students = d.heads()
    batch, rows, keys = d.size("B"), d.size("L"), d.size("S")
    if d.axis == "equal":
        students = heads
    weights = d.rng.random((batch, students, heads)) ** d.pick((1, 6))
    kind = d.level("mixing")
    if kind in ("one", "onehot") or d.coarse or d.exact:
        weights = np.eye(heads)[d.rng.integers(heads, size=(batch, students))]
        if kind != "onehot" and heads > 1:
            weights = (weights + np.roll(weights, 1, axis=-1)) / 2
    mixing = weights / weights.sum(axis=2, keepdims=True)
    if kind == "off" and not d.coarse and d.level("dtype") == "":
        mixing *= 1 + d.pick((-0.9, 0.9)) * row_sum_tolerance(d.dtype)
    return {"teacher_probs": d.maps(batch, heads, rows, keys), "mixing": d.store(mixing)}


def _squeeze_heads(d: Draw) -> Inputs:
    heads, students = d.heads()
    maps, outputs, counted = _teacher(d, heads, 260 if heads < 20 else 9)
    words = {name: d.of(name) for name in ("strategy", "alpha_rule", "alpha_from", "row_sums")}
    options = d.given(plan=d.plan(heads, students), query_mask=counted, temperature=d.temperature, **words)
    return {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": students, **options}


def _layer_list(d: Draw, arrays: Sequence[Any]) -> Any:
    """One array, or a list with one a layer."""
    return list(arrays) if d.level("layers") else arrays[0]


def _num_layers(d: Draw) -> int:
    return {"two": 2, "three": 3, "many": int(d.shape((4, 5, 7)))}.get(d.level("layers"), 1)


def _loss_options(d: Draw, shapes: Sequence[tuple[int, ...]]) -> Inputs:
    batch, _, rows, _ = shapes[0]
    words = {name: d.of(name) for name in ("reduction", "divergence", "support", "row_sums")}
    beta = d.of("beta", zero=(0, 0.0), number=(2.5, 3, 0.3), numpy=(np.float32(0.5), np.int64(2)))
    mask = d.key_mask(shapes[0])
    return d.given(
        beta=beta, loss_mask=d.row_mask("loss_mask", batch, rows), attn_mask=mask, temperature=d.temperature, **words
    )


def _sides(d: Draw, most: int = 260) -> list[tuple[int, ...]]:
    """The shape of each layer; heads differ where no mask says otherwise."""
    batch, rows, keys = d.size("B", most), d.size("L", most), d.size("S", most)
    vary = d.level("attn_mask") not in ("full", "head", "rows")
    heads = d.size("H", 131)
    return [
        (batch, heads if not (vary and layer) else d.shape((1, 2, 3)), rows, keys) for layer in range(_num_layers(d))
    ]


def _supervision(d: Draw, shape: tuple[int, ...], options: Inputs, logits: Any) -> Array:
    """Maps that have mass where the student may attend, mostly."""
    may = np.ones(shape, bool) if logits is None else ~np.isneginf(np.asarray(logits, np.float64))
    if options.get("attn_mask") is not None:
        may = may & np.broadcast_to(options["attn_mask"], shape)
    reverse = options.get("divergence") == "reverse_kl"
    if logits is not None and options.get("row_sums") == "at_most_one" and d.chance(0.2):
        # The student's own map with less mass: a divergence below zero.
        odds = np.where(may, np.exp(np.clip(np.asarray(logits, np.float64), -30, 30)), 0.0)
        return d.store(0.5 * odds / np.maximum(odds.sum(axis=-1, keepdims=True), 1e-30))
    fitting = d.chance(0.93) and (reverse or options.get("support") != "intersect" or d.chance(0.3))
    return d.maps(*shape, counted=options.get("loss_mask"), allowed=may if fitting else None, positive=reverse)


def _shd_loss(d: Draw) -> Inputs:
    shapes = _sides(d)
    options, logits = _loss_options(d, shapes), [d.logits(*shape, lowest=-1e30) for shape in shapes]
    maps = [_supervision(d, shape, options, z) for shape, z in zip(shapes, logits, strict=True)]
    return {"supervision": _layer_list(d, maps), "student_logits": _layer_list(d, logits), **options}


def _shd_loss_gradient_qk(d: Draw) -> Inputs:
    shapes, width = _sides(d, 131), d.pick((1, 2, 3, 4))
    options, queries, keys = _loss_options(d, shapes), [], []
    for batch, heads, rows, num_keys in shapes:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        kv = {"one": 1, "all": heads}.get(d.level("kv"), d.pick(divisors))
        queries.append(d.numbers(batch, heads, rows, width, scaled=False))
        keys.append(d.numbers(batch, kv, num_keys, width, scaled=False))
    maps = [_supervision(d, shape, options, None) for shape in shapes]
    scale = d.of(
        "scale", negative=(-1.5, -0.25), large=(8.0, 30), zero=(0, 0.0), numpy=(np.float32(0.25), np.int64(1))
    )
    arrays = {"supervision": maps, "queries": queries, "keys": keys}
    return {
        **{name: _layer_list(d, value) for name, value in arrays.items()},
        "scale": 0.5 if scale is None else scale,
        **options,
    }


def _intersect_support(d: Draw) -> Inputs:
    shape = _sides(d)[0]
    logits = d.logits(*shape)
    options = d.given(
        loss_mask=d.row_mask("loss_mask", shape[0], shape[2]), attn_mask=d.key_mask(shape), row_sums=d.of("row_sums")
    )
    return {"supervision": d.maps(*shape, counted=options.get("loss_mask")), "student_logits": logits, **options}


def _layer_map(d: Draw) -> Inputs:
    students = int(d.pick(range(1, 13)))
    teachers = (
        int(d.pick((10**6, 2**31 + 1, 10**9 + 3)))
        if d.axis == "H" and d.level("counts") == ""
        else int(d.rng.integers(students, 127))
    )
    students = teachers if d.axis == "equal" else students
    out: Inputs = {"num_teacher_layers": d.count(teachers), "num_student_layers": d.count(students)}
    chosen = d.rng.permutation(students)[
        : students if d.level("pairs") == "all" else int(d.rng.integers(1, students + 1))
    ]
    pairs = [(int(layer), int(d.rng.integers(teachers))) for layer in chosen]
    if d.level("pairs") == "numpy":
        pairs = [(np.int64(s), np.int64(t)) for s, t in pairs]  # type: ignore[misc]
    return {**out, **d.given(pairs=None if d.level("pairs") == "none" else pairs)}


def _align_tokens(d: Draw) -> Inputs:
    batch, heads, rows, keys = d.size("B"), d.size("H", 131), d.size("L"), d.size("S")
    counted, kept = d.row_mask("query_mask", batch, rows), {}
    for name, size in (("rows", rows), ("columns", keys)):
        order = d.rng.permutation(size)
        number = {"all": size, "one": 1}.get(d.level(name), int(d.rng.integers(1, size + 1)))
        kept[name] = None if d.level(name) == "none" else order[:number].tolist()
    return {
        "attn_probs": d.maps(batch, heads, rows, keys, counted=counted),
        **d.given(**kept, query_mask=counted, row_sums=d.of("row_sums")),
    }


def _gram_tensor(d: Draw) -> Inputs:
    heads = d.size("H", 7)
    values = _projected(d, heads, d.pick((1, 2, 3)))
    batch, _, keys, _ = values["values"].shape
    rows = d.size("L", 131)
    counted = d.row_mask("query_mask", batch, rows)
    return {
        "teacher_probs": d.maps(batch, heads, rows, keys, counted=counted),
        **values,
        **d.given(query_mask=counted, row_sums=d.of("row_sums")),
    }


def _gram(d: Draw) -> Inputs:
    """A gram tensor of a pool, and two of its heads."""
    heads, batch = max(2, d.size("H", 9)), d.size("B")
    rows, keys, width, kind = d.pick((1, 2, 3)), d.pick((2, 3, 4)), d.pick((1, 2, 3)), d.level("gram")
    maps: Array = d.rng.random((batch, heads, rows, keys))
    outputs: Array = d.rng.normal(size=(batch, heads, keys, width))
    maps /= maps.sum(axis=-1, keepdims=True)
    p, q = (int(i) for i in d.rng.permutation(heads)[:2])
    if kind == "near":
        maps[:, q] = maps[:, p] + (maps[:, q] - maps[:, p]) * d.pick((0, 1e-2, 1e-3))
    elif kind == "target":
        share = d.alphas(batch, near=True)[:, None, None]
        outputs[:, p], outputs[:, q] = share * outputs[:, p], (1 - share) * outputs[:, p]
    elif kind == "scaled":
        outputs *= 2.0 ** (d.pick((-40, -3, 20)) if d.dtype == "float64" else d.pick((-4, 4)))
        outputs *= 2.0 ** d.rng.integers(-6, 6, size=(batch, 1, 1, 1)) if d.dtype == "float64" else 1.0
    if kind in ("exact", "below") or d.coarse or d.level("dtype") in ("unsigned", "signed"):
        low = 0 if d.level("dtype") == "unsigned" else -3
        maps, outputs = d.rng.integers(0, 2, size=maps.shape), d.rng.integers(low, 4, size=outputs.shape)
    if kind == "below":  # what rounding leaves of a norm, on a larger scale
        half = d.rng.integers(-2 if d.level("dtype") != "unsigned" else 0, 3, size=(batch, *(heads,) * 4))
        return {"gram": d.store(half + half.transpose(0, 3, 4, 1, 2), whole=True), "p": d.count(p), "q": d.count(q)}
    products = np.einsum("bils,bjsd->bijld", maps, outputs)
    if kind == "edge" and d.dtype == "float64" and d.level("dtype") == "":
        # Whole numbers without rounding, on both sides of the threshold of ALPHA-6.
        shared = d.rng.integers(2**15, 2**18, size=(batch, 1, heads, rows, width)) * d.rng.integers(
            0, 2, size=(1, 1, heads, 1, 1)
        )
        products = shared + d.rng.integers(-3, 4, size=(batch, heads, heads, rows, width))
        products = products * 2 ** d.rng.integers(0, 7, size=(batch, 1, 1, 1, 1))  # samples of different scale
    gram = np.einsum("bijld,bmnld->bijmn", products, products)
    return {
        "gram": d.store(gram, whole=bool((gram == np.round(gram)).all() and np.abs(gram).max() < 120)),
        "p": d.count(p),
        "q": d.count(q),
    }


def _merge_gram(d: Draw) -> Inputs:
    out = _gram(d)
    alpha = d.alphas(len(out["gram"]))
    alpha = (
        np.round(alpha) if d.level("alphas") == "ends" else np.round(alpha * 8) / 8 if d.exact or d.coarse else alpha
    )
    return {**out, "alpha": d.store(alpha)}


def _matched_plan(d: Draw) -> Inputs:
    heads, students = d.heads(17 if d.axis == "H" else 8)
    items: list[Any] = []
    for number in range({"two": 2, "three": 3}.get(d.level("items"), 1)):
        masked = d.level("query_mask") != "first" or number == 0
        maps, outputs, counted = _teacher(d, heads, 70, 33, masked=masked)
        if counted is not None:
            items.append(d.pick((tuple, list))((maps, outputs, counted)))
        else:
            items.append((maps, outputs))
    return {"calibration": items, "num_student_heads": students, **d.given(by=d.of("by"), row_sums=d.of("row_sums"))}


def _diagnose(d: Draw) -> Inputs:
    heads, students = d.heads(9)
    maps, outputs, counted = _teacher(d, heads, 33, 33)
    names = d.of(
        "strategies",
        one=(["shd"], ["mean"], ["hard"]),
        two=(["hard", "constant"], ["mean", "shd"]),
        all=(["shd", "constant", "hard", "mean"],),
        tuple=(("constant",), ("shd", "hard")),
    )
    options = d.given(plan=d.plan(heads, students), strategies=names, query_mask=counted, row_sums=d.of("row_sums"))
    return {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": students, **options}


def _indexer_target(d: Draw) -> Inputs:
    groups = {"two": 2, "three": 3}.get(d.level("groups"), 1)
    kv = d.pick((1, 1, 2))
    heads = (
        kv * groups * (d.pick((1, 2)) if d.axis != "H" else -(-int(d.pick((5, 9, 17, 33, 66, 129))) // (kv * groups)))
    )
    batch, rows, keys, width = d.size("B", 131), d.size("L", 131), d.size("S"), d.size("D", 40)
    keys = rows if d.level("segments") else keys
    scale = d.of(
        "teacher_scale", negative=(-0.5, -1), large=(30.0, 300), zero=(0, 0.0), numpy=(np.float32(0.25), np.int64(1))
    )
    layers = range(_num_layers(d))
    arrays = {
        "teacher_queries": [d.numbers(batch, heads, rows, width, scaled=False) for _ in layers],
        "teacher_keys": [d.numbers(batch, kv, keys, width, scaled=False) for _ in layers],
    }
    far = {"far": (-1e4, -300.0, 40.0, 500.0, 1e4)}.get(d.level("outside"), (0.0,))
    if d.level("outside"):
        rests = [
            d.rng.normal(size=(batch, heads, rows))
            + d.rng.choice(far, size=(batch, heads, rows) if d.chance(0.5) else ())
            for _ in layers
        ]
        share = {"nothing": 1.0, "mixed": 0.4}.get(d.level("outside"), 0.0)
        arrays["outside"] = [d.store(np.where(d.rng.random(rest.shape) < share, -np.inf, rest)) for rest in rests]
    ids = np.sort(d.rng.integers(0, 3, size=(batch, rows)), axis=1).astype(d.pick(("int64", "int32", "uint8")))
    if d.level("segments") == "returning":
        ids = d.rng.integers(0, 3, size=(batch, rows))
    elif d.level("segments") == "odd":
        ids = np.asarray(d.pick(([5, 2**32 + 5, -1], [2**24, 2**24 + 1, 0], [-7, 2**40, 1])))[
            d.rng.integers(0, 3, size=(batch, rows))
        ]
    block = d.of("block_size", one=(1,), two=(2,), three=(3,), beyond=(keys + 2,))
    options = d.given(groups=groups, block_size=block, attn_mask=d.key_mask((batch, 1, rows, keys)), segments=ids)
    return {
        **{name: _layer_list(d, value) for name, value in arrays.items()},
        "teacher_scale": 0.5 if scale is None else scale,
        **options,
    }


def _indexer_loss(d: Draw) -> Inputs:
    out = _indexer_target(d)
    queries, keys = (
        value[0] if isinstance(value, list) else value for value in (out["teacher_queries"], out["teacher_keys"])
    )
    batch, _, rows, _ = queries.shape
    groups, blocks = out.get("groups", 1), -(-keys.shape[2] // out.get("block_size", 1))
    d.long_left = 1  # the indexer's width may be long as well as the teacher's
    num_keys, width = d.pick((1, 1, 2)), d.size("D", 33)
    heads = (
        num_keys
        * groups
        * (d.pick((1, 2)) if d.axis != "H" else -(-int(d.pick((5, 9, 17, 33, 66))) // (num_keys * groups)))
    )

    def scores(*shape: int) -> Array:
        numbers = d.rng.normal(size=shape) * (8 if d.level("scores") == "wide" else 1)
        if d.level("scores") == "tied" or d.level("dtype") in ("unsigned", "signed"):
            numbers = np.round(numbers).clip(0 if d.level("dtype") == "unsigned" else -2, 2)
        return d.store(numbers, whole=d.level("scores") == "tied")

    weights = scores(batch, heads, rows)
    weights = {"positive": np.abs(weights), "zeros": weights * 0}.get(d.level("weights"), weights)
    scale = d.of("scale", negative=(-0.5, -1, -3.0), large=(16.0, 100), zero=(0, 0.0), small=(2.0**-10, 1e-3))
    options = d.given(
        weights=weights.astype(queries.dtype) if weights.dtype.kind not in "fiu" else weights,
        relu=d.level("relu") == "yes",
        top_k=d.of(
            "top_k",
            none=(None,),
            one=(1,),
            two=(2,),
            three=(3, np.int64(3)),
            most=(max(1, blocks - 1), max(1, blocks // 2)),
            beyond=(blocks + 3,),
        ),
        loss_mask=d.row_mask("loss_mask", batch, rows),
        restriction=d.of("restriction"),
        reduction=d.of("reduction"),
    )
    return {
        "queries": scores(batch, heads, rows, width),
        "keys": scores(batch, num_keys, blocks, width),
        **out,
        "scale": 0.5 if scale is None else scale,
        **options,
    }


_MAKERS: dict[str, Callable[[Draw], Inputs]] = {
    **{name: globals()[f"_{name}"] for name in FACTORS if f"_{name}" in globals()},
    "shd_loss_gradient": _shd_loss,
    "solve_alpha_from_gram": _gram,
    "indexer_loss_gradient": _indexer_loss,
}


def draw_call(operation: str, key: Sequence[int], dtype: str, levels: Levels, shapes: Sequence[int] = ()) -> Inputs:
    """One valid call of an operation, mostly: arguments by name."""
    draw = Draw(key, dtype, levels, shapes)
    inputs = _MAKERS[operation](draw)
    return relay(draw, inputs) if draw.level("layout") == "odd" else inputs


def relay(d: Draw, value: Any) -> Any:
    """The same numbers, lying otherwise in memory (MAP-15)."""
    if isinstance(value, dict):
        return {name: relay(d, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(relay(d, item) for item in value)
    if not isinstance(value, np.ndarray) or value.ndim == 0 or d.chance(0.3):
        return value
    way = d.pick(
        ("fortran", "reversed", "backwards", "strided", "read-only", "unaligned", "transposed", "bytes", "broadcast")
    )
    if way == "fortran":
        return np.asfortranarray(value).view(type(value))
    if way in ("reversed", "backwards"):
        back = (..., slice(None, None, -1)) if way == "reversed" else (slice(None, None, -1),) * value.ndim
        return value[back].copy()[back]
    if way == "strided":
        wide = np.repeat(value, 2, axis=-1)
        wide[..., 1::2] = ~value if value.dtype == bool else 7
        return wide[..., ::2]
    if way == "read-only":
        kept = value.copy()
        kept.flags.writeable = False
        return kept
    if way == "unaligned":
        packed = np.zeros(value.shape, dtype=[("other", np.uint8), ("field", value.dtype)])
        packed["field"] = value
        return packed["field"].view(type(value))
    if way == "bytes" and value.dtype.kind == "f":
        return value.astype(value.dtype.newbyteorder()).view(type(value))
    if way == "broadcast" and (value == value[:1]).all():
        return np.broadcast_to(value[:1], value.shape).view(type(value))
    return value.T.copy().T
