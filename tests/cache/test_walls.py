"""The cache stands alone, and its code cites requirements that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import shd_ref.cache

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "specs" / "cache-format.md"


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_cache_needs_numpy_and_xxhash_alone() -> None:
    run("""
import sys
before = set(sys.modules)
import shd_ref.errors, numpy
import shd_ref.cache
shd_ref.cache.sample_key({"x": numpy.zeros(1)})
outside = {name.split(".")[0] for name in set(sys.modules) - before}
foreign = outside - set(sys.stdlib_module_names) - {"numpy", "xxhash", "shd_ref"}
assert not {name for name in foreign if not name.startswith("_")}, foreign
""")


def test_import_of_the_package_leaves_the_cache_alone() -> None:
    run("import sys, shd_ref; assert 'shd_ref.cache' not in sys.modules; assert 'xxhash' not in sys.modules")


def test_codecs_work_without_xxhash_and_checksums_say_what_to_install() -> None:
    run("""
import sys, numpy
sys.modules["xxhash"] = None
from shd_ref.cache import decode, encode, sample_key
from shd_ref.errors import ShdError
assert decode("bf16", encode("bf16", numpy.ones((1, 1)))) == 1
try:
    sample_key({"x": numpy.zeros(1)})
except ShdError as error:
    assert error.code == "dependency-missing" and "pip install" in str(error)
else:
    raise SystemExit("a missing dependency must be an error")
""")


def test_cited_requirements_exist() -> None:
    defined = re.findall(r"^- \*\*(CACHE-\d+)\*\*", SPEC.read_text(), re.MULTILINE)
    assert len(defined) == len(set(defined))
    folder = Path(shd_ref.cache.__file__).parent
    cited = {name for path in folder.rglob("*.py") for name in re.findall(r"CACHE-\d+", path.read_text())}
    assert cited <= set(defined)


def test_public_names_are_these() -> None:
    assert shd_ref.cache.__all__ == PUBLIC
    assert all(hasattr(shd_ref.cache, name) for name in PUBLIC)


PUBLIC = [
    "CODECS",
    "COMPRESSIONS",
    "DEFAULT_CODEC",
    "DEFAULT_FACTORED_CODEC",
    "FACTORED_CODECS",
    "FORMAT_VERSION",
    "ON_ERROR",
    "SUPPORTS",
    "Blob",
    "CacheListing",
    "CacheReader",
    "CacheWriter",
    "CodecError",
    "CodedFactors",
    "Dataset",
    "ExportSummary",
    "KindLayers",
    "LayerFactors",
    "LayerPair",
    "Manifest",
    "Matching",
    "MergeSummary",
    "NewRecord",
    "Problem",
    "Receipt",
    "Record",
    "SampleInputs",
    "Seal",
    "ShardPlan",
    "Skipped",
    "StoredRecord",
    "Teacher",
    "VerifyReport",
    "check_codes",
    "code_bits",
    "code_dtype",
    "code_values",
    "codec_error",
    "dataset_fingerprint",
    "decode",
    "decode_factors",
    "encode",
    "encode_factors",
    "export_webdataset",
    "factored_kl_bound",
    "factored_size",
    "kl_bound",
    "list_cache",
    "merge_caches",
    "merge_codec_errors",
    "pack",
    "pack_factors",
    "packed_size",
    "rebuild_maps",
    "row_bounds",
    "sample_key",
    "sqrt8_table",
    "trim_inputs",
    "trim_sample",
    "u4_table",
    "unpack",
    "unpack_factors",
    "verify_cache",
]
