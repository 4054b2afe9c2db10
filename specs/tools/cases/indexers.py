"""Cases of chapter IDX."""

from __future__ import annotations

from typing import Any

import oracle_indexer as oracle
from book import Book, array, book_of, lengths, mask, numbers, special

MAPS = {"rule": "close", "quantity": "probs", "exact_zeros": True}
LOSS = {"rule": "close", "quantity": "loss"}
GRADIENT = {"rule": "close", "quantity": "gradient"}
INF = "-inf"

CAUSAL = mask([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
TEACHER: dict[str, Any] = {
    "teacher_queries": numbers([2, 4, 4, 2], 4001, -8, 8, 2),
    "teacher_keys": numbers([2, 2, 4, 2], 4002, -8, 8, 2),
    "teacher_scale": 0.5,
}
SCORER: dict[str, Any] = {
    "queries": numbers([2, 2, 4, 2], 4003, -8, 8, 2),
    "keys": numbers([2, 1, 4, 2], 4004, -8, 8, 2),
    "weights": numbers([2, 2, 4], 4005, 1, 8, 2),
    "scale": 0.5,
}
OUTSIDE = numbers([2, 4, 4], 4006, -8, 12, 2)
LAYERS: dict[str, Any] = {
    "teacher_queries": [TEACHER["teacher_queries"], numbers([2, 6, 4, 3], 4011, -8, 8, 2)],
    "teacher_keys": [TEACHER["teacher_keys"], numbers([2, 3, 4, 3], 4012, -8, 8, 2)],
    "teacher_scale": 0.5,
}
PACKED = array([[5, 5, 5, 2], [1, 1, 0, 0]], "int64")
ROWS = lengths(4, [3, 2])

_Case = tuple[str, str, str, dict[str, Any]]

TARGETS: tuple[_Case, ...] = (
    ("mean", "the mean of all heads' maps, grouped keys", "IDX-6 GRAD-5", {}),
    ("causal", "keys that may not be attended are exactly 0", "IDX-5 IDX-6 MAP-10", {"attn_mask": CAUSAL}),
    ("mask-per-sample", "a mask with a sample axis, and a row without a key", "IDX-5 IDX-6",
     {"attn_mask": mask([[[[1, 0, 1, 1]] * 3 + [[0, 0, 0, 0]]], [[[0, 1, 0, 1]] * 4]])}),
    ("groups", "two groups of two heads", "IDX-6", {"groups": 2}),
    ("groups-of-one", "every head is a group", "IDX-6", {"groups": 4, "attn_mask": CAUSAL}),
    ("packed", "rows attend to their own segment", "IDX-5", {"segments": PACKED, "attn_mask": CAUSAL}),
    ("outside", "a window or sink in the denominator weighs the heads", "IDX-7",
     {"outside": OUTSIDE, "attn_mask": CAUSAL}),
    ("outside-nothing", "minus infinity stands for nothing, in some heads", "IDX-7",
     {"outside": array([[[INF] * 4, [0] * 4, [INF, 1, INF, 2], [3] * 4]] * 2)}),
    ("outside-tiny", "masses of about 1e-35 and 1e-43 keep their proportion", "IDX-7",
     {"outside": array([[[80] * 4, [96] * 4, [98] * 4, [99] * 4]] * 2), "groups": 2}),
    ("blocks", "blocks of three keys, the last of one", "IDX-4 IDX-9", {"block_size": 3, "attn_mask": CAUSAL}),
    ("one-block", "a block of all keys", "IDX-4 IDX-9", {"block_size": 7}),
    ("layers", "the mean over two layers of different heads and widths", "IDX-8", LAYERS),
    ("a-list-of-one", "a list of one layer", "IDX-8",
     {**{name: [TEACHER[name]] for name in ("teacher_queries", "teacher_keys")}, "outside": [OUTSIDE]}),
    ("everything", "all options together", "IDX-5 IDX-6 IDX-7 IDX-8 IDX-9",
     {**LAYERS, "outside": [OUTSIDE, numbers([2, 6, 4], 4013, -8, 12, 2)], "groups": 2, "block_size": 2,
      "attn_mask": CAUSAL, "segments": PACKED}),
    ("fewer-rows", "L differs from S", "IDX-6",
     {"teacher_queries": numbers([1, 2, 3, 2], 4021, -8, 8, 2),
      "teacher_keys": numbers([1, 1, 5, 2], 4022, -8, 8, 2)}),
)  # fmt: skip

LOSSES: tuple[_Case, ...] = (
    ("dense", "ReLU and weights, all keys", "IDX-1 IDX-2 IDX-12 IDX-14", {}),
    ("causal", "with a causal mask", "IDX-5 IDX-12 IDX-14", {"attn_mask": CAUSAL}),
    ("no-relu", "products as they are", "IDX-2 IDX-14", {"relu": False, "attn_mask": CAUSAL}),
    ("weights-not-given", "weights of one", "IDX-1", {"weights": None}),
    ("keys-of-their-own", "a key head for each head of the scorer", "IDX-1 IDX-14",
     {"keys": numbers([2, 2, 4, 2], 4031, -8, 8, 2), "attn_mask": CAUSAL}),
    ("top-k", "restrict after and renormalise, the default", "IDX-10 IDX-11 IDX-14",
     {"top_k": 2, "attn_mask": CAUSAL}),
    ("mask-first", "the softmax of each head over the selected keys", "IDX-11",
     {"top_k": 2, "restriction": "mask_first", "attn_mask": CAUSAL}),
    ("unnormalised", "restrict after, not divided", "IDX-11 IDX-14", {"top_k": 2, "restriction": "unnormalised"}),
    ("student-all", "the scorer over all keys", "IDX-11 IDX-14",
     {"top_k": 2, "restriction": "student_all", "attn_mask": CAUSAL}),
    ("top-k-of-few", "rows that see fewer keys than k select all", "IDX-10", {"top_k": 3, "attn_mask": CAUSAL}),
    ("top-k-of-all", "more than there are: the dense loss", "IDX-10", {"top_k": 9}),
    ("ties", "scores of 0 where the ReLU is off: the smaller position is selected", "IDX-10 IDX-2",
     {"queries": array([[[[1, 0], [0, -1], [-1, 0], [1, 1]]] * 2] * 2),
      "keys": array([[[[-1, 0], [0, 1], [-1, 1], [1, 0]]]] * 2), "top_k": 2}),
    ("ties-above-zero", "equal scores above 0", "IDX-10",
     {"queries": array([[[[1, 0]] * 4] * 2] * 2),
      "keys": array([[[[2, 0], [1, 0], [1, 5], [1, 0]]]] * 2), "top_k": 2}),
    ("rows", "the mean over rows that count", "IDX-13 IDX-14", {"reduction": "rows", "attn_mask": CAUSAL}),
    ("rows-padded", "padding and rows without a key neither count nor divide", "IDX-12 IDX-13",
     {"reduction": "rows", "loss_mask": ROWS,
      "attn_mask": mask([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])}),
    ("padded", "padding does not count", "IDX-12 IDX-14", {"loss_mask": ROWS}),
    ("samples", "divided by the number of samples", "IDX-13", {"reduction": "samples"}),
    ("samples-empty", "a sample without a row that counts does not divide", "IDX-13",
     {"reduction": "samples", "loss_mask": lengths(4, [3, 0])}),
    ("nothing-counts", "exactly 0", "IDX-12 IDX-13", {"reduction": "rows", "loss_mask": lengths(4, [0, 0])}),
    ("packed", "packed samples", "IDX-5 IDX-13", {"segments": PACKED, "reduction": "samples"}),
    ("packed-padded", "a segment that is padding is no sample", "IDX-5 IDX-13",
     {"segments": PACKED, "reduction": "samples", "loss_mask": ROWS, "attn_mask": CAUSAL, "top_k": 1}),
    ("groups", "a target and a selection for each group", "IDX-1 IDX-6 IDX-10",
     {"groups": 2, "top_k": 2, "reduction": "rows", "attn_mask": CAUSAL}),
    ("outside", "a window or sink in the denominator", "IDX-7", {"outside": OUTSIDE, "attn_mask": CAUSAL}),
    ("outside-mask-first", "the same, over the selected keys alone", "IDX-7 IDX-11",
     {"outside": OUTSIDE, "top_k": 2, "restriction": "mask_first"}),
    ("blocks", "scores of blocks of two keys", "IDX-4 IDX-9",
     {"keys": numbers([2, 1, 2, 2], 4041, -8, 8, 2), "block_size": 2, "attn_mask": CAUSAL}),
    ("blocks-mask-first", "selected blocks of three, the last of one key", "IDX-4 IDX-11",
     {"keys": numbers([2, 1, 2, 2], 4042, -8, 8, 2), "block_size": 3, "top_k": 1, "restriction": "mask_first",
      "attn_mask": CAUSAL}),
    ("layers", "one indexer for two layers", "IDX-8", {**LAYERS, "attn_mask": CAUSAL, "top_k": 3}),
    ("scale-one", "another scale", "IDX-1", {"scale": 1, "teacher_scale": 0.25}),
    ("everything", "all options together", "IDX-1 IDX-2 IDX-7 IDX-8 IDX-10 IDX-11 IDX-13",
     {**LAYERS, "outside": [OUTSIDE, numbers([2, 6, 4], 4013, -8, 12, 2)], "groups": 2, "relu": False, "top_k": 2,
      "restriction": "unnormalised", "reduction": "samples", "segments": PACKED, "loss_mask": ROWS}),
)  # fmt: skip

_NAN = array([[[["nan"] * 2] * 4] * 4] * 2)
_REFUSED_TARGETS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("teacher-scale-nan", "teacher_scale is finite", "IDX-6", "argument-value", {"teacher_scale": special("nan")}),
    ("teacher-scale-boolean", "a boolean is not a number", "IDX-6 ERR-6", "argument-value", {"teacher_scale": True}),
    ("groups-zero", "groups is at least 1", "IDX-6", "argument-value", {"groups": 0}),
    ("groups-fraction", "groups is an integer", "IDX-6 ERR-6", "argument-value", {"groups": 1.5}),
    ("block-size-zero", "block_size is at least 1", "IDX-4", "argument-value", {"block_size": 0}),
    ("groups-do-not-divide", "groups divides the teacher's heads", "IDX-6", "argument-shape", {"groups": 3}),
    ("key-heads", "H_kv divides H", "IDX-6 GRAD-5", "argument-shape",
     {"teacher_keys": numbers([2, 3, 4, 2], 4051, -8, 8, 2)}),
    ("widths", "queries and keys have one width", "IDX-6", "argument-shape",
     {"teacher_keys": numbers([2, 2, 4, 3], 4052, -8, 8, 2)}),
    ("mask-shape", "attn_mask broadcasts to (B, 1, L, S)", "IDX-5", "argument-shape", {"attn_mask": mask([1, 1, 1])}),
    ("mask-of-heads", "attn_mask has no head axis", "IDX-5", "argument-shape",
     {"attn_mask": mask([[[[1] * 4] * 4] * 4] * 2)}),
    ("mask-of-integers", "attn_mask is boolean", "IDX-16 MAP-7", "argument-dtype",
     {"attn_mask": array([1, 1, 1, 1], "int64")}),
    ("segments-of-floats", "segments are integers", "IDX-5", "argument-dtype",
     {"segments": array([[0, 0, 1, 1]] * 2)}),
    ("segments-shape", "segments is (B, L)", "IDX-5", "argument-shape",
     {"segments": array([[0, 0, 1]] * 2, "int64")}),
    ("segments-of-other-lengths", "segments need L = S", "IDX-5", "argument-shape",
     {"teacher_keys": numbers([2, 2, 3, 2], 4053, -8, 8, 2), "segments": PACKED}),
    ("outside-shape", "outside is (B, H, L)", "IDX-7", "argument-shape",
     {"outside": numbers([2, 2, 4], 4054, 0, 8, 2)}),
    ("outside-nan", "outside may be minus infinity, not NaN", "IDX-16 MAP-5", "not-finite",
     {"outside": array([[["nan"] * 4] * 4] * 2)}),
    ("outside-infinite", "nor plus infinity", "IDX-16 MAP-5", "not-finite",
     {"outside": array([[["inf"] * 4] * 4] * 2)}),
    ("nan", "NaN in the teacher's queries", "IDX-16 MAP-5", "not-finite", {"teacher_queries": _NAN}),
    ("list-lengths", "lists are equally long", "IDX-8 LOSS-3", "argument-shape",
     {"teacher_queries": [TEACHER["teacher_queries"]] * 2, "teacher_keys": [TEACHER["teacher_keys"]]}),
    ("layers-of-other-lengths", "layers agree in L", "IDX-8", "argument-shape",
     {"teacher_queries": [TEACHER["teacher_queries"], numbers([2, 4, 3, 2], 4055, -8, 8, 2)],
      "teacher_keys": [TEACHER["teacher_keys"]] * 2}),
)  # fmt: skip

_REFUSED_LOSSES: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("scale-infinite", "scale is finite", "IDX-1", "argument-value", {"scale": special("inf")}),
    ("relu-word", "relu is True or False", "IDX-2", "argument-value", {"relu": "no"}),
    ("top-k-zero", "top_k is at least 1", "IDX-10", "argument-value", {"top_k": 0}),
    ("top-k-boolean", "a boolean is not an integer", "IDX-10 ERR-6", "argument-value", {"top_k": True}),
    ("restriction-unknown", "four values, also where it is not used", "IDX-11 ERR-7", "argument-value",
     {"restriction": "after"}),
    ("reduction-unknown", "reduction has three values", "IDX-13", "argument-value", {"reduction": "batchmean"}),
    ("groups-of-the-scorer", "groups divides the scorer's heads", "IDX-1", "argument-shape", {"groups": 4}),
    ("keys-of-blocks", "a key for each block", "IDX-1 IDX-4", "argument-shape", {"block_size": 2}),
    ("scorer-widths", "the scorer's queries and keys have one width", "IDX-1", "argument-shape",
     {"keys": numbers([2, 1, 4, 3], 4056, -8, 8, 2)}),
    ("scorer-rows", "scorer and teacher have the same rows", "IDX-1", "argument-shape",
     {"queries": numbers([2, 2, 3, 2], 4057, -8, 8, 2), "weights": None}),
    ("weights-shape", "weights are (B, H_i, L)", "IDX-1", "argument-shape",
     {"weights": numbers([2, 2, 3], 4058, 0, 8, 2)}),
    ("loss-mask-shape", "loss_mask is (B, L)", "IDX-16 MAP-7", "argument-shape", {"loss_mask": lengths(3, [3, 3])}),
    ("loss-mask-of-integers", "loss_mask is boolean", "IDX-16 MAP-7", "argument-dtype",
     {"loss_mask": array([[1, 1, 1, 1]] * 2, "int64")}),
    ("queries-nan", "NaN in the scorer's queries", "IDX-16 MAP-5", "not-finite",
     {"queries": array([[[["nan"] * 2] * 4] * 2] * 2)}),
    ("weights-infinite", "infinite weights", "IDX-16 MAP-5", "not-finite",
     {"weights": array([[["inf"] * 4] * 2] * 2)}),
)  # fmt: skip


