"""What only the teacher can tell: its own maps, and how far each strategy is from its attention output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, CacheReader
from shd_ref.errors import ShdError
from shd_ref.merging.mixing import squeeze_heads
from shd_ref.report.content import choose_example
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.study.recheck import rerun_teacher

STRATEGIES: Final[dict[str, tuple[str, str]]] = {
    "hard": ("hard", "map"),
    "constant": ("constant", "map"),
    "alpha per map": ("shd", "map"),
    "alpha per row": ("shd", "row"),
    "simplex": ("simplex", "map"),
    "simplex per row": ("simplex", "row"),
}
"""Name: strategy and ``alpha_per``. The last two are the best convex weights there are."""


@dataclass(frozen=True)
class LayerEvidence:
    """One student layer.

    Attributes:
        student_layer: from 0.
        residuals: by name, as in ``STRATEGIES``: mean relative error of the merged attention output (MIX-8).
        cached: the same for the strategy, alphas and plan of the cache.
        maps: the teacher's maps of the example sample, ``(H_t, n, n)``.
    """

    student_layer: int
    residuals: dict[str, float]
    cached: float
    maps: NDArray[Any]


@dataclass(frozen=True)
class Evidence:
    """Of a few samples.

    Attributes:
        example: key of the sample whose maps are kept.
        samples: how many samples the residuals are the mean of.
        layers: by student layer.
    """

    example: str
    samples: int
    layers: tuple[LayerEvidence, ...]


def read_evidence(
    reader: CacheReader,
    teacher: str | Path,
    inputs: Source | Arrays,
    *,
    num_samples: int = 4,
    provider: str = "cpu",
) -> Evidence:
    """Run the cache's teacher on a few of its samples.

    Args:
        reader: the cache.
        teacher: the ``.onnx`` file that it comes from.
        inputs: the model inputs that it comes from, or some of them.
        num_samples: how many samples: the example, then others in stored order.
        provider: as in ``precompute``.

    Raises:
        ShdError: ``cache-mismatch`` for another teacher or other inputs; ``not-finite`` and
            ``not-a-distribution`` for maps that the reference refuses.
    """
    if reader.manifest.attention is NO_ATTENTION:
        raise ShdError(
            "argument-value",
            f"{reader.folder} must hold attention to be shown beside its teacher's; it holds none: leave --teacher "
            "and --inputs out, and let shd verify run the teacher again",
            "CACHE-160",
        )
    work = rerun_teacher(reader, teacher, inputs, provider=provider)
    index_of = {work.inputs.key(index): index for index in reversed(range(len(work.inputs)))}
    example = choose_example(reader, index_of)
    keys = list(dict.fromkeys([example, *(key for key in reader if key in index_of)]))[:num_samples]
    manifest = reader.manifest
    attention = AttentionReader(work.model, [site for _, site in work.layers], provider=provider)
    layers = []
    for number, (student_layer, _) in enumerate(work.layers):
        residuals: dict[str, list[float]] = {name: [] for name in ("cached", *STRATEGIES)}
        example_maps = np.empty((0, 0, 0))
        # One sample a batch: without padding, so that the example's maps are its own.
        for key in keys:
            (batch,) = work.inputs.batches([index_of[key]], 1)
            mask = work.query_mask(batch, work.layers[number][1])
            maps, outputs = attention.read(number, batch)
            kinds = {"cached": (manifest.attention.strategy, manifest.attention.alpha_per)} | STRATEGIES
            for name, (strategy, alpha_per) in kinds.items():
                result = squeeze_heads(
                    maps,
                    outputs,
                    manifest.attention.num_student_heads,
                    plan=manifest.attention.layer_plans[number],
                    strategy=strategy,
                    query_mask=None if mask is None else mask[: len(maps)],
                    alpha_rule=manifest.attention.alpha_rule if name == "cached" else "least_squares",
                    alpha_per=alpha_per,
                )
                residuals[name].append(float(result.residual.mean()))
            if key == example:
                record = reader.read(key, (), logits=False, hidden=())
                rows, columns = manifest.attention.map_shapes(record.extent)[number]
                example_maps = maps[0, :, :rows, :columns]
        means = {name: float(np.mean(values)) for name, values in residuals.items()}
        layers.append(LayerEvidence(student_layer, means, means.pop("cached"), example_maps))
    return Evidence(example, len(keys), tuple(layers))
