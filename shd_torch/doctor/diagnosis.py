"""A pair of models, examined from their configurations to a short training, and one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_ref.teacher.sentence_folder import find_pooling
from shd_torch.capture import capture_attention
from shd_torch.doctor.pair import (
    BLOCKS,
    EFFECTS,
    HURTS,
    Difference,
    Parts,
    Student,
    compare_parts,
    compare_tokenizers,
    parts_of,
    read_student,
)
from shd_torch.doctor.training import (
    BetaRange,
    DiagnosisOptions,
    Objective,
    Probe,
    Trial,
    choose_objective,
    inputs_of,
    mask_of,
)
from shd_torch.live import OnlineTeacher
from shd_torch.live.online import layer_kls
from shd_torch.maps import layer_map
from shd_torch.recipes.terms import IGNORED
from shd_torch.shrink import folders

YES: Final = "yes"
UNLIKELY: Final = "probably not"
NO: Final = "no"

Arrays = Mapping[str, NDArray[Any]]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Verdict:
    """The answer and its reason.

    Attributes:
        answer: ``yes``, ``probably not`` or ``no``.
        because: in a sentence.
        rests_on: ``probe`` or ``configuration``: the strongest evidence.
    """

    answer: str
    because: str
    rests_on: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        verdict: the answer.
        teacher, student: what they are made of.
        differences: those that block first.
        has_weights: whether the student's folder contains weights.
        is_squeezed: whether ``shrink`` made it.
        objective: the base loss; None without data.
        beta: the range for it.
        probe: the paired run, if requested.
        untried: why the two were not run together, although they may be compatible.
        failure: why the two could not be run together.
    """

    verdict: Verdict
    teacher: Parts
    student: Parts
    differences: tuple[Difference, ...]
    has_weights: bool
    is_squeezed: bool
    objective: Objective | None = None
    beta: BetaRange | None = None
    probe: Probe | None = None
    untried: str | None = None
    failure: str | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"indistinguishable": None if self.probe is None else not self.probe.is_distinguishable}


def diagnose(
    teacher: str,
    student: str,
    data: Arrays | None = None,
    options: DiagnosisOptions | None = None,
    *,
    progress: Progress = lambda *_: None,
) -> Diagnosis:
    """Examine a pair: will attention supervision work for it?

    Args:
        teacher: a Hugging Face folder or hub id with safetensors.
        student: a folder or hub id; a configuration without weights means random initialisation.
        data: the models' inputs by name ``(N, ...)``, with optional ``labels``; None compares only the
            configurations.
        options: a probe, and how.
        progress: called with the numbers of finished and of all steps (0 if unknown) and the current step.

    Raises:
        ShdError: ``read-failed``, ``argument-value``; what the measurements raise.
    """
    options = options or DiagnosisOptions()
    progress(0, 0, "models are read")
    options.check(None if data is None else len(next(iter(data.values()))))
    folder, learner = folders.find_folder(teacher, "teacher"), read_student(student)
    model = folders.load_weights(folder, folders.read_config(folder)).float()
    parts, own = parts_of(model), parts_of(learner.make(0))
    for config in (model.config, learner.config) if data is not None else ():
        folders.check_positions(data or {}, folders.count_positions(config))
    tokens = compare_tokenizers(folder, learner.folder) if own.patches is None else []
    # Of tokenizers first: other tokens make all else vain.
    differences = sorted([*tokens, *compare_parts(parts, own)], key=lambda one: EFFECTS.index(one.effect))
    found = Diagnosis(Verdict("", "", ""), parts, own, tuple(differences), learner.has_weights, learner.is_squeezed)
    if data is not None and not any(one.effect == BLOCKS for one in differences):
        pooling = find_pooling(folder)
        mode = None if pooling is None else pooling.mode
        found = replace(found, **_try(found, model, learner, _read(data, parts, own), mode, options, progress))
    return replace(
        found, verdict=judge(differences, found.probe, is_squeezed=found.is_squeezed, failure=found.failure)
    )


def judge(
    differences: Sequence[Difference], probe: Probe | None, *, is_squeezed: bool, failure: str | None
) -> Verdict:
    """What was tried decides before what is known of other pairs; what makes it impossible decides before all."""
    rests_on = "configuration"
    for effect, answer in ((BLOCKS, NO), (HURTS, UNLIKELY)):
        if effect == HURTS:
            if failure is not None:
                return Verdict(NO, f"the pair cannot be run together: {failure}", rests_on)
            if probe is not None:
                return Verdict(*_of_probe(probe), "probe")
        those = [one for one in differences if one.effect == effect]
        if those:
            first, more = those[0], f" and {len(those) - 1} more" if len(those) > 1 else ""
            both = f"they differ in {first.part}{more} (teacher {first.teacher}, student {first.student})"
            return Verdict(answer, f"{both}: {first.remedy}", rests_on)
    if is_squeezed:
        return Verdict(UNLIKELY, "a squeezed start already has most of the benefit of SHD: see --probe", rests_on)
    return Verdict(YES, "no obstacle in the configurations; --probe tries it", rests_on)


