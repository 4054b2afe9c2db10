"""``shd plan``: what a cache would cost, before anyone writes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated

from shd_ref.commands.derive import Without
from shd_ref.commands.options import AsJson, InputOptions, StudentHeads, TeacherPath
from shd_ref.commands.terminal import print_remarks
from shd_ref.errors import ShdError
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions, Shown


def plan(
    teacher: TeacherPath,
    inputs: InputOptions,
    student_heads: StudentHeads,
    options: Annotated[
        partial[PrecomputeOptions],
        Without("num_student_heads", "form", "factored_codec", "codec", "compression", "on_error", "seed_column"),
    ],
    run: Annotated[RunOptions, Without("samples_per_shard", "shards")],
    samples: Annotated[int, Shown("Samples that the teacher runs on.", least=1)] = 8,
    read_bandwidth: Annotated[
        float, Shown("Bytes that storage can feed one training device, in MB a second, above 0.")
    ] = 500.0,
    as_json: AsJson = False,
) -> None:
    """Measure a few samples: bytes, time and error of every codec, and whether a cache pays at all.

    shd plan teacher.onnx --inputs data.npz --student-heads 4

    Break-even is the read bandwidth per training device below which the teacher, run while training, is faster.
    """
    from shd_ref.commands.tables import print_forecast
    from shd_ref.teacher.study.forecast import forecast_cache
    from shd_ref.teacher.study.kept import advise_plan

    if not read_bandwidth > 0:
        raise ShdError("argument-value", f"--read-bandwidth must be above 0 MB a second; got {read_bandwidth}")
    source = inputs.open()
    for heads in student_heads:
        forecast = forecast_cache(
            teacher,
            source,
            options(num_student_heads=heads),
            run,
            num_samples=samples,
            bandwidth=1e6 * read_bandwidth,
        )
        print_remarks(advise_plan(teacher, options(num_student_heads=heads)), *forecast.remarks)
        if as_json:
            print(json.dumps(asdict(forecast)))
        else:
            print_forecast(forecast, heads)
    print_remarks(source.remark)
