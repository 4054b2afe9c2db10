"""The supervision cache (specs/cache-format.md): computed once, read by key. Needs numpy and xxhash.

A record has parts of some ``forms``, which ``codecs`` turn into bytes. ``documents`` say what a cache is made of
and what is committed: ``writer.py`` writes a shard (``shards.py``), then its receipt, and the seal at the end, and
merges parts of a job; ``reader.py`` reads records by key, ``audit.py`` lists and checks every byte.
"""

from types import ModuleType as _ModuleType

from shd_ref.cache.audit import CacheListing as CacheListing
from shd_ref.cache.audit import Problem as Problem
from shd_ref.cache.audit import VerifyReport as VerifyReport
from shd_ref.cache.audit import list_cache as list_cache
from shd_ref.cache.audit import verify_cache as verify_cache
from shd_ref.cache.codecs.codecs import CODECS as CODECS
from shd_ref.cache.codecs.codecs import SUPPORTS as SUPPORTS
from shd_ref.cache.codecs.codecs import CodecError as CodecError
from shd_ref.cache.codecs.codecs import HiddenError as HiddenError
from shd_ref.cache.codecs.codecs import LogitsError as LogitsError
from shd_ref.cache.codecs.codecs import RowError as RowError
from shd_ref.cache.codecs.codecs import code_bits as code_bits
from shd_ref.cache.codecs.codecs import codec_error as codec_error
from shd_ref.cache.codecs.codecs import decode as decode
from shd_ref.cache.codecs.codecs import encode as encode
from shd_ref.cache.codecs.codecs import pack as pack
from shd_ref.cache.codecs.codecs import packed_size as packed_size
from shd_ref.cache.codecs.codecs import unpack as unpack
from shd_ref.cache.codecs.factored import FACTORED_CODECS as FACTORED_CODECS
from shd_ref.cache.codecs.factored import LayerFactors as LayerFactors
from shd_ref.cache.codecs.factored import decode_factors as decode_factors
from shd_ref.cache.codecs.factored import encode_factors as encode_factors
from shd_ref.cache.codecs.factored import rebuild_maps as rebuild_maps
from shd_ref.cache.documents import Dataset as Dataset
from shd_ref.cache.documents import Errors as Errors
from shd_ref.cache.documents import Manifest as Manifest
from shd_ref.cache.documents import Receipt as Receipt
from shd_ref.cache.documents import Record as Record
from shd_ref.cache.documents import SampleInputs as SampleInputs
from shd_ref.cache.documents import ShardPlan as ShardPlan
from shd_ref.cache.documents import Skipped as Skipped
from shd_ref.cache.documents import Teacher as Teacher
from shd_ref.cache.forms import FORMS as FORMS
from shd_ref.cache.forms.attention import Attention as Attention
from shd_ref.cache.forms.attention import Factors as Factors
from shd_ref.cache.forms.attention import KindLayers as KindLayers
from shd_ref.cache.forms.attention import LayerPair as LayerPair
from shd_ref.cache.forms.attention import Maps as Maps
from shd_ref.cache.forms.attention import Matching as Matching
from shd_ref.cache.forms.exact import Exact as Exact
from shd_ref.cache.forms.exact import FinalNorm as FinalNorm
from shd_ref.cache.forms.exact import TeacherHead as TeacherHead
from shd_ref.cache.forms.form import U8 as U8
from shd_ref.cache.forms.form import Extent as Extent
from shd_ref.cache.forms.form import Form as Form
from shd_ref.cache.forms.form import Part as Part
from shd_ref.cache.forms.form import SampleRecord as SampleRecord
from shd_ref.cache.forms.rows import AveragedTeacher as AveragedTeacher
from shd_ref.cache.forms.rows import Embeddings as Embeddings
from shd_ref.cache.forms.rows import Hidden as Hidden
from shd_ref.cache.forms.rows import HiddenLayer as HiddenLayer
from shd_ref.cache.forms.rows import Logits as Logits
from shd_ref.cache.reader import CacheReader as CacheReader
from shd_ref.cache.storage.keys import dataset_fingerprint as dataset_fingerprint
from shd_ref.cache.storage.keys import sample_key as sample_key
from shd_ref.cache.storage.keys import trim_inputs as trim_inputs
from shd_ref.cache.storage.keys import trim_sample as trim_sample
from shd_ref.cache.writer import CacheWriter as CacheWriter
from shd_ref.cache.writer import MergeSummary as MergeSummary
from shd_ref.cache.writer import merge_caches as merge_caches

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _ModuleType)]
