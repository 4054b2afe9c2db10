"""Run a teacher over a data set and fill a cache for each student in one pass, resumably."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import shd_ref
from shd_ref.cache import (
    Attention,
    CacheWriter,
    Dataset,
    Errors,
    Extent,
    Manifest,
    Receipt,
    SampleInputs,
    SampleRecord,
    ShardPlan,
    Skipped,
    dataset_fingerprint,
    list_cache,
)
from shd_ref.cache.shards import StoredFile
from shd_ref.cache.storage.storage import (
    MANIFEST_NAME,
    Folder,
    is_address,
    open_storage,
    shard_name,
    subfolder,
    write_errors,
)
from shd_ref.cache.writer import check_free, other_job
from shd_ref.errors import ShdError, need
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.options import CODECS_OF, MATCHED, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.compare import Comparison, compare_layers
from shd_ref.teacher.precompute.forms import (
    MAKERS,
    check_company,
    describe_forms,
    make_records,
    maker_of,
    measure_errors,
    options_for,
)
from shd_ref.teacher.precompute.forms.attention import matching_of
from shd_ref.teacher.run.inputs import Batch, group_shards, share_shards
from shd_ref.teacher.run.outputs import StudentOutputs, find_faults
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import provider_name, run_ahead, run_beside
from shd_ref.teacher.sources import Arrays, Source

MAX_ALPHAS: Final = 2**20
"""Alphas that a summary looks at, at least one shard's: enough for any quantile."""


@dataclass(frozen=True)
class PrecomputeSummary:
    """What ``precompute`` did and found.

    Attributes:
        samples, skipped: in the cache; without a record, because the teacher failed on them.
        missing_shards: that other processes have yet to write; the cache is sealed once no shard is missing.
        written, resumed: samples whose records this run wrote; those of its shards that were there already.
        written_by_others: samples of its shards that other processes wrote meanwhile.
        seconds: of this run.
        coded_bytes: of all codes in the cache; ``float32_bytes`` is what they teach, unpadded, as float32.
        alphas: before clipping ``(n,)``, of the first shards; ``num_clipped``, ``num_degenerate`` count over them.
        errors: coding errors, over the measured rows.
        compared_samples, comparison: how many of the first batch the reference squeezed too, and what that showed.
        remarks: what is to be known of the records, such as that they depend on the batches they were made in.
        supplied: what was fed beside the data (CACHE-36), in a line; empty for nothing.
        remark: what the reading process said of the data, such as how many texts were cut; None for nothing.
    """

    folder: Path | str
    samples: int
    missing_shards: int
    written: int
    resumed: int
    written_by_others: int
    skipped: int
    seconds: float
    coded_bytes: int
    float32_bytes: int
    alphas: NDArray[np.float32] = field(repr=False)
    num_clipped: int
    num_degenerate: int
    errors: Errors
    compared_samples: int
    comparison: Comparison | None
    remarks: tuple[str, ...] = ()
    supplied: str = ""
    remark: str | None = None


def summarise(folder: str | os.PathLike[str], manifest: Manifest, **told: Any) -> PrecomputeSummary:
    """The summary of what is committed in a cache, with the members that the run knows."""
    listing, storage = list_cache(folder), open_storage(folder)
    alphas: list[NDArray[np.float32]] = []
    for shard in listing.written:
        if sum(map(len, alphas)) < MAX_ALPHAS:
            file, receipt = StoredFile(storage, shard_name(shard)), Receipt.read(storage, shard, manifest)
            blobs = [blob for _, part, blob in receipt.stored_parts(manifest) if part.name == "alphas"]
            alphas += [file.read(blob.start, blob.end).view("<f4") for blob in blobs]
    values = np.concatenate([*alphas, np.empty(0, np.float32)])
    attention = manifest.find(Attention)
    solved = attention is not None and attention.strategy == "shd"
    return PrecomputeSummary(
        folder=folder if isinstance(folder, str) and is_address(folder) else Path(folder),
        samples=listing.samples,
        skipped=listing.skipped,
        coded_bytes=listing.coded_bytes,
        float32_bytes=listing.float32_bytes,
        alphas=values,
        num_clipped=int(((values < 0) | (values > 1)).sum()),
        num_degenerate=int((values == 0.5).sum()) if solved else 0,
        errors=listing.errors,
        **told,
    )


