"""Cases of squeeze_heads: its strategies, its temperature and its residual."""

from __future__ import annotations

from typing import Any

from book import Book, array, lengths, mask, numbers, random_model

PROBS = {"rule": "close", "quantity": "probs"}
COUNTS = ("num_clipped", "num_degenerate")
SUMMED = "merged-outputs-mean merged-outputs-first merged-outputs-mixed"


def add_strategies(book: Book) -> None:
    """MIX-5 and MIX-6: constant, hard and mean."""
    three = random_model(2, 3, 3, 4, 3, 411)
    for strategy in ("constant", "mean"):
        book.valid(f"{strategy}-three-to-one",
            "1/4, 1/4, 1/2: two rounds of halves" if strategy == "constant" else "1/3 each",
            "MIX-5 MIX-9" if strategy == "constant" else "MIX-6 MIX-11",
            "constant-is-mean" if strategy == "constant" else "mean-per-group",
            **{**three, "num_student_heads": 1, "strategy": strategy})  # fmt: skip
        book.valid(f"{strategy}-three-to-two",
            "1/2, 1/2 and 1" if strategy == "constant" else "1/3 for every student head",
            "MIX-5 MIX-9" if strategy == "constant" else "MIX-6 MIX-11",
            "constant-is-mean" if strategy == "constant" else "mean-per-group",
            **{**three, "num_student_heads": 2, "strategy": strategy})  # fmt: skip
        book.valid(f"{strategy}-identity",
            "equal counts: C is the identity" if strategy == "constant" else "1/H_t for equal counts too",
            "MIX-5 PLAN-3" if strategy == "constant" else "MIX-6",
            "identity-plan" if strategy == "constant" else "mean-identity",
            **{**three, "num_student_heads": 3, "strategy": strategy})  # fmt: skip
        book.valid(f"{strategy}-per-row", "with a query axis", "MIX-12", "alpha-per-ignored",
            **{**three, "num_student_heads": 2, "strategy": strategy, "alpha_per": "row"})  # fmt: skip
    book.valid("constant-counts-nothing", "pairs that are clipped or degenerate under shd", "MIX-9",
        "constant-counts", teacher_probs=array([[[[1, 0]], [[0, 1]], [[1, 0]], [[1, 0]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]]]), num_student_heads=2,
        strategy="constant")  # fmt: skip
    hard: dict[str, Any] = {**random_model(3, 4, 2, 4, 2, 421), "strategy": "hard"}
    book.valid("hard", "the head that is better by E, in every sample and pair", "MIX-5 MIX-9",
        "hard-wrong-side hard-always-first alpha-batch-shared", **{**hard, "num_student_heads": 2})  # fmt: skip
    book.valid("hard-clipped", "a* = 2 and a* = -1 choose heads p and q, and count as not clipped", "MIX-5 MIX-9",
        "hard-wrong-side hard-counts-clipped", teacher_probs=array([[[[1, 0]], [[0, 1]], [[1, 0]], [[0, 1]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]], [[0], [1]], [[2], [0]]]]), num_student_heads=2,
        strategy="hard")  # fmt: skip
    book.valid("hard-degenerate", "a degenerate pair has a* = 1/2, and hard takes 1 there; it counts as degenerate",
        "MIX-14 MIX-5", "hard-tie-to-second degenerate-nan", teacher_probs=array([[[[0.5, 0.5]], [[0.5, 0.5]]]]),
        value_outputs=array([[[[1], [0]], [[3], [1]]]]), num_student_heads=1, strategy="hard")  # fmt: skip
    book.valid("hard-tie", "u = w = 1: a* is exactly 1/2, and hard takes 1", "MIX-5", "hard-tie hard-tie-to-second",
        teacher_probs=array([[[[1, 0]], [[0, 1]]]]), value_outputs=array([[[[1], [0]], [[1], [0]]]]),
        num_student_heads=1, strategy="hard")  # fmt: skip
    book.valid("hard-three-to-one", "the second round reads the chosen map with the sum of the value outputs",
        "MIX-5 MIX-4", f"{SUMMED} hard-wrong-side",
        **{**random_model(2, 3, 3, 4, 2, 445), "num_student_heads": 1, "strategy": "hard"})  # fmt: skip
    book.valid("hard-per-row", "row by row; rows that do not count take 1", "MIX-5 MIX-12 MIX-14",
        "alpha-per-ignored hard-tie-to-second",
        **{**random_model(1, 2, 4, 4, 2, 441), "num_student_heads": 1, "strategy": "hard", "alpha_per": "row",
        "query_mask": lengths(4, [3])}, leave_out=COUNTS)  # fmt: skip


