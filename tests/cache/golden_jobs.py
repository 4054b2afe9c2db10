"""The caches kept in ``golden/``. ``python -m cache.golden_jobs`` writes those that do not exist yet."""

from __future__ import annotations

from pathlib import Path

from support.makers import ALONE, AVERAGED, FACTORS, FORMS, KINDS, OTHER_PLAN, PLAN, WINDOWED, job, write_cache

from shd_ref.cache import Matching, SampleInputs

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_JOBS = {
    "sqrt8-row-full": job(num_samples=3),
    "sqrt8-row-causal": job(num_samples=3, support="causal", alpha_per="row"),
    "bf16-causal": job(num_samples=3, support="causal", codec="bf16"),
    "float32-full": job(num_samples=3, codec="float32", alpha_per="row"),
    "u4-causal": job(num_samples=3, support="causal", codec="u4"),
    "sqrt8-abs-seeds": job(
        num_samples=3, codec="sqrt8-abs", inputs=SampleInputs(("input_ids",), None, "augmentation")
    ),
    "layer-plans": job(num_samples=3, plan=(), plans=(PLAN, OTHER_PLAN), matching=Matching("residual", 2, 17)),
    "factored-int8": job(num_samples=3, codec="int8", factors=FACTORS, support="causal"),
    "factored-float16": job(num_samples=3, codec="float16", factors=FACTORS),
    "factored-window": job(num_samples=3, codec="int8", factors=WINDOWED, padding="around"),
    "two-sequences": job(num_samples=3, codec="u4", alpha_per="row", **KINDS),
    "student-layers": job(num_samples=3, num_student_layers=4),
    "u4-skipped": job(num_samples=3, codec="u4", alpha_per="row", on_error="skip"),
    "topk-and-hidden-int8": job(num_samples=3, **FORMS["topk"]),
    "sampled-and-hidden-float16": job(
        num_samples=3, codec="int8", factors=WINDOWED, padding="around", **FORMS["sampled"]
    ),
    "logits-without-attention": job(num_samples=3, **ALONE["topk"]),
    "averaged-of-a-decoder": job(num_samples=3, codec="u4", **KINDS, logits=AVERAGED),
    "all-logits": job(num_samples=3, codec="u4", on_error="skip", **FORMS["float16"]),
}

if __name__ == "__main__":
    for name, manifest in GOLDEN_JOBS.items():
        if not (GOLDEN / name).exists():
            write_cache(GOLDEN / name, manifest)
            (GOLDEN / name / ".lock").unlink()