WINDOW_BYTES: Final = 2**30
"""Codes of a student that are held at most before their shards are written (but at least one shard's); the shard that
is being written meanwhile comes on top."""

FIRST_SAMPLES: Final = 4
"""Samples that are looked at before anything is written: what a mask leaves, and that graph and reference agree."""

OnProgress: TypeAlias = Callable[[int, int, int], None]
"""Called with samples done, samples in all and bytes written, summed over students."""

OnRead: TypeAlias = Callable[[int, int], None]
"""Called with samples read and in all, while the inputs are read for their keys and lengths."""

OpenInputs: TypeAlias = Callable[[], Source | Arrays]
"""Opens the model inputs, on any machine that it is called on."""

Students: TypeAlias = Sequence[tuple[str | os.PathLike[str], PrecomputeOptions]]
"""Each student's cache and what it holds; those of one pass differ in ``num_student_heads`` and ``plans`` alone."""

Engine: TypeAlias = Callable[
    [Path, Source | Arrays | OpenInputs, Students, RunOptions, OnProgress | None, OnRead | None],
    list[PrecomputeSummary],
]
"""What runs a job: this process, or ``ray_engine.RayEngine``."""


def run_here(
    teacher: Path,
    inputs: Source | Arrays | OpenInputs,
    students: Students,
    run: RunOptions,
    on_progress: OnProgress | None,
    on_read: OnRead | None,
) -> list[PrecomputeSummary]:
    """The engine that is this process."""
    job = PrecomputeJob(teacher, inputs() if callable(inputs) else inputs, students, run, on_read)
    job.write(job.shards, job.missing, on_progress)
    return job.finish()


def precompute(
    teacher: str | Path,
    inputs: Source | Arrays | OpenInputs,
    students: Students,
    run: RunOptions | None = None,
    *,
    engine: Engine = run_here,
    on_progress: OnProgress | None = None,
    on_read: OnRead | None = None,
) -> list[PrecomputeSummary]:
    """Squeeze a teacher's attention over a data set into caches, one for each student; a summary of each, in order.

    The first batch is also squeezed by the NumPy reference; a difference above tolerance refuses the whole run before
    anything is written. Stopping it at any moment loses at most the shards in progress: the same call goes on where
    it stopped, in the same batches.

    Args:
        teacher: an ``.onnx`` file.
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N, or what
            opens them; columns that the graph does not take are ignored.
        students: of each the cache, a folder or an address such as ``s3://bucket/cache``, new or with the same job
            begun; and what to make of the teacher, see ``students_of``.
        on_progress, on_read: called after every batch and shard; and while the inputs are read for keys and lengths.

    Raises:
        ShdError: as ``TeacherRun``; ``graph-mismatch`` (in-graph squeeze against the reference), ``cache-mismatch``
            (the folder holds another job), ``cache-exists``, ``write-failed``, ``not-finite``; ``argument-value`` for
            students that differ in more than ``num_student_heads`` and ``plans``.
    """
    return engine(Path(teacher), inputs, students, run or RunOptions(), on_progress, on_read)


def students_of(out: str | os.PathLike[str], options: PrecomputeOptions, student_heads: Sequence[int]) -> Students:
    """Students with several numbers of heads, most first; their caches are folders ``heads-<n>``."""
    is_distinct = bool(student_heads) and len(set(student_heads)) == len(student_heads)
    need(is_distinct, "argument-value", "student_heads", "be distinct numbers", list(student_heads))
    return [
        (subfolder(out, f"heads-{number}"), replace(options, num_student_heads=number))
        for number in sorted(student_heads, reverse=True)
    ]