def _of_probe(probe: Probe) -> tuple[str, str]:
    run = f"{probe.steps} steps and {probe.seeds} seeds"
    if not probe.is_distinguishable:
        return UNLIKELY, f"what it gains in {run} is not significant"
    answer, verb = (YES, "lowers") if probe.gain > 0 else (NO, "raises")
    return answer, f"it {verb} the held-out {probe.measure} by more than the interval over {run}"


def _read(data: Arrays, teacher: Parts, student: Parts) -> dict[str, Tensor]:
    """All samples as a batch, with masks; texts without a next token, other tokens and other classes are refused."""
    arrays = dict(data)
    for tokens, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if tokens in arrays and mask not in arrays:
            arrays[mask] = (arrays[tokens] >= 0).astype("int64")
    batch = {name: torch.as_tensor(array) for name, array in arrays.items()}
    batch = {name: array.float() if array.is_floating_point() else array.long() for name, array in batch.items()}
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is not None:
        longest = int(batch["attention_mask"].sum(-1).max()) if ids.ndim == 2 and len(ids) else 0
        rule = "hold texts of at least 2 tokens, as attention of one token is always 1"
        need(longest >= 2, "argument-value", "data", rule, longest)
        known, largest = teacher.vocabulary, int(ids.max())
        rule, remedy = f"hold tokens below the teacher's vocabulary of {known}", "use the teacher's tokenizer"
        need(known is None or largest < known, "argument-value", "data", rule, largest, remedy=remedy)
    if labels is not None:  # of a text -100 is none
        classes = student.labels if labels.ndim == 1 else student.vocabulary
        counted = labels[labels != IGNORED]
        if classes is not None and counted.numel():
            least, largest = int(counted.min()), int(counted.max())
            rule = f"hold labels below the student's {classes} classes, or {IGNORED}"
            need(0 <= least <= largest < classes, "argument-value", "data", rule, f"{least} to {largest}")
    return batch


def _try(
    found: Diagnosis,
    model: Any,
    student: Student,
    batch: dict[str, Tensor],
    pooling: str | None,
    options: DiagnosisOptions,
    progress: Progress,
) -> dict[str, Any]:
    tokens, size = batch.get("input_ids"), found.student.vocabulary
    if tokens is not None and size is not None and int(tokens.max()) >= size:
        problem = f"the data has token {int(tokens.max())}, and the student a vocabulary of {size}"
        return {"failure": f"{problem}: give it the teacher's tokenizer and vocabulary"}
    if getattr(model.config, "is_encoder_decoder", False):
        return {"untried": "an encoder-decoder is not trained here; examples/encoder_decoder.py trains one"}
    if found.teacher.patches is not None and found.teacher.specials != found.student.specials:
        return {
            "untried": f"the teacher has {found.teacher.specials} extra tokens besides the patches, the student "
            f"{found.student.specials}: give it the same, or cut the merged maps with shd_torch.maps.align_tokens in "
            "your own training"
        }
    start, few = student.make(0), {name: array[:2] for name, array in batch.items()}
    live, problems = _run_together(found, model, student, start, few)
    if live is None:
        return problems
    objective = choose_objective(start, model, few, pooling)
    if objective is None:
        return {
            "untried": "the student has no head, and its last hidden states are not of the teacher's width, so that "
            "nothing but attention could be compared: name a class with a head in its config.json, as architectures, "
            "or train it with SHDTrainer (beta and hidden) and judge it by your task"
        }
    trial = Trial(live, objective, batch, options)
    beta = trial.find_beta(start, lambda done, total: progress(done, total, "steps to beta"))
    probe = None
    if options.probe:
        asked = beta.middle if options.beta is None else options.beta
        probe = trial.probe(student.make, asked, lambda done, total: progress(done, total, "steps of the probe"))
    return {"objective": objective, "beta": beta, "probe": probe}


def _run_together(
    found: Diagnosis, model: Any, student: Student, start: Any, batch: Mapping[str, Tensor]
) -> tuple[OnlineTeacher | None, dict[str, Any]]:
    """The live teacher, squeezed as the student was, after both ran on a batch; None and why, if they did not.

    A teacher whose attention cannot be read as it runs may still teach from a cache, if its graph can be read.
    """
    inputs, taught, problem = inputs_of(batch), None, None
    try:
        if student.is_squeezed:
            live = OnlineTeacher.for_student(model, student.folder)
        else:
            pairs = layer_map(found.teacher.layers, min(found.student.layers, found.teacher.layers))
            live = OnlineTeacher(model, found.student.heads, pairs)
        taught = live(**inputs)
    except Exception as error:  # of the model's own code too, on data that it does not take
        problem = f"the teacher {_say_error(error)}"
        if not isinstance(error, ShdError) or student.is_squeezed:
            return None, {"failure": problem}
    try:
        with torch.no_grad(), capture_attention(start, layers=None if taught is None else taught.layers) as captured:
            start(**inputs)
        if taught is not None:
            layer_kls(captured, taught, loss_mask=mask_of(batch))
    except Exception as error:
        return None, {"failure": f"the student {_say_error(error)}"}
    if problem is not None:
        return None, {"untried": f"{problem}; teach from a cache (shd-torch export, then shd precompute)"}
    return live, {}


def _say_error(error: Exception) -> str:
    if isinstance(error, ShdError):
        return f"cannot be read: {error}"
    first = next(iter(str(error).splitlines()), "")
    return f"does not run on this data: {type(error).__name__}: {first}"
