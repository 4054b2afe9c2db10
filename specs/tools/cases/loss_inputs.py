"""Inputs that the loss and its gradients share, and what both refuse."""

from __future__ import annotations

from typing import Any

from book import Book, Given, array, head, lengths, mask, numbers, probs, random_mask, special

from cases.maps import BAD_TEMPERATURES, bad_maps

INF = "-inf"
DIVERGENCES = ("kl", "reverse_kl", "js", "mse")
DTYPES_OF = {"row-sum-off": ["float32"], "row-sum-off-float64": ["float64", "float32"]}
TEACHER = array([[[[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], [[0.25, 0.5, 0.25], [0.75, 0.125, 0.125]]]])
STUDENT = array([[[[0, 1, -1], [2, 0.5, 0]], [[1, 1, 0], [-2, 0, 1]]]])
SMALL = TEACHER, STUDENT
LAYERS = (
    [TEACHER, array([[[[0.5, 0.5], [0.25, 0.75], [1, 0]]]]), array([[[[0, 0]]]])],
    [STUDENT, array([[[[1, 0], [2, 0], [0, 1]]]]), array([[[[1, 0]]]])],
)
Case = tuple[str, str, str, str, dict[str, Any]]
"""Name, comment, sentences, flags and inputs."""


def pair_layers(teacher: Any, student: Any, **options: Any) -> dict[str, Any]:
    """The two arguments that every loss has, and its options."""
    return {"supervision": teacher, "student_logits": student, **options}


def case(title: str, words: str, teacher: Any, student: Any, **options: Any) -> Case:
    """One of the cases, by its title and words (``head``)."""
    return *head(title, words), pair_layers(teacher, student, **options)


def shared_valid_cases() -> list[Case]:
    """Inputs that the loss and its gradient share; the sentences are those of the loss."""
    weights = "kl-reversed cross-entropy-called-kl loss-log2 loss-is-mse"
    means_of_rows = "mean-over-all-rows mean-per-sample loss-padded-rows"
    means = "mean-over-all-rows mean-per-sample rows-summed loss-padded-rows batch-mean"
    cases = [
        case(
            "two-heads: two heads, two rows: sums over heads of means over rows",
            f"LOSS-1 LOSS-2 LOSS-4 {weights} mean-over-heads rows-summed mean-over-keys",
            *SMALL,
        ),
        case(
            "teacher-zeros: 0 log 0 = 0",
            "LOSS-1 LOSS-12 zero-log-zero",
            array([[[[1, 0, 0], [0.5, 0, 0.5]]]]),
            array([[[[1, 0, -1], [0, 2, 1]]]]),
        ),
        case(
            "padded-rows: lengths 3 and 1: the mean is over the four rows that count in the batch",
            f"LOSS-4 {means} mask-polarity",
            probs([2, 2, 3, 4], 1001, 9, 2, 6),
            numbers([2, 2, 3, 4], 1002, -8, 8, 2),
            loss_mask=lengths(3, [3, 1]),
        ),
        case(
            "zero-rows: rows of zeros do not count, in each head its own",
            "LOSS-4 MAP-2 mean-over-all-rows masked-row-nan count-shared-by-heads",
            array([[[[0, 0], [0.5, 0.5], [0.25, 0.75]], [[0, 0], [0, 0], [0.125, 0.875]]]]),
            array([[[[1, 0], [2, 0], [0, 1]], [[1, 3], [0, 0], [0, -2]]]]),
        ),
        case(
            "zero-row-and-mask: a row counts where the mask is True and the row is not zero",
            "LOSS-4 mean-over-all-rows loss-padded-rows",
            array([[[[0, 0], [0.5, 0.5], [0.25, 0.75]]], [[[1, 0], [0, 0], [0.125, 0.875]]]]),
            array([[[[1, 0], [2, 0], [0, 1]]], [[[1, 3], [0, 0], [0, -2]]]]),
            loss_mask=mask([[1, 1, 0], [1, 0, 1]]),
        ),
        case(
            "causal: logits of -inf above the diagonal, where the teacher has no mass",
            "LOSS-6 LOSS-16 masked-row-nan zero-log-zero",
            probs([2, 2, 4, 4], 1011, 9, 2, 6, causal=True),
            numbers([2, 2, 4, 4], 1012, -8, 8, 2, causal=True),
        ),
        case(
            "causal-mask: the same by a mask of two axes",
            "LOSS-16 MAP-10 mask-transposed mask-polarity mask-broadcast loss-mask-ignored",
            probs([2, 2, 3, 3], 1013, 9, 2, 6, causal=True),
            numbers([2, 2, 3, 3], 1014, -8, 8, 2),
            attn_mask=mask([[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        ),
        case(
            "padded-keys: a mask (B, 1, 1, S)",
            "LOSS-16 MAP-10 mask-broadcast loss-mask-ignored",
            array([[[[0.5, 0.5, 0]], [[0.25, 0.75, 0]]], [[[1, 0, 0]], [[0.25, 0.25, 0.5]]]]),
            array([[[[1, 0, 4]], [[2, 0, 1]]], [[[0, 1, 1]], [[1, 3, 0]]]]),
            attn_mask=mask([[[[1, 1, 0]]], [[[1, 1, 1]]]]),
        ),
        case(
            "masked-row-that-does-not-count: the student may attend nowhere in a row that does not count",
            "LOSS-4 MAP-2 masked-row-nan",
            array([[[[0.5, 0.5], [0.25, 0.75], [0, 0]]]]),
            array([[[[INF, INF], [0, 1], [INF, INF]]]]),
            loss_mask=mask([[0, 1, 1]]),
        ),
        case(
            "mismatch-that-does-not-count: support is not looked at where a row does not count",
            "LOSS-6 masked-row-nan loss-padded-rows",
            array([[[[0.5, 0.5], [0.25, 0.75]]]]),
            array([[[[0, INF], [0, 1]]]]),
            loss_mask=mask([[0, 1]]),
        ),
        case(
            "uncounted-row-sums: a row that does not count need not sum to one",
            "MAP-3 LOSS-4 loss-padded-rows",
            array([[[[0.5, 0.25], [0.25, 0.75]]]]),
            array([[[[2, 0], [0, 1]]]]),
            loss_mask=mask([[0, 1]]),
        ),
        case("half-beta: beta multiplies", "LOSS-2 beta-ignored", *SMALL, beta=0.5),
        case("large-beta: beta may be above one", "LOSS-2 beta-ignored", *SMALL, beta=3),
        case(
            "mean: divided by the number of heads",
            "LOSS-5 LOSS-18 reduction-ignored mean-over-heads",
            *SMALL,
            reduction="mean",
        ),
        case(
            "layers: three layers of 2, 1 and 1 heads and other lengths; in one map no row counts",
            "LOSS-2 LOSS-3 layers-averaged",
            *LAYERS,
        ),
        case(
            "mean-empty-map: divided by three maps, though in one of them no row has mass",
            "LOSS-5 LOSS-18 LOSS-7 mean-over-live-maps reduction-ignored",
            array([[[[0.5, 0.5], [0.25, 0.75]], [[0, 0], [0, 0]], [[0.125, 0.875], [0, 0]]]]),
            array([[[[1, 0], [2, 0]], [[1, 3], [0, 0]], [[0, -2], [1, 1]]]]),
            reduction="mean",
        ),
        case(
            "mean-empty-layer: divided by three maps, though the layer of one of them has no row with mass",
            "LOSS-5 LOSS-18 LOSS-7 mean-over-live-maps layers-averaged reduction-ignored",
            [TEACHER, array([[[[0, 0], [0, 0]]]])],
            [STUDENT, array([[[[1, 0], [2, 0]]]])],
            reduction="mean",
        ),
        case(
            "layers-mean: divided by the four maps, also the one where no row counts",
            "LOSS-5 LOSS-18 layers-averaged mean-over-live-maps reduction-ignored",
            *LAYERS,
            reduction="mean",
        ),
        case(
            "layers-masked: one mask serves all layers",
            "LOSS-16 LOSS-4 loss-padded-rows mean-per-sample",
            [probs([2, 1, 3, 4], 1021, 9, 2, 6), probs([2, 2, 3, 2], 1022, 9, 2, 6)],
            [numbers([2, 1, 3, 4], 1023, -8, 8, 2), numbers([2, 2, 3, 2], 1024, -8, 8, 2)],
            loss_mask=lengths(3, [1, 3]),
        ),
        case("one-layer-list: a list of one layer", "LOSS-3", [TEACHER], [STUDENT]),
        case(
            "row-sum-off: a row that sums to one within ROW_SUM is taken as it is",
            "LOSS-10 MAP-3 row-renormalised",
            array([[[[0.5, 0.5, 2**-14]]]]),
            array([[[[0, 1, -4]]]]),
        ),
        case(
            "row-sum-off-float64: the same within float64's ROW_SUM",
            "LOSS-10 MAP-3 row-renormalised",
            array([[[[0.5, 0.5, 2**-17]]]]),
            array([[[[0, 1, -4]]]]),
        ),
        case(
            "mask-per-head: a mask (H, 1, S) is aligned with the last axes",
            "LOSS-16 MAP-10 mask-broadcast",
            array([[[[0.5, 0.5, 0]], [[0.25, 0, 0.75]]], [[[1, 0, 0]], [[0.25, 0, 0.75]]]]),
            array([[[[1, 0, 4]], [[2, 3, 1]]], [[[0, 1, 1]], [[1, 3, 0]]]]),
            attn_mask=mask([[[1, 1, 0]], [[1, 0, 1]]]),
        ),
        case(
            "very-negative-logit: a finite logit is not masked, however negative it is",
            "LOSS-6 LOSS-12 magic-threshold epsilon-in-log",
            array([[[[0.5, 0.25, 0.25]]]]),
            array([[[[0, 1, -16384]]]]),
        ),
        case(
            "intersect: mass on keys that the student may not attend goes, rows are scaled back",
            "LOSS-14 LOSS-15 intersect-not-rescaled support-ignored",
            array([[[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]]]),
            array([[[[0, 1, INF], [INF, 0, 1]]]]),
            support="intersect",
        ),
        case(
            "intersect-empty-row: a row that loses all its mass does not count",
            "LOSS-14 LOSS-4 intersect-not-rescaled mean-over-all-rows masked-row-nan",
            array([[[[0, 0, 1], [0.25, 0.25, 0.5]]], [[[0.5, 0.25, 0.25], [1, 0, 0]]]]),
            array([[[[0, 1, 2], [0.5, 0, 1]]], [[[0, 1, 0], [1, 1, 1]]]]),
            attn_mask=mask([[1, 1, 0]]),
            support="intersect",
        ),
        case("intersect-nothing-lost: where supports agree nothing changes", "LOSS-14", *SMALL, support="intersect"),
        case(
            "mask-of-mixed-rows: two samples, three heads, rows that count at random",
            f"LOSS-4 {means}",
            probs([2, 3, 7, 5], 1031, 9, 2, 6),
            numbers([2, 3, 7, 5], 1032, -12, 12, 2),
            loss_mask=random_mask([2, 7], 1033, 3, 5),
        ),
        case(
            "large: 2 samples, 3 heads, 63 queries, 65 keys, padded, causal, T = 2",
            f"LOSS-4 LOSS-16 TEMP-4 ugly-shape temperature-squared {means}",
            probs([2, 3, 63, 65], 1041, 6, 2, 8, causal=True),
            numbers([2, 3, 63, 65], 1042, -96, 96, 4, causal=True),
            loss_mask=lengths(63, [63, 17]),
            temperature=2,
        ),
    ]
    for divergence in DIVERGENCES:
        option, dashed = {} if divergence == "kl" else {"divergence": divergence}, divergence.replace("_", "-")
        flags = "temperature-squared student-not-softened student-alone-softened divergence-ignored"
        for name, temperature in (("two", 2), ("half", 0.5)):
            cases.append(
                case(
                    f"{dashed}-temperature-{name}: no factor T or T^2",
                    f"TEMP-4 LOSS-11 {flags} gradient-without-temperature",
                    *SMALL,
                    temperature=temperature,
                    **option,
                )
            )
        sinks = array(
            [[[[0.25, 0.125, 0.125], [0.5, 0.125, 0.25], [0.25, 0.5, 0.25], [0, 0, 0], [0.03125, 0.0625, 0.03125]]]]
        )
        logits = array([[[[0, 1, 0], [2, 0, 0.5], [0, -1, 1], [1, 1, 0], [3, 0, 0]]]])
        cases += [
            case(
                f"{dashed}-sinks: a row weighs its mass; a row that is all sink does not count",
                "LOSS-10 LOSS-11 sink-filled sink-not-weighed sink-plain-kl divergence-ignored",
                sinks,
                logits,
                row_sums="at_most_one",
                **option,
            ),
            case(
                f"{dashed}-sinks-intersect: a row keeps the mass that it had before",
                "LOSS-14 LOSS-15 LOSS-10 sink-filled intersect-not-rescaled",
                sinks,
                logits,
                row_sums="at_most_one",
                support="intersect",
                attn_mask=mask([0, 1, 1]),
                **option,
            ),
        ]
        if divergence == "kl":
            continue
        cases += [
            case(
                f"{dashed}: the divergence by name",
                "LOSS-11 divergence-ignored js-mixture js-half mse-over-keys kl-reversed",
                *SMALL,
                **option,
            ),
            case(
                f"{dashed}-padded-rows: counts and means are those of every divergence",
                f"LOSS-11 LOSS-4 LOSS-5 {means_of_rows} beta-ignored reduction-ignored",
                probs([2, 2, 3, 4], 1051, 4, 0, 6)
                if divergence == "reverse_kl"
                else probs([2, 2, 3, 4], 1052, 9, 2, 6),
                numbers([2, 2, 3, 4], 1053, -8, 8, 2),
                loss_mask=lengths(3, [3, 1]),
                beta=0.75,
                reduction="mean",
                **option,
            ),
            case(
                f"{dashed}-causal: masked keys, where both have no mass",
                "LOSS-11 LOSS-12 LOSS-13 masked-row-nan zero-log-zero",
                array([[[[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.25, 0.5]]]]),
                array([[[[3, 1, 2], [1, 0, 1], [0, 2, 1]]]]),
                attn_mask=mask([[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
                **option,
            ),
        ]
        if divergence != "reverse_kl":
            cases.append(
                case(
                    f"{dashed}-teacher-zeros: keys with mass of the student alone",
                    "LOSS-11 LOSS-12 zero-log-zero js-mixture",
                    array([[[[1, 0, 0], [0.5, 0, 0.5]]]]),
                    array([[[[1, 0, -1], [0, 2, 1]]]]),
                    **option,
                )
            )
    return cases


def refuse_bad_layers(book: Book, student: Given) -> None:
    """What the loss and its gradient refuse."""
    good = pair_layers(TEACHER, student)
    value, shape = "argument-value", "argument-shape"
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("beta-boolean", "ERR-6 LOSS-2", {"beta": True}),
        ("beta-negative", "LOSS-2", {"beta": -1}),
        ("beta-infinite", "LOSS-2", {"beta": special("inf")}),
        ("beta-nan", "LOSS-2", {"beta": special("nan")}),
        ("reduction-unknown", "LOSS-5", {"reduction": "batchmean"}),
        ("divergence-unknown", "LOSS-11", {"divergence": "tv"}),
        ("support-unknown", "LOSS-14", {"support": "ignore"}),
        ("row-sums-unknown", "MAP-9", {"row_sums": "many"}),
        *((f"bad-temperature-{name}", "TEMP-1", {"temperature": t}) for name, t in BAD_TEMPERATURES),
    ]
    for name, spec, change in changes:
        book.invalid(name, "not in its list, or out of its range", spec, value, **{**good, **change})
    more = numbers([1, 2, 2, 4], 1071, -8, 8, 2)
    for name, spec, change in (
        ("shapes-heads", "LOSS-3", {"student_logits": numbers([1, 1, 2, 3], 1071, -8, 8, 2)}),
        ("shapes-keys", "LOSS-3 TOKEN-7", {"student_logits": more}),
        ("shapes-rows", "LOSS-3 TOKEN-7", {"student_logits": numbers([1, 2, 1, 3], 1071, -8, 8, 2)}),
        ("shapes-samples", "LOSS-3", {"student_logits": numbers([2, 2, 2, 3], 1071, -8, 8, 2)}),
        ("no-layers", "LOSS-3", {"supervision": [], "student_logits": []}),
        ("array-against-list", "LOSS-3", {"student_logits": [student]}),
        ("list-against-array", "LOSS-3", {"supervision": [TEACHER]}),
        ("list-lengths", "LOSS-3", {"supervision": [TEACHER, TEACHER], "student_logits": [student]}),
        ("layers-out-of-order", "LOSS-3", {"supervision": [TEACHER, more], "student_logits": [more, student]}),
        ("mask-length", "MAP-7", {"loss_mask": lengths(3, [3])}),
        ("mask-samples", "MAP-7", {"loss_mask": lengths(2, [2, 2])}),
        ("mask-axes", "MAP-7", {"loss_mask": mask([[[1, 1]]])}),
        ("attn-mask-keys", "MAP-10", {"attn_mask": mask([1, 1])}),
        ("attn-mask-axes", "MAP-10", {"attn_mask": mask([[[[[1, 1, 1]]]]])}),
        (
            "mask-of-layers-that-differ",
            "LOSS-16 MAP-7",
            {
                "supervision": [TEACHER, probs([1, 1, 3, 2], 1072, 9, 2, 6)],
                "student_logits": [student, numbers([1, 1, 3, 2], 1073, -8, 8, 2)],
                "loss_mask": lengths(2, [2]),
            },
        ),
    ):
        book.invalid(name, "supervision, logits and masks must fit", spec, shape, **{**good, **change})
    for name, change in (
        ("loss-mask-of-integers", {"loss_mask": array([[1, 1]], "int64")}),
        ("loss-mask-of-numbers", {"loss_mask": array([[1, 1]])}),
        ("attn-mask-of-integers", {"attn_mask": array([[1, 1, 1]] * 2, "int64")}),
        ("attn-mask-additive", {"attn_mask": array([[0, 0, 0], [0, INF, 0]])}),
    ):
        book.invalid(name, "masks are boolean", "MAP-7", "argument-dtype", flags="mask-dtype", **{**good, **change})
    one = array([[[[0.5, 0.5]]]])
    for name, logits in (("nan", [0, "nan"]), ("plus-infinity", [0, "inf"])):
        book.invalid(f"logits-{name}", "logits are finite or -inf", "MAP-5", "not-finite",
            **pair_layers(one, array([[[logits]]])))  # fmt: skip
    book.invalid("logits-complex", "complex logits", "MAP-5", "argument-dtype",
        **pair_layers(one, array([[[[0, 1]]]], "complex128")))  # fmt: skip
    book.invalid("nan-in-the-second-layer", "every layer is checked", "MAP-5", "not-finite",
        **pair_layers([one, one], [array([[[[0, 1]]]]), array([[[["nan", 1]]]])]))  # fmt: skip
    mismatch, flags = "support-mismatch", "support-ignored"
    for divergence in DIVERGENCES:
        dashed = divergence.replace("_", "-")
        book.invalid(f"{dashed}-mass-on-minus-infinity", "the teacher attends where the student's logit is -inf",
            "LOSS-6 LOSS-13", mismatch, flags=flags,
            **pair_layers(one, array([[[[0, INF]]]]), divergence=divergence))  # fmt: skip
        book.invalid(f"{dashed}-mass-on-masked-key", "the teacher attends where the student is masked",
            "LOSS-6 LOSS-13", mismatch, flags=flags,
            **pair_layers(one, array([[[[0, 1]]]]), attn_mask=mask([1, 0]), divergence=divergence))  # fmt: skip
    book.invalid("student-attends-nowhere", "a row that counts and is fully masked for the student", "LOSS-6",
        mismatch, flags=flags, **pair_layers(one, array([[[[INF, INF]]]])))  # fmt: skip
    book.invalid("little-mass-on-masked-key", "however little mass it is", "LOSS-6", mismatch, flags=flags,
        **pair_layers(array([[[[1 - 2.0**-8, 2.0**-8]]]]), array([[[[0, INF]]]])))  # fmt: skip
    book.invalid("tiny-mass-on-masked-key", "2^-20 of mass, which is less than any tolerance", "LOSS-6", mismatch,
        flags=flags, **pair_layers(array([[[[0.5, 0.5, 2.0**-20]]]]), array([[[[0, 1, INF]]]])))  # fmt: skip
    book.invalid("mismatch-in-a-later-row", "one row of the last head of the second layer", "LOSS-6", mismatch,
        flags=flags,
        **pair_layers([one, array([[[[0.5, 0.5], [1, 0]], [[1, 0], [0.5, 0.5]]]])],
        [array([[[[0, 1]]]]), array([[[[0, 1], [0, INF]], [[0, INF], [0, INF]]]])]))  # fmt: skip
    zero = array([[[[0.5, 0.5, 0]]]])
    book.invalid("reverse-kl-teacher-zero", "reverse_kl is infinite where the teacher has no mass", "LOSS-13",
        mismatch, flags="reverse-kl-infinite",
        **pair_layers(zero, array([[[[0, 1, -8]]]]), divergence="reverse_kl"))  # fmt: skip
    book.invalid("reverse-kl-intersect", "intersecting supports does not change this", "LOSS-13", mismatch,
        flags="reverse-kl-infinite",
        **pair_layers(zero, array([[[[0, INF, 1]]]]), divergence="reverse_kl", support="intersect"))  # fmt: skip
    bad_maps(book, "supervision", {"student_logits": array([[[[0, 1, 2], [2, 1, 0]]]])})
