"""A writer for the tests to kill: ``python -m support.interrupted_writer CACHE SCALE SAMPLES`` (not a test itself).

``SCALE`` multiplies the alphas, as if this writer's hardware rounded differently.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from shd_ref.cache import CacheWriter, Manifest
from support.makers import FORMS, errors_of, job, records_of

NUM_SAMPLES = 120


def interrupted_job(num_samples: int) -> Manifest:
    return job(num_samples=num_samples, samples_per_shard=3, **FORMS["topk"])


MANIFEST = interrupted_job(NUM_SAMPLES)

if __name__ == "__main__":
    writer = CacheWriter(sys.argv[1], interrupted_job(int(sys.argv[3])))
    print("ready", flush=True)
    for shard in writer.missing_shards():
        records = records_of(writer.manifest, shard)
        records = [replace(record, alphas=record.alphas * np.float32(sys.argv[2])) for record in records]
        writer.write_shard(shard, records, errors_of(writer.manifest))
    writer.seal()
    print("sealed", flush=True)