def indexer_target() -> Book:
    """IDX-5 to -9."""
    book = book_of(oracle.indexer_target, "target", MAPS)
    for name, comment, spec, change in TARGETS:
        book.valid(name, comment, spec, **{**TEACHER, **change})
    for name, comment, spec, code, change in _REFUSED_TARGETS:
        book.invalid(name, comment, spec, code, **{**TEACHER, **change})
    return book


def indexer_loss() -> Book:
    """IDX-1, -2, -10 to -13."""
    return _add_losses(book_of(oracle.indexer_loss, "loss", LOSS))


def indexer_loss_gradient() -> Book:
    """IDX-14."""

    def answer(**given: Any) -> dict[str, Any]:
        return dict(zip(("dq", "dk", "dw"), oracle.indexer_loss_gradient(**given), strict=True))

    rules = dict.fromkeys(("dq", "dk", "dw"), GRADIENT)
    return _add_losses(Book("indexer_loss_gradient", ("dq", "dk", "dw"), answer, rules))


def _add_losses(book: Book) -> Book:
    for name, comment, spec, change in LOSSES:
        book.valid(name, comment, spec, **{**TEACHER, **SCORER, **change})
    for name, comment, spec, code, change in (*_REFUSED_TARGETS[:6], *_REFUSED_LOSSES):
        book.invalid(name, comment, spec, code, **{**TEACHER, **SCORER, **change})
    return book


BOOKS = (indexer_target, indexer_loss, indexer_loss_gradient)
