"""Laws of the chapters FFN, WIDTH, ALIGN and DEPTH of ``specs/shrink.md``."""

from __future__ import annotations

import numpy as np

from shd_ref.conformance.laws.law import Array, Law, Trial, as_array, broken, exactly
from shd_ref.conformance.laws.shrink.heads import part_law
from shd_ref.conformance.products import make_product


def _matrix(trial: Trial, seed: int, *shape: int) -> Array:
    return trial.numbers(seed, *shape, low=-8, high=8, shift=2)


def _merged(trial: Trial) -> None:
    first, second, third = (_matrix(trial, 6300 + i, *shape) for i, shape in enumerate(((5, 4), (6, 5), (3, 6))))
    biases = [_matrix(trial, 6305 + i, size) for i, size in enumerate((5, 6, 3))]
    x = _matrix(trial, 6309, 7, 4).astype(np.float64)

    def merge(one: tuple[Array, Array | None], other: tuple[Array, Array | None]) -> tuple[Array, Array]:
        answer = trial.call("merge_linear", first=one[0], second=other[0], first_bias=one[1], second_bias=other[1])
        return trial.rounded(as_array(answer["weight"], "weight")), trial.rounded(as_array(answer["bias"], "bias"))

    a, b, c = (first, biases[0]), (second, biases[1]), (third, biases[2])
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    wanted = ((x @ first.T + biases[0]) @ second.T + biases[1]) @ third.T + biases[2]
    for name, (weight, bias) in (("left", left), ("right", right)):
        trial.agree(x @ weight.T + bias, wanted, "product", f"three layers merged from the {name}", times=100)
    same = merge((trial.rounded(np.eye(4)), None), (first, biases[0]))
    trial.agree(same[0], first, "product", "a layer after the identity")
    trial.agree(same[1], biases[0], "product", "its bias")


def _neurons(trial: Trial) -> None:
    hidden, second = np.abs(_matrix(trial, 6310, 9, 6)), _matrix(trial, 6311, 4, 6)
    hidden[:, 2] = 0.0
    scores = trial.numbers_of("neuron_importance", activations=hidden, second=second)
    alone = [
        float(np.sqrt(((hidden[:, [i]].astype(np.float64) @ second[:, [i]].T) ** 2).sum(axis=1).mean()))
        for i in range(6)
    ]
    trial.agree(scores, alone, "product", "what the output loses without a neuron", times=4)
    scaled = trial.numbers_of("neuron_importance", activations=4.0 * hidden, second=second / 4.0)
    trial.agree(scaled, scores, "product", "a neuron four times as loud, read at a quarter", times=4)
    first = {"weight": _matrix(trial, 6312, 6, 5), "bias": _matrix(trial, 6313, 6)}
    last = {"weight": second, "bias": _matrix(trial, 6314, 4)}
    answer = trial.call("keep_neurons", first=first, second=last, importance=trial.rounded(scores), count=5)
    exactly(answer["kept"], [0, 1, 3, 4, 5], "the neurons without the silent one")
    everything = trial.call("keep_neurons", first=first, second=last, importance=trial.rounded(scores), count=6)
    exactly(everything["kept"], list(range(6)), "all neurons")


def _norm(rows: Array, kind: str) -> Array:
    centred = rows - rows.mean(axis=-1, keepdims=True) if kind == "layer" else rows
    result: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    return result


def _stream(trial: Trial, seed: int, width: int = 6) -> Array:
    """Rows with strong and weak axes, of which the last is nearly never used."""
    rows = trial.numbers(seed, 40, width).astype(np.float64) * 2.0 ** -np.arange(width)
    turned: Array = rows @ np.linalg.qr(trial.numbers(seed + 1, width, width).astype(np.float64))[0]
    return turned


def _folded(trial: Trial) -> None:
    rows = _norm(_stream(trial, 6320), "layer")
    matrix, scale, shift, bias = (_matrix(trial, 6322 + i, *s) for i, s in enumerate(((6, 3), (6,), (6,), (3,))))
    answer = trial.call("fold_norm", matrix=matrix, scale=scale, shift=shift, bias=bias)
    got = rows @ as_array(answer["matrix"], "matrix") + as_array(answer["bias"], "bias")
    trial.agree(got, (rows * scale + shift) @ matrix + bias, "product", "a projection behind its norm", times=100)