class PrecomputeJob:
    """A pass that is ready to write ``shards``: inputs read, graph equal to the reference, manifests written."""

    def __init__(
        self,
        teacher: Path,
        inputs: Source | Arrays,
        students: Students,
        run: RunOptions,
        on_read: OnRead | None = None,
    ) -> None:
        self._started = time.monotonic()
        _check_students(students)
        for folder, options in students:
            check_destination(folder, teacher, options, run)
        options_of = [adopt_plans(folder, options, run) for folder, options in students]
        work = self._work = TeacherRun.open(teacher, inputs, options_of, run, on_read, ahead=True)
        first, comparisons = self._check_first()
        manifests = make_manifests(work, first)
        for manifest, outputs in zip(manifests, first, strict=True):
            # What a form cannot hold is refused before a manifest binds the folder to options that ask for it.
            make_records(outputs, outputs.indices, manifest, work.inputs.seed)
        check_company(work, manifests[0])
        opened = zip(students, manifests, comparisons, strict=True)
        self._caches = [
            _StudentCache(work, number, folder, manifest, comparison)
            for number, ((folder, _), manifest, comparison) in enumerate(opened)
        ]
        self.written = [cache.writer.written for cache in self._caches]  # by this job; grows
        self._compared = min(len(first[0].indices), 2)
        self.shards = share_shards(manifests[0].shards.num_shards, *run.shards)

    @functools.cached_property
    def missing(self) -> list[set[int]]:
        """For each student those of ``shards`` that were not committed when this was first asked for."""
        return self.find_missing(self.shards)

    def find_missing(self, shards: Sequence[int]) -> list[set[int]]:
        """For each student those of some shards that are not committed."""
        return [set(cache.writer.missing_shards(shards)) for cache in self._caches]

    def count_samples(self, shards: Collection[int], missing: Sequence[Collection[int]]) -> int:
        """Samples to write of all students: of those of these shards that are missing."""
        return sum(self._count(set(shards).intersection(lost)) for lost in missing)

    def windows(self) -> list[Sequence[int]]:
        """Shards of the whole job that share batches, as many as memory may hold, whoever writes which of them."""
        run, plan, inputs = self._work.run, self._caches[0].manifest.shards, self._work.inputs
        longest = Extent(max(int(inputs.lengths.max()), 1), decoder=int(inputs.decoder_lengths.max()))
        held = max(sum(form.held_size(longest) for form in cache.manifest.forms) for cache in self._caches)
        mean_length = max(1.0, float(inputs.lengths.mean()))
        per_batch = run.batch_size if run.batch_tokens is None else max(1, int(run.batch_tokens / mean_length))
        most = WINDOW_BYTES // (plan.samples_per_shard * held)
        return list(group_shards(range(plan.num_shards), plan.samples_per_shard, per_batch, most))

    def write(
        self, shards: Sequence[int], missing: Sequence[Collection[int]], on_progress: OnProgress | None = None
    ) -> None:
        """Write what ``find_missing`` says: every batch runs once, and all students take what they lack."""
        total = self._count(shards) * len(self._caches)
        progress = _Progress(on_progress, total, total - self.count_samples(shards, missing))
        progress.report()
        try:
            for window in self.windows():
                if not set(shards).isdisjoint(window):
                    self._write_window(window, missing, progress)
            for cache in self._caches:
                cache.wait(progress)
        except BaseException as error:
            for cache in self._caches:  # the shard under way is committed all the same
                try:
                    cache.wait(progress)
                except Exception as failure:
                    error.add_note(f"the shard that was being written failed too: {failure}")
            raise

    def finish(self) -> list[PrecomputeSummary]:
        """Seal every cache of which nothing is missing, and sum them up."""
        return [
            summarise(
                cache.folder,
                cache.manifest,
                missing_shards=_seal(cache.writer),
                resumed=self._count(self.shards) - self._count(lost),
                written=self._count(own),
                written_by_others=self._count(lost - own),
                seconds=time.monotonic() - self._started,
                compared_samples=self._compared,
                comparison=cache.comparison,
                remarks=self._work.remarks,
                supplied=self._work.inputs.supply,
                remark=self._work.inputs.remark,
            )
            for cache, lost, own in zip(self._caches, self.missing, self.written, strict=True)
        ]

    def _count(self, shards: Iterable[int]) -> int:
        return sum(len(self._caches[0].manifest.shard_samples(shard)) for shard in shards)

    def _write_window(self, window: Sequence[int], missing: Sequence[Collection[int]], progress: _Progress) -> None:
        """Run the batches of these shards that reach a missing one, and write each shard when it is full."""
        work, manifest = self._work, self._caches[0].manifest
        shard_of = {index: shard for shard in window for index in manifest.shard_samples(shard)}
        for cache, lost in zip(self._caches, missing, strict=True):
            cache.pending = {shard: _Pending(set(manifest.shard_samples(shard))) for shard in window if shard in lost}
        work.sessions.open(checked=True)  # samples that look faulty run again, with check outputs, on any thread
        with closing(run_ahead(self._run_step, self._steps(shard_of), work.callers)) as squeezed:
            for step, (outputs, made) in squeezed:
                again = functools.cache(self._check_again)
                for (cache, _), result in zip(step.takers, made, strict=True):
                    own = outputs[cache.number] if outputs else None
                    progress.samples += cache.take(step.batch.indices, result, own, again, progress)
                progress.report()
                del outputs, own, made, result  # before the next are waited for

    def _run_step(self, step: _Step) -> tuple[tuple[StudentOutputs, ...] | None, list[_Made]]:
        """Run a batch and make its records, on any thread; its outputs too, where coding errors are measured."""
        outputs = self._work.squeeze(step.batch, checked=step.checked)
        records = [cache.make(outputs[cache.number], shards) for cache, shards in step.takers]
        return outputs if step.first else None, records

    def _steps(self, shard_of: Mapping[int, int]) -> Iterator[_Step]:
        """The batches of a window in order, the same whatever is missing: a resumed run gives the same bytes."""
        work = self._work
        begun: set[int] = set()
        for indices in work.groups(shard_of):
            shards = {shard_of[index] for index in indices}
            first = not shards <= begun
            begun |= shards
            takers = [(cache, lacked) for cache in self._caches if (lacked := sorted(cache.pending.keys() & shards))]
            if takers:
                checked = first and work.count_checked(indices) == len(indices)
                work.sessions.open(checked=checked)
                yield _Step(work.inputs.batch(indices), first, checked, takers)

    def _check_again(self, indices: tuple[int, ...]) -> tuple[StudentOutputs, ...]:
        """The check outputs of as many of these samples as may yield them at once."""
        chosen = indices[: self._work.count_checked(indices)]
        return self._work.squeeze(self._work.inputs.batch(chosen), checked=True)

    def _check_first(self) -> tuple[list[StudentOutputs], list[Comparison | None]]:
        """A few of the longest samples without a fault, by student, and how their maps compare with the reference."""
        work = self._work
        for batch in work.checked_batches(range(len(work.inputs)), FIRST_SAMPLES):
            faulty: set[int] = set()
            # By map, which keeps nothing of a part while the next one runs.
            parts = list(map(functools.partial(self._check_part, faulty), work.squeeze_parts(batch)))
            sound = [number for number, index in enumerate(batch.indices) if index not in faulty]
            if sound:
                columns = list(zip(*parts, strict=True))
                joined = [StudentOutputs.joined([outputs for outputs, _ in column]) for column in columns]
                layers = [list(chain.from_iterable(compared for _, compared in column)) for column in columns]
                comparisons = [Comparison.merged(compared) if compared else None for compared in layers]
                all_sound = len(sound) == len(batch.indices)  # then no copy is needed
                return [outputs if all_sound else outputs[sound] for outputs in joined], comparisons
        raise ShdError("not-finite", "the teacher gives NaN or infinity on every sample: check its inputs", "MAP-5")

    def _check_part(
        self, faulty: set[int], outputs: Sequence[StudentOutputs]
    ) -> list[tuple[StudentOutputs, list[Comparison]]]:
        """Outputs without check outputs, and how their layers compare; faulty samples are noted, and left out."""
        work, indices = self._work, outputs[0].indices
        faulty |= {index for student in outputs for index in find_faults(work, student)}
        sound = [number for number, index in enumerate(indices) if index not in faulty]
        checked = []
        for student in outputs:
            compared: list[Comparison] = []
            if sound and student.layers:
                # In float64, so of a few: the ends of the batch, which are its longest sample and its shortest.
                few = student[sorted({sound[0], sound[-1]})]
                compared = compare_layers(few.layers, work.callers)
                for number in sound:
                    sample = student[number]
                    for maker in MAKERS.values():
                        maker.compare(work, sample)
            layers = tuple(layer.without_check() for layer in student.layers)
            checked.append((replace(student, layers=layers), compared))
        return checked


