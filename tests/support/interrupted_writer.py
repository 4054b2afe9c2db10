"""A writer to be killed: ``python -m support.interrupted_writer CACHE SCALE SAMPLES KIND`` (not a test itself).

``SCALE`` multiplies the alphas, as if this writer's hardware rounded differently; ``KIND`` names one of
``KINDS_OF_CACHE``.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shd_ref.cache import CacheWriter, Manifest
from support.makers import AVERAGED, FORMS, HIDDEN_OF_A_DECODER, KINDS, errors_of, job, records_of

NUM_SAMPLES = 120
KINDS_OF_CACHE: dict[str, dict[str, Any]] = {
    "one-sequence": FORMS["topk"],
    "decoder": {"codec": "u4", **KINDS, "logits": AVERAGED, "hidden": HIDDEN_OF_A_DECODER},
}


def interrupted_job(num_samples: int, kind: str = "one-sequence") -> Manifest:
    return job(num_samples=num_samples, samples_per_shard=3, **KINDS_OF_CACHE[kind])


def start_writer(
    folder: str | Path, scale: float = 1.0, kind: str = "one-sequence", num_samples: int = NUM_SAMPLES
) -> subprocess.Popen[bytes]:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", __name__, str(folder), str(scale), str(num_samples), kind]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


if __name__ == "__main__":
    writer = CacheWriter(sys.argv[1], interrupted_job(int(sys.argv[3]), sys.argv[4]))
    print("ready", flush=True)
    for shard in writer.missing_shards():
        records = records_of(writer.manifest, shard)
        records = [
            replace(record, parts={**record.parts, "alphas": record.parts["alphas"] * np.float32(sys.argv[2])})
            for record in records
        ]
        writer.write_shard(shard, records, errors_of(writer.manifest))
    writer.seal()
    print("sealed", flush=True)
