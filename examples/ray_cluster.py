"""Precompute on a Ray cluster; the bytes are the same as from one process.

    python make_data.py
    shd-torch export teacher --out teacher.onnx
    pip install '..[ray]'
    python ray_cluster.py                   # on a cluster: RAY_ADDRESS=auto python ray_cluster.py

Without RAY_ADDRESS a local cluster is started. The same from a shell: `shd precompute ... --engine ray --workers 2`.
You can kill any actor, or the whole run: the same command resumes. It prints

    1024 samples in 16 shards, sealed: True, intact: True
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shd_ref.cache import verify_cache
from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.precompute.ray_engine import RayEngine
from shd_ref.teacher.sources import open_source


def main() -> None:
    """Fill a cache with two actors; each loads the teacher."""
    here = Path.cwd()  # teacher, data and cache under one path on every machine, or the cache at s3://...
    inputs = partial(open_source, here / "train.jsonl", tokenizer=here / "teacher")  # every actor opens the data
    options = PrecomputeOptions(num_student_heads=2, num_student_layers=2, logits="topk")
    summary = precompute(here / "teacher.onnx", inputs, here / "ray_cache", options, engine=RayEngine(workers=2))
    checked = verify_cache(here / "ray_cache")
    print(f"{summary.samples} samples in {checked.shards} shards, sealed: {checked.sealed}, intact: {checked.ok}")


if __name__ == "__main__":
    main()