class _Step(NamedTuple):
    """A batch that runs; errors are measured on the first of a shard. Takers lack samples of it in these shards."""

    batch: Batch
    first: bool
    checked: bool
    takers: Sequence[tuple[_StudentCache, Sequence[int]]]


_Made: TypeAlias = tuple[Mapping[int, str], Mapping[int, list[SampleRecord]]]
"""What a batch gave a cache: what is wrong with samples, by index; and the records of all others, by shard."""


@dataclass
class _Pending:
    samples: set[int]
    records: list[SampleRecord] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: Errors | None = None


@dataclass
class _Progress:
    on_progress: OnProgress | None
    total: int
    samples: int
    written: int = 0

    def report(self, size: int = 0) -> None:
        self.written += size
        if self.on_progress is not None:
            self.on_progress(self.samples, self.total, self.written)


class _StudentCache:
    """A student's cache in the making; shards are committed in the background, one at a time."""

    def __init__(
        self,
        work: TeacherRun,
        number: int,
        folder: str | os.PathLike[str],
        manifest: Manifest,
        comparison: Comparison | None,
    ) -> None:
        self._work, self.number, self.folder = work, number, folder
        self.manifest, self.comparison = manifest, comparison
        self.writer = CacheWriter(folder, manifest)
        for form in manifest.forms:
            for file in form.files:
                self.writer.write_file(file, maker_of(form).files(work, form)[file.name])
        self.pending: dict[int, _Pending] = {}
        self._under_way: Callable[[], Receipt] | None = None

    def make(self, outputs: StudentOutputs, shards: Iterable[int]) -> _Made:
        faults = find_faults(self._work, outputs)
        lacked = {shard: self.pending[shard].samples - faults.keys() for shard in shards}
        records = {
            shard: make_records(outputs, samples, self.manifest, self._work.inputs.seed)
            for shard, samples in lacked.items()
        }
        return faults, records

    def take(
        self,
        indices: Sequence[int],
        made: _Made,
        outputs: StudentOutputs | None,
        check_again: Callable[[tuple[int, ...]], tuple[StudentOutputs, ...]],
        progress: _Progress,
    ) -> int:
        """Take what ``make`` made of a batch, and commit full shards; how many samples were taken."""
        inputs, num_samples = self._work.inputs, 0
        faults, by_shard = made
        for shard, records in by_shard.items():
            pending = self.pending[shard]
            skipped = [index for index in indices if index in pending.samples & faults.keys()]
            pending.records += records
            pending.skipped += [Skipped(i, inputs.key(i), faults[i], inputs.seed(i)) for i in skipped]
            num_samples += len(records) + len(skipped)
            if pending.errors is None and outputs is not None and records:
                pending.errors = self._measure(outputs, records, check_again)
            if len(pending.records) + len(pending.skipped) == len(pending.samples):
                self._commit(shard, self.pending.pop(shard), progress)
        return num_samples

    def wait(self, progress: _Progress) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            progress.report(under_way().size)

    def _commit(self, shard: int, full: _Pending, progress: _Progress) -> None:
        self.wait(progress)
        errors = full.errors or Errors.unmeasured(self.manifest)
        write = functools.partial(self.writer.write_shard, shard, full.records, errors, full.skipped)
        self._under_way = run_beside(write, self._work.callers)
        if not self._work.callers:
            self.wait(progress)

    def _measure(
        self,
        outputs: StudentOutputs,
        records: Sequence[SampleRecord],
        check_again: Callable[[tuple[int, ...]], tuple[StudentOutputs, ...]],
    ) -> Errors:
        """What coding cost these records, or the first of them where check outputs of all would take too much."""
        if outputs.layers and not outputs.layers[0].has_check:
            outputs = check_again(tuple(record.index for record in records))[self.number]
            records = [record for record in records if record.index in outputs.indices]
        return measure_errors(outputs, records, self.manifest)


