"""A pair of models, examined from their configurations to a short training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.teacher.sources.sentence_folder import find_pooling
from shd_ref.teacher.study.fidelity import Fidelity, recommend
from shd_torch.capture import capture_attention
from shd_torch.doctor.differences import BLOCKS, EFFECTS, Difference, compare_parts, compare_tokenizers
from shd_torch.doctor.graph import Arrays, Progress, measure_graph, measure_model
from shd_torch.doctor.objective import Objective, choose_objective, inputs_of, mask_of
from shd_torch.doctor.pair import Parts, Student, Teacher, parts_of, read_student, read_teacher
from shd_torch.doctor.probe import BetaRange, DiagnosisOptions, Probe, Trial, check_probe, find_beta, run_probe
from shd_torch.doctor.verdict import Verdict, judge
from shd_torch.maps import layer_map
from shd_torch.recipes.terms import IGNORED
from shd_torch.teacher import OnlineTeacher
from shd_torch.teacher.online import layer_kls


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        teacher, student: names.
        teacher_parts: None of a graph.
        student_parts: of the student.
        differences: those that block first.
        has_weights: whether the student's folder contains weights.
        is_squeezed: whether ``shrink`` made it.
        fidelity: of the teacher's graph; None without data.
        objective: the base loss; None without data or for a graph.
        beta: the range for it.
        probe: the paired run, if requested.
        unmeasured: why the teacher's graph could not be exported, if needed.
        untried: why the two were not run together, although they may be compatible.
        failure: why the two could not be run together.
        verdict: the answer.
    """

    teacher: str
    student: str
    teacher_parts: Parts | None
    student_parts: Parts
    differences: tuple[Difference, ...]
    has_weights: bool
    is_squeezed: bool
    fidelity: tuple[Fidelity, ...] | None = None
    objective: Objective | None = None
    beta: BetaRange | None = None
    probe: Probe | None = None
    unmeasured: str | None = None
    untried: str | None = None
    failure: str | None = None
    verdict: Verdict = field(init=False)

    @property
    def squeezed(self) -> Fidelity | None:
        """The way to squeeze that is recommended at the student's heads."""
        return recommend(self.fidelity) if self.fidelity else None

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        squeezed, probe = self.squeezed, self.probe
        document: dict[str, Any] = {
            "verdict": asdict(self.verdict),
            "teacher": {"name": self.teacher} | ({} if self.teacher_parts is None else asdict(self.teacher_parts)),
            "student": {"source": self.student, "has_weights": self.has_weights, "is_squeezed": self.is_squeezed}
            | asdict(self.student_parts),
            "differences": [asdict(one) for one in self.differences],
            "fidelity": None,
            "recipe": None if self.objective is None else asdict(self.objective),
            "beta": None if self.beta is None else asdict(self.beta),
            "unmeasured": self.unmeasured,
            "untried": self.untried,
            "failure": self.failure,
            "probe": None,
        }
        if squeezed is not None:
            document["fidelity"] = {"num_student_heads": self.student_parts.heads} | asdict(squeezed)
        if probe is not None:
            said = {name: getattr(probe, name) for name in ("gains", "gain", "margin", "seeds_needed")}
            document["probe"] = asdict(probe) | said | {"indistinguishable": not probe.is_distinguishable}
            document["probe"]["options"]["steps"] = document["probe"]["options"].pop("probe")
        return document


