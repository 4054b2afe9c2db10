"""A writer for the tests to kill: ``python -m cache.interrupted_writer FOLDER SCALE`` (not a test itself).

``SCALE`` multiplies the alphas, as if this writer's hardware rounded differently.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from cache.makers import MEASURED, job, records_of

from shd_ref.cache import CacheWriter

NUM_SAMPLES = 120
MANIFEST = job(num_samples=NUM_SAMPLES, samples_per_shard=3)

if __name__ == "__main__":
    writer = CacheWriter(Path(sys.argv[1]), MANIFEST)
    print("ready", flush=True)
    for shard in writer.missing_shards():
        records = [
            replace(record, alphas=record.alphas * np.float32(sys.argv[2])) for record in records_of(MANIFEST, shard)
        ]
        writer.write_shard(shard, records, MEASURED)
    writer.seal()
    print("sealed", flush=True)