def _check_students(students: Students) -> None:
    """Refuse students that cannot share a pass, before a manifest of any is written."""
    heads = [options.num_student_heads for _, options in students]
    is_distinct = bool(students) and all(heads.count(number) == 1 for number in heads)
    need(is_distinct, "argument-value", "students", "be at least one, with distinct numbers of heads", heads)
    roots = [open_storage(folder).root for folder, _ in students]
    places = [os.path.realpath(root) if isinstance(root, Path) else root for root in roots]
    apart = not any(f"{inner}/".startswith(f"{outer}/") for inner, outer in permutations(places, 2))
    rule = "each have their own cache, none inside another's"
    need(apart, "argument-value", "students", rule, ", ".join(places))
    first = students[0][1]
    for _, options in students[1:]:
        # As they are written: NaN, which is refused by its own rule, is no difference.
        pairs = (
            (field.name, *(repr(getattr(one, field.name)) for one in (first, options))) for field in fields(options)
        )
        own = ("num_student_heads", "plans")
        differing = [f"{name} {one} and {other}" for name, one, other in pairs if name not in own and one != other]
        rule, got = "have the same options except num_student_heads and plans", ", ".join(differing)
        need(not differing, "argument-value", "students of one pass", rule, got, remedy="give each its own run")


def _seal(writer: CacheWriter) -> int:
    """Seal a cache, unless shards are missing; how many are. Two processes at once write the same seal."""
    while True:
        try:
            writer.seal()
        except ShdError as error:
            if error.code != "cache-incomplete":
                raise
            missing = len(writer.missing_shards())
            if missing:
                return missing
            # Another process committed the last one just now, and may have died before it sealed.
        else:
            return 0


