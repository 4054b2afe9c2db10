"""The options of forecasts and of the fidelity test, kept where commands can show them without loading onnx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from shd_ref.errors import ShdError
from shd_ref.merging.alpha import ALPHA_PER
from shd_ref.merging.matching import MATCHED_BY
from shd_ref.merging.mixing import STRATEGIES
from shd_ref.teacher.run.options import CALIBRATION_HELP, CALIBRATION_SAMPLES, MERGING, PLANS, SITES_HELP, Shown

MEASURING: Final = "What is measured"


@dataclass(frozen=True)
class PlanOptions:
    """What a forecast measures, and what for.

    Attributes:
        max_error: mean total variation, in (0, 1]. The default is a convention: on 256 tokens ``sqrt8-row`` moves
            less than half of it, and ``u4`` several times as much.
    """

    samples: Annotated[int, Shown("Samples to run the teacher on.", least=1)] = 8
    read_bandwidth: Annotated[float, Shown("Read bandwidth per training device, in MB per second, above 0.")] = 500.0
    max_error: Annotated[float, Shown("Largest mean share of a row's probability that coding may move, above 0.")] = (
        0.01
    )
    train_batch: Annotated[int, Shown("Samples per training step, to estimate its memory.", least=1)] = 16
    num_student_parameters: Annotated[
        int | None,
        Shown("Parameters of the student, to estimate its memory. Default: as many as the teacher.", least=1),
    ] = None

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a training device can be fed."""
        return 1e6 * self.read_bandwidth

    def check(self) -> None:
        """Refuse what says nothing (``argument-value``)."""
        for name, least in (("samples", 1), ("train_batch", 1), ("num_student_parameters", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ShdError("argument-value", f"{name} must be at least {least}; got {value}")
        if not 0 < self.read_bandwidth < float("inf"):
            raise ShdError("argument-value", f"read_bandwidth must be above 0 MB a second; got {self.read_bandwidth}")
        if not 0 < self.max_error <= 1:
            raise ShdError("argument-value", f"max_error must be above 0, at most 1; got {self.max_error}")


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
            "Heads to merge: progressive (neighbours, in rounds, as in the paper), balanced (neighbouring "
            "groups), matched (best-fitting pairs on some samples).",
            choices=PLANS,
        ),
    ] = ("progressive", "matched")
    strategy: Annotated[
        tuple[str, ...],
        Shown(
            "Weights of merged heads: shd (the paper's closed form), constant (1/2), hard (the better head), mean "
            "(of all heads).",
            choices=STRATEGIES,
        ),
    ] = ("shd", "constant")
    alpha_per: Annotated[
        tuple[str, ...], Shown("One merge weight per map (the paper) or per query row.", choices=ALPHA_PER)
    ] = ("map", "row")
    matched_by: Annotated[
        tuple[str, ...],
        Shown(
            "Score for matched plans: residual (of the output), similarity (of the maps).",
            MERGING,
            MATCHED_BY,
            needs="plan=matched",
        ),
    ] = ("residual",)
    calibration_samples: Annotated[int, CALIBRATION_HELP] = CALIBRATION_SAMPLES
    sites: Annotated[str | None, SITES_HELP] = None
    graph_output: Annotated[
        str | None, Shown("The graph output to compare. Default: the first floating-point one.", MEASURING)
    ] = None
    targets: Annotated[
        str | None,
        Shown(
            "Column with class labels (N,) or token ids (N, L), for the teacher's loss; the graph's token input "
            "means next-token prediction.",
            MEASURING,
        ),
    ] = None
    samples: Annotated[int, Shown("Samples to run, chosen by the seed.", MEASURING, least=1)] = 128
