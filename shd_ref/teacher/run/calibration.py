"""Plans matched on a sample of the teacher's own data, one for every layer (PLAN-9 to PLAN-13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shd_ref.cache.documents.members import sample_order
from shd_ref.merging.matching import matched_plan
from shd_ref.merging.plans import MergePlan
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.run.inputs import ModelInputs
from shd_ref.teacher.run.options import CALIBRATION_SAMPLES
from shd_ref.teacher.run.reading import AttentionReader


def calibrate_plans(
    reader: AttentionReader,
    inputs: ModelInputs,
    num_student_heads: int,
    *,
    by: str = "residual",
    alpha_per: str = "map",
    num_samples: int = CALIBRATION_SAMPLES,
    seed: int = 0,
    batch_size: int = 16,
    on_error: str = "stop",
    mask_of_rows: Callable[[AttentionSite], str | None] | None = None,
) -> tuple[MergePlan, ...]:
    """The matched plan of every site of the reader; the same call gives the same plans.

    Args:
        reader: of the sites that will be merged.
        inputs: the data set that the sample is drawn from.
        num_student_heads: H_s.
        by: ``"residual"`` or ``"similarity"``.
        alpha_per: ``"map"`` or ``"row"``, as the merge will use it.
        num_samples: how many samples, at least 1; all where there are fewer.
        seed: of the choice, which is that of CACHE-26.
        batch_size: samples a teacher call.
        on_error: ``"skip"`` leaves out samples on which the teacher gives NaN or infinity.
        mask_of_rows: from a site to the input that says which of its rows count; by default the inputs' mask.

    Raises:
        ShdError: ``dependency-missing`` (networkx), and the errors of ``matched_plan``.
    """
    chosen = [int(index) for index in sample_order(len(inputs), seed)[:num_samples]]
    plans = []
    for number in range(len(reader.sites)):
        calibration = []
        for batch in inputs.batches(chosen, batch_size):
            probs, outputs, places = reader.read(number, batch, on_error=on_error)
            name = inputs.mask if mask_of_rows is None else mask_of_rows(reader.sites[number])
            mask = None if name is None else batch.arrays[name][places].astype(np.bool_)
            if len(places):
                calibration.append((probs, outputs, mask))
        plans.append(
            matched_plan(
                calibration, num_student_heads, by, alpha_per=alpha_per, row_sums=reader.sites[number].row_sums
            )
        )
    return tuple(plans)