SHARD_BYTES: Final = 256 * 2**20
"""Default size of a shard, unless the data set is small."""
LEAST_SHARDS: Final = 16
"""A killed run loses at most the shards in progress: even a small data set has a few."""


def check_destination(folder: Folder, teacher: Path, options: PrecomputeOptions, run: RunOptions) -> None:
    """Refuse a place that cannot become this job's cache, as far as options tell; ``CacheWriter`` knows the rest."""
    storage = open_storage(folder)
    if isinstance(storage.root, Path):
        with write_errors(storage.root):
            _check_folder(storage.root)
    check_free(storage)
    if not storage.exists(MANIFEST_NAME):
        return
    existing = Manifest.read(storage)
    size = existing.shards.samples_per_shard
    members: list[tuple[str, object, object]] = [
        ("spec_version", existing.spec_version, shd_ref.SPEC_VERSION),
        ("teacher.name", existing.teacher.name, teacher.name),
        ("teacher.provider", existing.teacher.provider, provider_name(run.provider)),
        ("shards.seed", existing.shards.seed, run.seed),
        ("shards.samples_per_shard", size, size if run.samples_per_shard is None else run.samples_per_shard),
    ]
    named = options_for(existing) | {"on_error": existing.on_error, "seed_column": existing.inputs.seed}
    stored, asked = _decided(PrecomputeOptions(**named)), _decided(options)
    members += [(name, stored.get(name), asked.get(name)) for name in dict.fromkeys((*stored, *asked))]
    form = existing.find(Attention)
    if (
        form is not None
        and options.has_attention
        and options.plans is None
        and MATCHED not in (options.plan, stored["plan"])
    ):
        heads = min(options.num_student_heads, form.num_teacher_heads)  # more are another job in any case
        members.append(("plan", form.plan, merge_plan(form.num_teacher_heads, heads, options.plan)))
    differences = [f"{name}: {old!r} -> {new!r}" for name, old, new in members if old != new]
    if differences:
        raise other_job(storage.root, differences)


