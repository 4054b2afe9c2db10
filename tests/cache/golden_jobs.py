"""The caches kept in ``golden/``, and the digests of their bytes in ``golden.sha256``.

``python -m cache.golden_jobs`` writes those that do not exist yet, and the digests of their files. A line that is
there is never changed: it is a cache that somebody has.
"""

import hashlib
from pathlib import Path

from support.makers import (
    ALONE,
    AVERAGED,
    FACTORS,
    FORMS,
    HIDDEN_OF_A_DECODER,
    KINDS,
    OTHER_PLAN,
    PLAN,
    WINDOWED,
    job,
    write_cache,
)

from shd_ref.cache import Matching, SampleInputs

GOLDEN = Path(__file__).parent / "golden"
DIGESTS = GOLDEN.with_suffix(".sha256")
GOLDEN_JOBS = {
    "sqrt8-row-full": job(num_samples=3),
    "sqrt8-row-causal": job(num_samples=3, support="causal"),
    "float32-full": job(num_samples=3, codec="float32"),
    "u4-causal": job(num_samples=3, support="causal", codec="u4"),
    "seeds": job(num_samples=3, inputs=SampleInputs(("input_ids",), None, "augmentation")),
    "layer-plans": job(num_samples=3, plan=(), plans=(PLAN, OTHER_PLAN), matching=Matching("residual", 2, 17)),
    "factored-int8": job(num_samples=3, codec="int8", factors=FACTORS, support="causal"),
    "factored-float16": job(num_samples=3, codec="float16", factors=FACTORS),
    "factored-window": job(num_samples=3, codec="int8", factors=WINDOWED, padding="around"),
    "two-sequences": job(num_samples=3, codec="u4", **KINDS),
    "student-layers": job(num_samples=3, num_student_layers=4),
    "u4-skipped": job(num_samples=3, codec="u4", on_error="skip"),
    "topk-and-hidden-int8": job(num_samples=3, **FORMS["topk"]),
    "narrow-and-hidden-float16": job(
        num_samples=3, codec="int8", factors=WINDOWED, padding="around", **FORMS["narrow"]
    ),
    "logits-without-attention": job(num_samples=3, **ALONE["topk"]),
    "averaged-of-a-decoder": job(num_samples=3, codec="u4", **KINDS, logits=AVERAGED),
    "embeddings-and-hidden": job(num_samples=3, **ALONE["embeddings"]),
    "exact-and-hidden": job(num_samples=3, codec="u4", **FORMS["exact"]),
    "hidden-of-a-decoder": job(num_samples=3, codec="u4", **KINDS, hidden=HIDDEN_OF_A_DECODER),
    "all-logits": job(num_samples=3, codec="u4", on_error="skip", **FORMS["float16"]),
}


def digests_of(name: str) -> dict[str, str]:
    """By path in ``golden/``, the SHA-256 of each file of a cache that is there."""
    files = sorted(path for path in (GOLDEN / name).rglob("*") if path.is_file())
    return {path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_digests() -> dict[str, str]:
    """The same as they were when the caches were made, in the form of ``sha256sum``."""
    if not DIGESTS.exists():
        return {}
    lines = (line.split("  ", 1) for line in DIGESTS.read_text(encoding="utf-8").splitlines())
    return {path: digest for digest, path in lines}


if __name__ == "__main__":
    kept = read_digests()
    for name, manifest in GOLDEN_JOBS.items():
        if not (GOLDEN / name).exists():
            write_cache(GOLDEN / name, manifest)
            (GOLDEN / name / ".lock").unlink()
        kept = digests_of(name) | kept
    DIGESTS.write_text("".join(f"{digest}  {path}\n" for path, digest in sorted(kept.items())), encoding="utf-8")