def _turned(trial: Trial) -> None:
    for number, kind in enumerate(("rms", "layer")):
        stream = _stream(trial, 6330 + 5 * number)
        rows = _norm(stream, kind)
        moment = trial.rounded(rows.T @ rows / len(rows))
        whole = trial.numbers_of("principal_axes", moment=moment, width=6, norm=kind)
        got = _norm(stream @ whole, kind) @ whole.T
        trial.agree(got, rows, "factor", f"a stream that is turned whole ({kind})", times=10)
        for width in (2, 3, 5):
            basis = trial.numbers_of("principal_axes", moment=moment, width=width, norm=kind)
            ones = np.full((width, width), 1.0 / width) if kind == "layer" else np.zeros((width, width))
            trial.agree(basis.T @ basis, np.eye(width) - ones, "factor", f"basis^T basis ({kind})", times=10)
            if kind == "layer":
                trial.agree(basis.sum(axis=1), np.zeros(6), "factor", "the mean of a row on the axes", times=10)
                trial.agree(basis.sum(axis=0), np.zeros(width), "factor", "axes against the ones", times=10)
            kept = np.trace(basis.T @ moment @ basis)
            for seed in range(6340, 6344):
                other = np.linalg.qr(trial.numbers(seed, 6, 6).astype(np.float64))[0][:, : width - (kind == "layer")]
                less = float(np.trace(other.T @ moment @ other))
                trial.at_most(less, kept, "factor", "what other axes hold, against the kept ones")
            scale = trial.numbers_of("kept_scale", moment=moment, basis=trial.rounded(basis))
            share = kept / float(np.trace(moment))
            trial.agree(scale, np.sqrt(share * 6 / width), "factor", "the norm's scale", times=10)


def _equivariant(trial: Trial) -> None:
    """Another basis of the stream turns the axes with it."""
    rows = _stream(trial, 6350)
    moment = rows.T @ rows / len(rows)
    turn = np.linalg.qr(trial.numbers(6352, 6, 6).astype(np.float64))[0]
    for width in (1, 3):
        first, second = (
            make_product("projector", trial.call("principal_axes", moment=trial.rounded(s), width=width), {})
            for s in (moment, turn.T @ moment @ turn)
        )
        trial.agree(second, turn.T @ as_array(first, "projector") @ turn, "factor", "the kept axes, turned", times=10)


def _aligned(trial: Trial) -> None:
    z, t, start, bias = (_matrix(trial, 6360 + i, *s) for i, s in enumerate(((12, 4), (12, 3), (4, 3), (3,))))
    for ridge in (0.25, 2.0):
        answer = trial.call("align_output", inputs=z, targets=t, weight=start, bias=bias, ridge=ridge)
        weight, offset = as_array(answer["weight"], "weight"), as_array(answer["bias"], "bias")
        missing = z.astype(np.float64) @ weight + offset - t
        hold = ridge * float((z.astype(np.float64) ** 2).sum()) / 4
        trial.agree(
            z.T @ missing + hold * (weight - start), np.zeros((4, 3)), "factor", "the slope in the matrix", times=100
        )
        trial.agree(missing.sum(axis=0), np.zeros(3), "factor", "the slope in the bias", times=100)
    own = trial.rounded(z.astype(np.float64) @ start + bias)
    answer = trial.call("align_output", inputs=z, targets=own, weight=start, bias=bias)
    trial.agree(answer["weight"], start, "factor", "a matrix that already gives the targets", times=4)


def _kept(trial: Trial) -> None:
    for teacher in range(1, 14):
        for student in range(1, teacher + 1):
            (layers,) = trial.call("kept_layers", num_teacher_layers=teacher, layers=student).values()
            kept = [int(layer) for layer in layers]
            ends = {teacher - 1} if student == 1 else {0, teacher - 1}
            if len(kept) != student or kept != sorted(set(kept)) or not ends <= set(kept) <= set(range(teacher)):
                raise broken(f"{student} of {teacher} layers", "must rise, with the ends", sorted(ends), kept)


LAWS: tuple[Law, ...] = (
    part_law(
        "merged",
        "merge_linear",
        "FFN-1 FFN-2",
        "Three layers merge in any order; the identity changes nothing.",
        _merged,
    ),
    part_law(
        "neurons",
        "neuron_importance keep_neurons",
        "FFN-4 FFN-5",
        "A neuron counts by what the output loses.",
        _neurons,
    ),
    part_law("folded", "fold_norm", "WIDTH-1", "A folded projection reads the bare norm.", _folded),
    part_law(
        "turned",
        "principal_axes kept_scale",
        "WIDTH-2 WIDTH-3 WIDTH-4 WIDTH-5",
        "A whole turn changes nothing, no other axes hold more, and the scale makes up for the cut.",
        _turned,
    ),
    part_law("equivariant", "principal_axes", "WIDTH-3", "The axes turn with the stream.", _equivariant),
    part_law("aligned", "align_output", "ALIGN-2", "The slope of the fit is 0.", _aligned),
    part_law("layers", "kept_layers", "DEPTH-2", "Layers rise from the first to the last.", _kept),
)
"""The laws of FFN, WIDTH, ALIGN and DEPTH."""