def _decided(options: PrecomputeOptions) -> dict[str, object]:
    """What options decide before a sample is read, by name: the rest needs the graph, or changes no record."""
    names = ["form", "logits", "on_error", "seed_column"]
    names += ["hidden_codec"] if options.hidden else []
    names += ["embeddings_codec"] if options.embeddings else []
    if options.has_attention:
        names += ["num_student_heads", "strategy", "temperature", CODECS_OF[options.form][0], "groups"]
        names += ["matched_by", "calibration_samples"] if options.plan == MATCHED else []
    others = [path.name for path in options.with_teachers]
    plan = MATCHED if options.plan == MATCHED else "not matched"
    told = {"plan": plan, "hidden": sorted(options.hidden), "embeddings": str(options.embeddings)}
    return {name: getattr(options, name) for name in names} | told | {"with_teachers": others}


def _check_folder(root: Path) -> None:
    there = next(path for path in (root, *root.parents) if path.exists())
    if there == root and not root.is_dir():
        raise ShdError("cache-exists", f"{root} must be a folder; it is a file: name another --out", "CACHE-60")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written" if there.is_dir() else "is a file"
        raise ShdError("write-failed", f"{root} could not be written: {there} {reason}: name another --out")


def adopt_plans(folder: Folder, options: PrecomputeOptions, run: RunOptions) -> PrecomputeOptions:
    """The options, with the plans that the manifest of this job says where they are matched (CACHE-103)."""
    if matching_of(options, run) is None or not open_storage(folder).exists(MANIFEST_NAME):
        return options
    form = Manifest.read(folder).find(Attention)
    if form is None or (form.matching, form.num_student_heads) != (
        matching_of(options, run),
        options.num_student_heads,
    ):
        return options
    return replace(options, plans=form.layer_plans)


def make_manifests(work: TeacherRun, outputs: Sequence[StudentOutputs]) -> list[Manifest]:
    """The manifest of every student, with equally many samples per shard, so that all share their batches."""
    run, inputs, count = work.run, work.inputs, len(work.inputs)
    forms = [describe_forms(work, output) for output in outputs]
    for stored in forms if work.options.groups is not None else ():
        others = [form.SUBJECT for form in stored.forms if getattr(form, "rows", "sample") != "sample"]
        rule, why = "be left out where rows of positions are stored", "these are of the teacher's tokens"
        need(not others, "argument-value", "groups", rule, ", ".join(others), remedy=why, spec_id="CACHE-131")
    per_sample = max(
        sum(form.coded_size(of_student.extent_of(output[0].extent)) for form in of_student.forms)
        for of_student, output in zip(forms, outputs, strict=True)
    )
    size = run.samples_per_shard or max(1, min(SHARD_BYTES // per_sample, math.ceil(count / LEAST_SHARDS)))
    teacher = work.fingerprint()
    fingerprint = dataset_fingerprint(inputs.key(index) for index in range(count))
    return [
        Manifest(
            spec_version=shd_ref.SPEC_VERSION,
            created_by=f"squeezing-heads {shd_ref.__version__}",
            teacher=teacher,
            forms=of_student.forms,
            on_error=output.student.options.on_error,
            inputs=SampleInputs(
                names=inputs.names,
                mask=inputs.mask,
                seed=inputs.seed_column,
                decoder=inputs.decoder,
                decoder_mask=inputs.decoder_mask,
            ),
            dataset=Dataset(fingerprint=fingerprint, num_samples=count),
            shards=ShardPlan(samples_per_shard=size, seed=run.seed, num_shards=math.ceil(count / size)),
        )
        for of_student, output in zip(forms, outputs, strict=True)
    ]