def add_temperatures(book: Book) -> None:
    """TEMP-3: alphas from the maps at temperature 1, softening before mixing."""
    model: dict[str, Any] = {**random_model(2, 3, 3, 4, 2, 501), "num_student_heads": 1}
    flags = "softened-after solved-on-softened temperature-ignored temperature-inverted"
    for name, temperature in (("two", 2), ("half", 0.5)):
        book.valid(f"temperature-{name}",
            "C is solved on the maps as given and mixes the softened ones; the residual is at T = 1",
            "TEMP-2 TEMP-3 MIX-8 MIX-11", f"{flags} residual-softened",
            **{**model, "temperature": temperature})  # fmt: skip
    book.valid("temperature-solved-on-softened",
        "alpha_from='softened': C is solved on the softened maps too; the residual is still at T = 1", "TEMP-3 MIX-8",
        "alpha-from-ignored residual-softened", **{**model, "temperature": 2, "alpha_from": "softened"})  # fmt: skip
    book.valid("temperature-hard-on-softened", "the same for hard selection", "TEMP-3 MIX-5", "alpha-from-ignored",
        leave_out=COUNTS,
        **{**random_model(2, 4, 3, 4, 2, 527), "num_student_heads": 2, "temperature": 4,
        "alpha_from": "softened", "strategy": "hard"})  # fmt: skip
    for strategy in ("constant", "mean"):
        book.valid(f"temperature-{strategy}", "softened, then mixed",
            "TEMP-2 MIX-5" if strategy == "constant" else "TEMP-2 MIX-6", "softened-after",
            **{**model, "temperature": 2, "strategy": strategy})  # fmt: skip
    book.valid("temperature-sinks", "softened rows keep their own mass, then they are mixed", "TEMP-5 MIX-17",
        "sink-filled sink-softened softened-after",
        teacher_probs=array([[[[0.5, 0.125, 0], [0.25, 0.25, 0.25]], [[0.125, 0.25, 0.0625], [0.5, 0.375, 0.125]]]]),
        value_outputs=array([[[[1, 2], [3, -1], [0, 1]], [[2, 0], [-1, 1], [1, 0]]]]), num_student_heads=1,
        temperature=2, row_sums="at_most_one")  # fmt: skip
    book.case(
        "temperature-tiny: a flat row beside a peaked one at T = 1/256: both keep their mass",
        "TEMP-6 TEMP-2 power-underflow",
        teacher_probs=array([[[[2**-6] * 64, [1] + [0] * 63]]]),
        value_outputs=numbers([1, 1, 64, 1], 541, 1, 16, 2),
        num_student_heads=1,
        temperature=0.00390625,
    )
    book.valid("temperature-masked-rows", "zero rows and keys stay 0 at any temperature", "TEMP-2 MAP-2",
        "masked-row-nan masked-not-zero", compare={"probs": {**PROBS, "exact_zeros": True}},
        teacher_probs=array([[[[0, 0, 0], [0.75, 0.25, 0]], [[0, 0, 0], [0.125, 0.875, 0]]]]),
        value_outputs=array([[[[1, 2], [3, -1], [0, 1]], [[2, 0], [-1, 1], [1, 0]]]]), num_student_heads=1,
        temperature=2)  # fmt: skip


def add_residuals(book: Book) -> None:
    """MIX-8, MIX-19."""
    flags = "residual-absolute residual-squared"
    constant: dict[str, Any] = {"num_student_heads": 1, "strategy": "constant"}
    pair = array([[[[1, 0]], [[0, 1]]]])
    book.valid("residual-half", "O = 3, the merged head gives 3/2: 1/2, whatever the scale", "MIX-8", flags,
        **{"teacher_probs": pair, "value_outputs": array([[[[2], [0]], [[0], [1]]]]), **constant})  # fmt: skip
    book.case(
        "residual-large-outputs: the same with value outputs 64 times as large",
        f"MIX-8 {flags}",
        **{"teacher_probs": pair, "value_outputs": array([[[[128], [0]], [[0], [64]]]]), **constant},
    )
    book.valid("residual-heads-cancel", "errors of two student heads cancel in the sum, so nothing is left", "MIX-8",
        "residual-per-head", teacher_probs=array([[[[1, 0]], [[0, 1]], [[0, 1]], [[1, 0]]]]),
        value_outputs=array([[[[2], [0]], [[0], [1]], [[2], [0]], [[0], [1]]]]), num_student_heads=2,
        strategy="constant")  # fmt: skip
    book.case(
        "residual-nothing-to-keep: O = 0 and the merged head gives 0: 0",
        "MIX-8 residual-nan",
        teacher_probs=pair,
        value_outputs=array([[[[0], [3]], [[2], [0]]]]),
        num_student_heads=2,
    )
    book.valid("residual-infinite",
        "O = 1 - 1 = 0 and the merged head gives 1; the second sample is an ordinary one", "MIX-8 MIX-19",
        "residual-nan",
        **{"teacher_probs": array([[[[1, 0]], [[0, 1]]]] * 2),
        "value_outputs": array([[[[1], [2]], [[0], [-1]]], [[[2], [0]], [[0], [1]]]]), **constant})  # fmt: skip
    book.valid("residual-padded-rows", "what happens in rows that do not count is not in the residual",
        "MIX-8 ALPHA-7", "residual-uncounted-rows",
        **{"teacher_probs": array([[[[1, 0], [0, 1]], [[0, 1], [0.5, 0.5]]]]),
        "value_outputs": array([[[[2], [0]], [[0], [1]]]]), **constant, "query_mask": mask([[1, 0]])})  # fmt: skip
    book.valid("residual-masked-away", "no counted row: both norms vanish", "MIX-8",
        "residual-nan residual-uncounted-rows",
        **{"teacher_probs": pair, "value_outputs": array([[[[2], [0]], [[0], [1]]]]), **constant,
        "query_mask": mask([[0]])})  # fmt: skip
