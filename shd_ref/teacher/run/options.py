"""The options of a teacher's run: what to make of the teacher, and how to run it.

Kept apart from what runs a graph, so that the commands can show them without loading onnx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shd_ref.alpha import ALPHA_PER, ALPHA_RULES, check_option
from shd_ref.attention import check_temperature
from shd_ref.cache import CODECS, DEFAULT_FACTORED_CODEC
from shd_ref.cache.codecs.compression import COMPRESSIONS, check_compression
from shd_ref.cache.codecs.factored import check_factored_codec
from shd_ref.cache.documents.manifest import ON_ERROR
from shd_ref.cache.storage.documents import MAX_INTEGER
from shd_ref.errors import ShdError
from shd_ref.mixing import STRATEGIES
from shd_ref.plans import MergePlan

CALIBRATION_SAMPLES: Final = 16
"""Enough for matched plans to settle: pairs are chosen by sums over all rows of all samples."""

FORMS: Final = ("maps", "factored")
"""What records hold: merged maps, or the teacher's queries and keys."""

MATCHED: Final = "matched"
"""The plan that is chosen on the data."""


@dataclass(frozen=True)
class PrecomputeOptions:
    """What to make of the teacher; see ``shd_ref.squeeze_heads`` for the meaning.

    Attributes:
        num_student_heads: H_s.
        num_student_layers: L_s, how many attention calls the student makes; by default as many as the teacher has
            attention sites, or as were selected. Where the graph has cross attention, a number for each kind
            (``encoder``, ``decoder``, ``cross``) that is to be taught.
        layer_pairs: explicit ``(student, teacher)`` pairs, zero-based, in place of the default map. Without
            ``num_student_layers`` the student may make more calls than they name.
        sites: which of the teacher's attention sites the default map runs over, see ``select_sites``; default all.
        plan: a kind, explicit rounds, or ``"matched"``: pairs chosen by ``matched_plan`` on a sample of the data,
            layer by layer, with the run's seed.
        matched_by: ``residual`` or ``similarity``, for matched plans.
        calibration_samples: how many samples they are matched on.
        plans: in place of ``plan``: rounds for every layer, in the order of the student's layers.
        form: ``maps``, or ``factored``: queries and keys, which are smaller for long samples.
        factored_codec: one of ``shd_ref.cache.FACTORED_CODECS``, of queries and keys.
        codec: of maps, one of ``shd_ref.cache.CODECS``. ``sqrt8-row`` is coded inside the graph, the others on the
            host.
        compression: of stored blobs: ``none`` or ``zstd``.
        on_error: what to do with a sample on which the teacher gives NaN: ``stop``, or ``skip`` and name it.
        seed_column: column of the inputs with each sample's augmentation seed, stored beside its maps.
    """

    num_student_heads: int
    num_student_layers: int | Mapping[str, int] | None = None
    layer_pairs: tuple[tuple[int, int], ...] | None = None
    sites: str | None = None
    plan: str | MergePlan = "progressive"
    matched_by: str = "residual"
    calibration_samples: int = CALIBRATION_SAMPLES
    plans: tuple[MergePlan, ...] | None = None
    strategy: str = "shd"
    alpha_rule: str = "least_squares"
    alpha_per: str = "map"
    temperature: float = 1.0
    form: str = "maps"
    factored_codec: str = DEFAULT_FACTORED_CODEC
    codec: str = "sqrt8-row"
    compression: str = "none"
    on_error: str = "stop"
    seed_column: str | None = None

    @property
    def is_factored(self) -> bool:
        """Whether records hold queries and keys."""
        return self.form == "factored"

    @property
    def stored_codec(self) -> str:
        """The codec of what records hold."""
        return self.factored_codec if self.is_factored else self.codec


@dataclass(frozen=True)
class RunOptions:
    """How to run it; none of these changes what a cache means.

    Attributes:
        mask: name of the attention-mask input, if it is not one of the usual; of an encoder-decoder the encoder's.
        decoder_mask: name of the decoder's attention-mask input, if it is not one of the usual.
        batch_size: samples a teacher call.
        batch_tokens: in place of ``batch_size``: positions a teacher call, so that short samples fill it too.
        samples_per_shard: by default shards of about 256 MiB, and at least 16 of them.
        seed: of the order in which samples are dealt to shards.
        provider: ``cpu``, ``cuda`` or an onnxruntime name.
        num_threads: of onnxruntime; its own choice by default.
        shards: ``(i, n)``: write part i of n of the shards, counted from 0, and leave the others to other processes.
    """

    mask: str | None = None
    decoder_mask: str | None = None
    batch_size: int = 16
    batch_tokens: int | None = None
    samples_per_shard: int | None = None
    seed: int = 0
    provider: str = "cpu"
    num_threads: int | None = None
    shards: tuple[int, int] = (0, 1)


def check_options(options: PrecomputeOptions) -> None:
    """Refuse what no teacher can be asked for.

    Raises:
        ShdError: ``argument-value``; ``dependency-missing`` where the compression needs a package.
    """
    check_option("strategy", options.strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", options.alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", options.alpha_per, ALPHA_PER, "ALPHA-9")
    check_option("codec", options.codec, CODECS, "CACHE-30")
    check_option("compression", options.compression, COMPRESSIONS, "CACHE-55")
    check_option("on_error", options.on_error, ON_ERROR, "CACHE-58")
    check_compression(options.compression)
    check_temperature(options.temperature)
    _check_form(options)


def check_run(run: RunOptions) -> None:
    """Refuse what no run can be done with, before a teacher is loaded or a sample read.

    Raises:
        ShdError: ``argument-value``, ``provider-unavailable``, ``dependency-missing``.
    """
    for name in ("batch_size", "batch_tokens", "samples_per_shard"):
        number = getattr(run, name)
        if number is not None and not 1 <= number <= MAX_INTEGER:
            raise ShdError("argument-value", f"{name} must be 1 to {MAX_INTEGER}; got {number}")
    if not 0 <= run.seed <= MAX_INTEGER:
        raise ShdError("argument-value", f"seed must be 0 to {MAX_INTEGER}; got {run.seed}", "CACHE-12")
    from shd_ref.teacher.session import check_session  # loads onnx

    check_session(run.provider, run.num_threads)


def _check_form(options: PrecomputeOptions) -> None:
    check_option("form", options.form, FORMS, "CACHE-100")
    if not options.is_factored:
        return
    check_factored_codec(options.factored_codec)
    for name, value, only in (("alpha_per", options.alpha_per, "map"), ("temperature", options.temperature, 1.0)):
        if value != only:
            raise ShdError(
                "argument-value",
                f"{name} must be {only} for factored records; got {value}: the temperature is chosen with the loss, "
                "and one weight per map is stored; use --form maps for others",
                "CACHE-101",
            )
