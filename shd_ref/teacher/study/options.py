"""The options of the fidelity test, kept where commands can show them without loading onnx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from shd_ref.alpha import ALPHA_PER
from shd_ref.matching import MATCHED_BY
from shd_ref.mixing import STRATEGIES
from shd_ref.teacher.run.options import (
    CALIBRATION_HELP,
    CALIBRATION_SAMPLES,
    MERGING,
    PLANS,
    SITES_HELP,
    Shown,
)

MEASURING: Final = "What is measured"


@dataclass(frozen=True)
class FidelityOptions:
    """What to try, and what to look at; words mean what they do in ``PrecomputeOptions``.

    Every combination is tried that makes a difference: ``matched_by`` counts for matched plans, and ``alpha_per`` for
    the strategies that compute weights, ``shd`` and ``hard``.

    Attributes:
        targets: labels ``(N,)`` or token ids ``(N, L)``. An array that is also the model's input is taken as the text
            itself: position i is judged by token i + 1.
        samples: all where there are fewer.
    """

    student_heads: Annotated[
        tuple[int, ...], Shown("Heads of the student, at most the teacher's; several to compare: 4,6.")
    ]
    plan: Annotated[
        tuple[str, ...],
        Shown(
            "Heads that merge: progressive (neighbours, round by round: the paper), balanced (neighbouring groups), "
            "matched (the pairs that fit best on some samples).",
            choices=PLANS,
        ),
    ] = ("progressive", "matched")
    strategy: Annotated[
        tuple[str, ...],
        Shown(
            "Weights of merged heads: shd (the paper's closed form), constant (1/2), hard (the better head), mean "
            "(of all heads), simplex (best convex weights).",
            choices=STRATEGIES,
        ),
    ] = ("shd", "constant")
    alpha_per: Annotated[
        tuple[str, ...], Shown("One merge weight per map (the paper) or per query row.", choices=ALPHA_PER)
    ] = ("map", "row")
    matched_by: Annotated[
        tuple[str, ...],
        Shown(
            "What matched plans minimise: residual (of the output), similarity (of the maps).", MERGING, MATCHED_BY
        ),
    ] = ("residual",)
    calibration_samples: Annotated[int, CALIBRATION_HELP] = CALIBRATION_SAMPLES
    sites: Annotated[str | None, SITES_HELP] = None
    graph_output: Annotated[
        str | None,
        Shown("The graph's output that is compared. Default: its first floating-point one.", MEASURING),
    ] = None
    targets: Annotated[
        str | None,
        Shown(
            "Column with class labels (N,) or token ids (N, L), for the teacher's own loss; the graph's token input "
            "stands for the next tokens.",
            MEASURING,
        ),
    ] = None
    samples: Annotated[int, Shown("Samples to run, chosen by the seed.", MEASURING, least=1)] = 128