def diagnose(
    teacher: str,
    student: str,
    data: Arrays | None = None,
    options: DiagnosisOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Diagnosis:
    """Examine a pair: will attention supervision work for it?

    Args:
        teacher: a Hugging Face folder or hub id with safetensors, or an ``.onnx`` file.
        student: a folder or hub id; a configuration without weights means random initialisation.
        data: the models' inputs by name ``(N, ...)``, with optional ``labels``; None compares only the
            configurations.
        options: a probe, and how.
        progress: called with the numbers of finished and of all steps (0 if unknown) and the current step.

    Raises:
        ShdError: ``read-failed``, ``argument-value``; what the measurements raise.
    """
    options, tell = options or DiagnosisOptions(), progress or (lambda *_: None)
    tell(0, 0, "models are read")
    check_probe(options, None if data is None else len(next(iter(data.values()))))
    taught, learner = read_teacher(teacher), read_student(student)
    if options.probe and taught.model is None:
        rule = "teacher must be a Hugging Face folder for a probe, which runs it at every step"
        advice = "give its folder, or make a cache (shd precompute) and train with and without it (docs/doctor.md)"
        raise ShdError("argument-value", f"{rule}; got {teacher!r}: {advice}")
    own = parts_of(learner.make(0))
    parts = None if taught.model is None else parts_of(taught.model)
    tokens = compare_tokenizers(taught.folder, learner.folder) if own.patches is None else []
    by_parts = [] if parts is None else compare_parts(parts, own)
    # Of tokenizers first: other tokens make all else vain.
    differences = tuple(sorted([*tokens, *by_parts], key=lambda one: EFFECTS.index(one.effect)))
    diagnosis = Diagnosis(teacher, student, parts, own, differences, learner.has_weights, learner.is_squeezed)
    if data is not None and not any(one.effect == BLOCKS for one in diagnosis.differences):
        _measure(diagnosis, taught, learner, data, options, tell)
    diagnosis.verdict = judge(
        diagnosis.differences,
        diagnosis.squeezed,
        diagnosis.probe,
        heads=own.heads,
        is_squeezed_start=diagnosis.is_squeezed,
        failure=diagnosis.failure,
        is_measurable=diagnosis.unmeasured is None,
    )
    return diagnosis


def _measure(
    diagnosis: Diagnosis, teacher: Teacher, student: Student, data: Arrays, options: DiagnosisOptions, tell: Progress
) -> None:
    own = diagnosis.student_parts
    arrays = {name: array for name, array in data.items() if name != "labels"}
    for tokens, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if tokens in arrays and mask not in arrays:
            arrays[mask] = (arrays[tokens] >= 0).astype("int64")
    _check_tokens(arrays, None if diagnosis.teacher_parts is None else diagnosis.teacher_parts.vocabulary)
    if teacher.graph is not None:
        try:
            diagnosis.fidelity = measure_graph(teacher.graph, arrays, own.heads, progress=tell)
        except ShdError as error:
            if error.code != "heads-exceed":  # a graph's heads are known by now alone
                raise
            diagnosis.failure = str(error)
        return
    batch: dict[str, Tensor] = {name: torch.as_tensor(array) for name, array in arrays.items()}
    batch = {name: array.float() if array.is_floating_point() else array.long() for name, array in batch.items()}
    if "labels" in data:
        batch["labels"] = torch.as_tensor(data["labels"]).long()
        _check_labels(batch["labels"], own)
    model = teacher.model
    try:
        diagnosis.fidelity = measure_model(model, arrays, own.heads, progress=tell)
    except ShdError as error:
        if not error.code.startswith(("export-", "graph-")):
            raise
        diagnosis.unmeasured = str(error)
    diagnosis.failure = _find_unknown(batch, own)
    diagnosis.untried = None if diagnosis.failure is not None else _find_other_rows(diagnosis, model)
    if diagnosis.failure is not None or diagnosis.untried is not None:
        return
    start = student.make(0)
    few = {name: array[:2] for name, array in batch.items()}
    live = _try_together(diagnosis, model, student, start, inputs_of(few))
    if live is None:
        return
    pooling = None if teacher.folder is None else find_pooling(teacher.folder)
    diagnosis.objective = choose_objective(start, model, few, None if pooling is None else pooling.mode)
    if diagnosis.objective is None:
        diagnosis.untried = (
            "the student has no head, and its last hidden states are not of the teacher's width, so that nothing but "
            "attention could be compared: name a class with a head in its config.json, as architectures, or train it "
            "with SHDTrainer (beta and hidden) and judge it by your task"
        )
        return
    trial = Trial(live, diagnosis.objective, batch, options)
    diagnosis.beta = find_beta(trial, start, lambda done, total: tell(done, total, "steps to beta"))
    if options.probe:
        options = replace(options, beta=diagnosis.beta.middle if options.beta is None else options.beta)
        diagnosis.probe = run_probe(
            replace(trial, options=options), student.make, lambda done, total: tell(done, total, "steps of the probe")
        )


def _check_labels(labels: Tensor, student: Parts) -> None:
    """Refuse classes that the student lacks; of a text -100 is none."""
    classes = student.labels if labels.ndim == 1 else student.vocabulary
    counted = labels[labels != IGNORED]
    if classes is not None and counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        rule = f"data must hold labels below the student's {classes} classes, or {IGNORED}"
        raise ShdError("argument-value", f"{rule}; got {int(counted.min())} to {int(counted.max())}")


def _find_unknown(batch: Mapping[str, Tensor], student: Parts) -> str | None:
    """Tokens that the student cannot read; None where it knows all."""
    tokens, size = batch.get("input_ids"), student.vocabulary
    if tokens is None or size is None or int(tokens.max()) < size:
        return None
    problem = f"the data has token {int(tokens.max())}, and the student a vocabulary of {size}"
    return f"{problem}: give it the teacher's tokenizer and vocabulary"


def live_teacher(diagnosis: Diagnosis, model: Any, student: Student) -> OnlineTeacher:
    """The teacher, squeezed as the student was, or as the fidelity test recommends."""
    if student.is_squeezed:
        return OnlineTeacher.for_student(model, student.folder)
    own, best = diagnosis.student_parts, diagnosis.squeezed
    parts = diagnosis.teacher_parts
    assert parts is not None  # a model has them
    sites = parts.layers if best is None else len(best.plans)
    pairs = layer_map(sites, min(own.layers, sites))
    plan: Any = None
    options: Mapping[str, Any] = {}
    if best is not None:
        plan = {layer: best.plans[layer] for _, layer in pairs}
        options = {"strategy": best.strategy}
    return OnlineTeacher(model, own.heads, pairs, plan=plan, **options)


def _check_tokens(arrays: Arrays, vocabulary: int | None) -> None:
    """Refuse texts that have no next token, and tokens that the teacher lacks."""
    tokens = arrays.get("input_ids")
    if tokens is None:
        return
    longest = int(arrays["attention_mask"].sum(-1).max()) if tokens.ndim == 2 and len(tokens) else 0
    if longest < 2:
        rule = "data must hold texts of at least 2 tokens, as attention of one token is always 1"
        raise ShdError("argument-value", f"{rule}; got {longest}")
    if vocabulary is not None and int(tokens.max()) >= vocabulary:
        rule = f"data must hold tokens below the teacher's vocabulary of {vocabulary}; got {int(tokens.max())}"
        raise ShdError("argument-value", f"{rule}: use the teacher's tokenizer")


def _find_other_rows(diagnosis: Diagnosis, model: Any) -> str | None:
    """Why maps of the two have other rows, so that they cannot be trained as they are; None where they have not."""
    own, parts = diagnosis.student_parts, diagnosis.teacher_parts
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder-decoder is measured and not trained here; examples/encoder_decoder.py trains one"
    if parts is not None and parts.patches is not None and parts.specials != own.specials:
        return (
            f"the teacher has {parts.specials} extra tokens besides the patches, the student {own.specials}: give it "
            "the same, or cut the merged maps with shd_torch.maps.align_tokens in your own training"
        )
    return None


def _try_together(
    diagnosis: Diagnosis, model: Any, student: Student, start: Any, inputs: Mapping[str, Any]
) -> OnlineTeacher | None:
    """The live teacher, after both ran on a batch; else ``diagnosis`` says why not.

    A teacher whose attention cannot be read as it runs may still teach from a cache, if its graph can be read.
    """
    taught, problem = None, None
    try:
        live = live_teacher(diagnosis, model, student)
        taught = live(**inputs)
    except Exception as error:  # of the model's own code too, on data that it does not take
        problem = f"the teacher {_say_error(error)}"
        if not isinstance(error, ShdError) or diagnosis.fidelity is None or student.is_squeezed:
            diagnosis.failure = problem
            return None
    try:
        with torch.no_grad(), capture_attention(start, layers=None if taught is None else taught.layers) as captured:
            start(**inputs)
        if taught is not None:
            layer_kls(captured, taught, loss_mask=mask_of(inputs))
    except Exception as error:
        diagnosis.failure = f"the student {_say_error(error)}"
        return None
    if problem is not None:
        diagnosis.untried = f"{problem}; teach from a cache (shd-torch export, then shd precompute)"
        return None
    return live


def _say_error(error: Exception) -> str:
    if isinstance(error, ShdError):
        return f"cannot be read: {error}"
    first = next(iter(str(error).splitlines()), "")
    return f"does not run on this data: {type(error).__name__}: {first}"
