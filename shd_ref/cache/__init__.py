"""The supervision cache (specs/cache-format.md): computed once, read by key.

``storage`` knows places and files, ``codecs`` rows and bytes, ``forms`` what a record can hold, ``documents`` the
manifest, receipts and seal. Callers use the files beside them: ``writer.py``, ``reader.py``, ``verify.py`` and so on.
Start reading with ``forms``. Needs numpy and xxhash; imports no deep-learning framework.
"""

from shd_ref.cache.codecs.codecs import (
    CODECS,
    DEFAULT_CODEC,
    SUPPORTS,
    check_codes,
    code_bits,
    code_dtype,
    code_values,
    decode,
    encode,
    pack,
    packed_size,
    sqrt8_table,
    u4_table,
    unpack,
)
from shd_ref.cache.codecs.compression import COMPRESSIONS
from shd_ref.cache.codecs.distortion import (
    CodecError,
    HiddenError,
    LogitsError,
    RowError,
    codec_error,
    kl_bound,
    merge_codec_errors,
)
from shd_ref.cache.codecs.factored import (
    DEFAULT_FACTORED_CODEC,
    FACTORED_CODECS,
    CodedFactors,
    LayerFactors,
    decode_factors,
    encode_factors,
    factored_kl_bound,
    factored_size,
    pack_factors,
    rebuild_maps,
    row_bounds,
    unpack_factors,
)
from shd_ref.cache.documents.keys import dataset_fingerprint, sample_key, trim_inputs, trim_sample
from shd_ref.cache.documents.manifest import (
    FORMAT_VERSION,
    ON_ERROR,
    Dataset,
    Manifest,
    SampleInputs,
    ShardPlan,
    Teacher,
)
from shd_ref.cache.documents.receipts import Blob, Errors, Receipt, Record, Seal, Skipped
from shd_ref.cache.export import ExportSummary, export_webdataset
from shd_ref.cache.forms.attention import Attention, KindLayers, LayerPair, Matching
from shd_ref.cache.forms.factors import Factors
from shd_ref.cache.forms.form import F32, U8, Extent, Form, NewRecord, Part, StoredRecord
from shd_ref.cache.forms.hidden import Hidden, HiddenLayer
from shd_ref.cache.forms.logits import AveragedTeacher, Logits
from shd_ref.cache.forms.maps import Maps
from shd_ref.cache.forms.table import ROWS, Forms, Row
from shd_ref.cache.listing import CacheListing, list_cache
from shd_ref.cache.merge import MergeSummary, merge_caches
from shd_ref.cache.reader import CacheReader
from shd_ref.cache.verify import Problem, VerifyReport, verify_cache
from shd_ref.cache.writer import CacheWriter

__all__ = [
    "CODECS",
    "COMPRESSIONS",
    "DEFAULT_CODEC",
    "DEFAULT_FACTORED_CODEC",
    "F32",
    "FACTORED_CODECS",
    "FORMAT_VERSION",
    "ON_ERROR",
    "ROWS",
    "SUPPORTS",
    "U8",
    "Attention",
    "AveragedTeacher",
    "Blob",
    "CacheListing",
    "CacheReader",
    "CacheWriter",
    "CodecError",
    "CodedFactors",
    "Dataset",
    "Errors",
    "ExportSummary",
    "Extent",
    "Factors",
    "Form",
    "Forms",
    "Hidden",
    "HiddenError",
    "HiddenLayer",
    "KindLayers",
    "LayerFactors",
    "LayerPair",
    "Logits",
    "LogitsError",
    "Manifest",
    "Maps",
    "Matching",
    "MergeSummary",
    "NewRecord",
    "Part",
    "Problem",
    "Receipt",
    "Record",
    "Row",
    "RowError",
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
