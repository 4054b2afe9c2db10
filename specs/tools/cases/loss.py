"""Cases of chapter LOSS."""

from __future__ import annotations

import oracle_loss as loss
from book import Book, array, book_of, mask, numbers, probs

from cases.loss_inputs import (
    DIVERGENCES,
    DTYPES_OF,
    STUDENT,
    TEACHER,
    pair_layers,
    refuse_bad_layers,
    shared_valid_cases,
)

LOSS = {"rule": "close", "quantity": "loss"}
EXACT = {"rule": "exact"}


def shd_loss() -> Book:
    """Chapter LOSS."""
    book = book_of(loss.shd_loss, "loss", LOSS)
    for name, comment, spec, flags, inputs in shared_valid_cases():
        book.valid(name, comment, spec, flags, dtypes=DTYPES_OF.get(name, ()), **inputs)
    zero = {"loss": EXACT}
    half = array([[[[0.5, 0.5]]]])
    book.valid("no-row-counts", "a mask without a row: exactly 0", "LOSS-7", "empty-mask-nan", compare=zero,
        **pair_layers(TEACHER, STUDENT, loss_mask=mask([[0, 0]])))  # fmt: skip
    book.valid("no-row-has-mass", "supervision of zeros: exactly 0", "LOSS-7", "empty-mask-nan", compare=zero,
        **pair_layers(array([[[[0, 0]]]]), array([[[[0, 1]]]])))  # fmt: skip
    book.valid("no-beta", "beta = 0: exactly 0", "LOSS-2", "beta-ignored", compare=zero,
        **pair_layers(TEACHER, STUDENT, beta=0))  # fmt: skip
    book.valid("slightly-negative", "a row that sums to one less 2^-17 makes the loss negative, and it stays so",
        "LOSS-17 LOSS-10", "loss-clipped row-renormalised", dtypes=["float64", "float32"],
        **pair_layers(array([[[[0.5, 0.5 - 2**-17]]]]), array([[[[1, 1]]]])))  # fmt: skip
    for divergence in DIVERGENCES:
        book.valid(f"{divergence.replace('_', '-')}-equal", "equal rows: 0", "LOSS-11", "cross-entropy-called-kl",
            **pair_layers(half, array([[[[3, 3]]]]), divergence=divergence))  # fmt: skip
        book.valid(f"{divergence.replace('_', '-')}-equal-sinks", "A~ = rho Q: 0", "LOSS-11", "sink-plain-kl",
            **pair_layers(array([[[[0.25, 0.25]]]]), array([[[[3, 3]]]]), divergence=divergence,
            row_sums="at_most_one"))  # fmt: skip
    book.valid("tiny-student-probability", "exp(-200) is 0 in float32; its logarithm is -200", "LOSS-12",
        "epsilon-in-log", **pair_layers(half, array([[[[0, -200]]]])))  # fmt: skip
    book.valid("tiny-student-probability-temperature", "exp(-1600) is 0 in float64", "LOSS-12 TEMP-4",
        "epsilon-in-log", **pair_layers(half, array([[[[0, -200]]]]), temperature=0.125))  # fmt: skip
    book.valid("js-far-apart", "js of rows without a common key is log 2", "LOSS-11 LOSS-12",
        "js-mixture epsilon-in-log",
        **pair_layers(array([[[[1, 0]]]]), array([[[[-512, 512]]]]), divergence="js"))  # fmt: skip
    book.valid("mse-far-apart", "mse is at most 2", "LOSS-11", "mse-over-keys",
        **pair_layers(array([[[[1, 0]]]]), array([[[[-512, 512]]]]), divergence="mse"))  # fmt: skip
    book.valid("mse-padded-keys", "keys without mass change nothing", "LOSS-11", "mse-over-keys",
        **pair_layers(array([[[[0.25, 0.75, 0, 0, 0]]]]), array([[[[1, 0, 2, 2, 2]]]]), divergence="mse",
        attn_mask=mask([1, 1, 0, 0, 0])))  # fmt: skip
    book.valid("long-sums", "130 rows of about 700 each: their sum leaves the range of float16", "NUM-1 LOSS-4",
        "half-accumulation",
        **pair_layers(probs([1, 1, 130, 3], 1061, 4, 0, 6), numbers([1, 1, 130, 3], 1062, -4, 3, 0),
        temperature=0.001953125))  # fmt: skip
    book.case(
        "many-rows: 600 rows: a running sum in half precision stands still",
        "NUM-1 LOSS-4 half-accumulation",
        **pair_layers(probs([1, 1, 600, 2], 1063, 1, 0, 6), numbers([1, 1, 600, 2], 1064, -8, 8, 2)),
    )
    refuse_bad_layers(book, STUDENT)
    return book


BOOKS = (shd_loss,)
