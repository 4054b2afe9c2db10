"""Plans matched on a sample of the teacher's own data, one for every layer (PLAN-9 to PLAN-13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask, check_option
from shd_ref.cache.documents.members import sample_order
from shd_ref.merging.alpha import ALPHA_PER
from shd_ref.merging.matching import MATCHED_BY, match_pairs, read_calibration, score_pair
from shd_ref.merging.pairwise import Head, merge_round
from shd_ref.merging.plans import MergePlan, Pair, check_counts
from shd_ref.teacher.graph.find import AttentionSite, projection_of
from shd_ref.teacher.run.inputs import ModelInputs
from shd_ref.teacher.run.options import CALIBRATION_SAMPLES
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.run.threads import threads_for


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
    for number, site in enumerate(reader.sites):
        calibration = []
        for batch in inputs.batches(chosen, batch_size):
            probs, values, places = reader.read_values(number, batch, on_error=on_error)
            name = inputs.mask if mask_of_rows is None else mask_of_rows(site)
            mask = None if name is None else batch.arrays[name][places].astype(np.bool_)
            if len(places):
                calibration.append((probs, values, mask))
        largest = max((probs[0, 0].size for probs, *_ in calibration), default=0)
        with threads_for(largest * 2 * (site.d_v or 0)):
            plan = match_factored(
                calibration, projection_of(site), num_student_heads, by, alpha_per=alpha_per, row_sums=site.row_sums
            )
        plans.append(plan)
    return tuple(plans)


def match_factored(
    calibration: Sequence[tuple[ArrayLike, NDArray[Any], ArrayLike | None]],
    projection: ArrayLike,
    num_student_heads: int,
    by: str = "residual",
    *,
    alpha_per: str = "map",
    row_sums: str = "one",
) -> MergePlan:
    """The plan of ``matched_plan``, from values and W_o: value outputs are never made.

    Two heads write into 2 d_v directions of the D of the model. In an orthonormal basis of these all lengths and
    products that a score is made of stay what they are, and cost 2 d_v / D of the time and memory.

    Args:
        calibration: items (maps ``(B, H, L, S)``, V ``(B, H_kv, S, d_v)``, query mask ``(B, L)`` or None).
        projection: W_o ``(H * d_v, D)``.
        num_student_heads, by, alpha_per, row_sums: as for ``matched_plan``.

    Raises:
        ShdError: as ``matched_plan``.
    """
    whole = np.asarray(projection, dtype=np.float64)
    items = []
    for probs, values, mask in calibration:
        heads = np.shape(probs)[1]
        items.append((probs, np.repeat(values, heads // values.shape[1], axis=1), mask))
    check_option("by", by, MATCHED_BY, "PLAN-12")
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
    pools, masks = read_calibration(items, row_sums)  # of each head its map and its values
    check_counts(len(pools[0]), num_student_heads)
    weights = list(whole.reshape(len(pools[0]), -1, whole.shape[-1]))  # (d_v, D) of each head
    rounds: list[tuple[Pair, ...]] = []
    while len(weights) > num_student_heads:
        count = len(weights)
        scores = np.zeros((count, count))
        for p, q in itertools.combinations(range(count), 2):
            basis = _common_basis(weights[p], weights[q])
            for pool, mask in zip(pools, masks, strict=True):
                scores[p, q] += score_pair(*_express(pool[p], pool[q], basis), mask, by, alpha_per)
        pairs = match_pairs(scores, min(count // 2, count - num_student_heads))
        alone = sorted(set(range(count)) - {head for pair in pairs for head in pair})
        pools = [
            [_merge(pool[p], pool[q], _common_basis(weights[p], weights[q]), mask, alpha_per) for p, q in pairs]
            + [pool[head] for head in alone]
            for pool, mask in zip(pools, masks, strict=True)
        ]
        weights = [np.concatenate([weights[p], weights[q]]) for p, q in pairs] + [weights[head] for head in alone]
        rounds.append(pairs)
    return tuple(rounds)


def _common_basis(first: Array, second: Array) -> Array:
    """Weights of two heads, ``(m_1, D)`` above ``(m_2, D)``, in an orthonormal basis of what they span."""
    rows = np.concatenate([first, second])
    return rows if len(rows) >= rows.shape[1] else np.asarray(np.linalg.qr(rows.T, mode="r")).T


def _express(first: Head, second: Head, basis: Array) -> tuple[Head, Head]:
    """Maps, and values times their rows of the basis, in the place of value outputs."""
    (a_p, v_p), (a_q, v_q) = first, second
    split = v_p.shape[-1]
    return (a_p, v_p @ basis[:split]), (a_q, v_q @ basis[split:])


def _merge(first: Head, second: Head, basis: Array, mask: Mask | None, alpha_per: str) -> Head:
    """The merged map, and the values of both, whose weights stand beneath each other."""
    pair = _express(first, second, basis)
    ((merged, _),), _ = merge_round(pair, [(0, 1)], query_mask=mask, alpha_per=alpha_per)
    return merged, np.concatenate([first[1], second[1]], axis=-1)
