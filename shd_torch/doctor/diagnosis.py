"""A pair of models: their parts, differences and the effects of these, a short training, and one answer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError, need
from shd_ref.teacher.sentence_folder import find_pooling
from shd_torch.capture import capture_attention
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
from shd_torch.training.recipe import is_causal_model

# Names of parameters and modules in transformers and timm: no entry of a configuration is the same for all models.
_LAYER_SCALE: Final = re.compile(r"layer_?scale|lambda_?[12]$|\.ls[12]\.|gamma_[12]$")
_REGISTERS: Final = re.compile(r"register_tokens?$|reg_token$")
_QK_NORM: Final = re.compile(r"(q|k|query|key)_?(layer)?_?norm$|(q|k)_ln$")
_RELATIVE: Final = re.compile(r"relative_(position|attention)_bias|rel_pos")
_LEARNED: Final = re.compile(r"(position_embeddings?|wpe|embed_positions|pos_embed)(\.weight)?$")
_ALIBI: Final = ("bloom", "mpt")


@dataclass(frozen=True, eq=False)
class Student:
    """A Hugging Face model to be made."""

    folder: Path  # with its configuration
    config: Any
    has_weights: bool  # whether the folder holds any; otherwise it starts at random
    is_squeezed: bool  # whether shrink made it

    def make(self, seed: int) -> Any:
        """A new model in float32: with the folder's weights, or with random ones by the seed."""
        config = copy.deepcopy(self.config)
        if self.has_weights:
            return folders.load_weights(self.folder, config).float()
        kind = folders.model_class(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            create = getattr(kind, "_from_config", getattr(kind, "from_config", None))
            assert create is not None  # every class of transformers has one of them
            return create(config, attn_implementation=folders.implementation_of(kind)).float().eval()


def read_student(source: str) -> Student:
    """A student from a folder or a hub id; a configuration without weights will do."""
    folder = folders.find_folder(source, "student")
    has_weights, is_squeezed = any(folder.glob("*.safetensors")), (folder / "shrink.json").is_file()
    return Student(folder, folders.read_config(folder, "student"), has_weights, is_squeezed)


@dataclass(frozen=True)
class Parts:
    """Sizes of a model, and what else its attention depends on."""

    name: str
    heads: int
    layers: int
    layer_scale: bool  # whether blocks are scaled channel by channel after their end
    registers: int  # tokens that are neither class nor patches
    specials: int  # all tokens of an image that are no patches
    qk_norm: bool  # whether queries and keys of a head are normalised
    positions: str  # learned, rotary, relative, alibi or none
    is_causal: bool  # whether a row sees earlier positions alone
    window: int | None  # how many positions a row sees at most; None = all
    learned_sinks: bool  # whether rows may give attention to nothing
    vocabulary: int | None  # classes of a text's tokens; None of images
    patches: tuple[int, ...] | None  # rows, columns and channels of an image; None of texts
    labels: int | None  # classes of a classifier's head


def parts_of(model: nn.Module) -> Parts:
    config: Any = model.config
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules())
    is_image = getattr(model, "main_input_name", "") == "pixel_values"
    of_class, of_distillation = (
        any(name.endswith(ends) for name in shapes) for ends in ("cls_token", ("distillation_token", "dist_token"))
    )
    registers = next((shape[-2] for name, shape in shapes.items() if _REGISTERS.search(name)), 0)
    return Parts(
        name=type(model).__name__,
        heads=_first(config, "num_attention_heads", "n_head") or 0,
        layers=_first(config, "num_hidden_layers", "n_layer") or 0,
        layer_scale=_any(_LAYER_SCALE, shapes),
        registers=registers,
        specials=registers + of_class + of_distillation,
        qk_norm=_any(_QK_NORM, modules),
        positions=_positions(config, shapes, modules),
        is_causal=is_causal_model(model)  # of old models no module says so
        or any(getattr(module, "is_causal", False) is True for module in modules.values()),
        window=_first(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None,
        learned_sinks=any(name.endswith(("sinks", "attn_sink")) for name in shapes),
        vocabulary=None if is_image else _first(config, "vocab_size"),
        patches=_patches(config) if is_image else None,
        labels=getattr(config, "num_labels", None) if "Classification" in type(model).__name__ else None,
    )


def _positions(config: Any, shapes: Iterable[str], modules: Iterable[str]) -> str:
    if _any(_RELATIVE, shapes):
        return "relative"
    if any(name.rpartition(".")[2].startswith(("rotary", "rope")) for name in modules):
        return "rotary"
    if getattr(config, "model_type", "") in _ALIBI or getattr(config, "alibi", False) is True:
        return "alibi"
    return "learned" if _any(_LEARNED, [*shapes, *modules]) else "none"


def _patches(config: Any) -> tuple[int, ...] | None:
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return None
    height, width = image if isinstance(image, list | tuple) else (image, image)
    down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
    return height // down, width // across, getattr(config, "num_channels", 3)


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.search(name) for name in names)


def _first(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


BLOCKS, HURTS, NOTE = EFFECTS = ("blocks", "hurts", "note")
"""Supervision cannot work with the difference; is known to do worse with it; or neither."""

TOKENIZER_BYTES: Final = 2**27
"""A larger tokenizer.json is not read: as Python objects JSON takes about eight times its bytes, here 1 GB."""

_OF_TOKENS: Final = ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")
"""Sections of tokenizer.json that decide which ids a text becomes."""


@dataclass(frozen=True)
class Difference:
    """A part of both models as each has it, its effect (``blocks``, ``hurts`` or ``note``), and a remedy."""

    part: str
    teacher: str
    student: str
    effect: str
    remedy: str


def compare_parts(teacher: Parts, student: Parts, of_tokens: Sequence[Difference] = ()) -> list[Difference]:
    """All differences of two Hugging Face models, those that block first; those ``of_tokens`` before their equals.

    What hurts is what arXiv 2605.07191 found: where the teacher's attention relies on LayerScale or registers,
    students without them lose by attention transfer.
    """
    differences = list(of_tokens)  # with other tokens nothing else helps

    def note(part: str, of_teacher: object, of_student: object, effect: str, remedy: str) -> None:
        words = ("no", "yes")[of_teacher is True], ("no", "yes")[of_student is True]
        of_teacher, of_student = words if isinstance(of_teacher, bool) else (of_teacher, of_student)
        differences.append(Difference(part, str(of_teacher), str(of_student), effect, remedy))

    if student.heads > teacher.heads:
        note("heads", teacher.heads, student.heads, BLOCKS, "heads can be merged, not split: use fewer")
    if student.layers > teacher.layers:
        note("layers", teacher.layers, student.layers, NOTE, "name the pairs: some layers stay untaught")
    if teacher.learned_sinks:
        effect = NOTE if student.learned_sinks else HURTS
        remedy = "the teacher's rows sum to less than one; give the student sinks too"
        note("learned sinks", teacher.learned_sinks, student.learned_sinks, effect, remedy)
    if (teacher.patches is None) != (student.patches is None):
        of_teacher, of_student = ("images" if parts.patches else "texts" for parts in (teacher, student))
        note("input", of_teacher, of_student, BLOCKS, "choose a teacher with the same kind of input")
    else:
        _compare_inputs(teacher, student, note)
    for name, has, has_too, remedy in (
        ("LayerScale", teacher.layer_scale, student.layer_scale, "one too, at its usual start (arXiv 2605.07191)"),
        ("registers", bool(teacher.registers), bool(student.registers), "as many, at random (arXiv 2605.07191)"),
        ("QK-norm", teacher.qk_norm, student.qk_norm, "one too"),
    ):
        if has and not has_too:
            note(name, has, has_too, HURTS, f"give the student {remedy}")
        elif has_too and not has:
            note(name, has, has_too, NOTE, "the student has a part that the teacher lacks")
    if teacher.positions != student.positions:
        remedy = "distance is encoded differently: use the teacher's kind of positions"
        note("positions", teacher.positions, student.positions, HURTS, remedy)
    return sorted(differences, key=lambda difference: EFFECTS.index(difference.effect))


def _compare_inputs(teacher: Parts, student: Parts, note: Callable[[str, object, object, str, str], None]) -> None:
    """Tokens and their order, of two models of texts or of images."""
    if teacher.patches != student.patches:
        of_teacher, of_student = (" x ".join(map(str, parts.patches or ())) for parts in (teacher, student))
        channels = [(parts.patches or ())[2:] for parts in (teacher, student)]
        grids = ":".join("x".join(map(str, (parts.patches or ())[:2])) for parts in (teacher, student))
        remedy = f"pool the maps in a cache: shd precompute --groups patches:{grids}:{student.specials}"
        if channels[0] != channels[1]:
            remedy = "choose a teacher of images with as many channels"
        note("patches", of_teacher, of_student, HURTS if channels[0] == channels[1] else BLOCKS, remedy)
    elif teacher.specials != student.specials:
        remedy = "give the student the same, or cut merged maps with shd_torch.maps.align_tokens"
        note("tokens besides patches", teacher.specials, student.specials, HURTS, remedy)
    if teacher.vocabulary != student.vocabulary and teacher.vocabulary and student.vocabulary:
        remedy = "fine for attention if both make the same tokens; KD reads the first classes (vocab_size)"
        note("vocabulary", teacher.vocabulary, student.vocabulary, NOTE, remedy)
    if teacher.is_causal != student.is_causal:
        of_teacher, of_student = ("causal" if parts.is_causal else "both ways" for parts in (teacher, student))
        remedy = "the student would learn not to look ahead: choose a bidirectional teacher"
        if student.is_causal:
            remedy = "the teacher attends where the student may not: choose a causal teacher"
        note("direction", of_teacher, of_student, BLOCKS if student.is_causal else HURTS, remedy)
    if student.window is not None and (teacher.window is None or teacher.window > student.window):
        remedy = "texts longer than the window have mass where the student may not look: support='intersect'"
        note("window", teacher.window or "all", student.window, HURTS, remedy)


def compare_tokenizers(teacher: Path | None, student: Path) -> list[Difference]:
    """Whether both folders make the same tokens of a text: maps of different tokens do not correspond."""
    teachers, students = (None if folder is None else _read_tokenizer(folder) for folder in (teacher, student))
    names = [name for name in _OF_TOKENS if teachers and students and teachers.get(name) != students.get(name)]
    if not names:
        return []
    # Added tokens change the ids of no other text.
    is_model = names != ["added_tokens"]
    effect = HURTS if is_model else NOTE
    remedy = "keep added tokens out of shared texts"
    if is_model:
        remedy = "give it the teacher's, or pool the maps in a cache: shd precompute --student-tokenizer FOLDER"
    sections = f"another {', '.join(name.replace('_', ' ') for name in names)}"
    return [Difference("tokenizer", "its own", sections, effect, remedy)]


def _read_tokenizer(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > TOKENIZER_BYTES:
        return None
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{path} must be a tokenizer's JSON: {error!r}") from error
    return document if isinstance(document, dict) else None


YES: Final = "yes"
UNLIKELY: Final = "probably not"
NO: Final = "no"

Arrays = Mapping[str, NDArray[Any]]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Verdict:
    """The answer (``yes``, ``probably not`` or ``no``) and its reason in a sentence."""

    answer: str
    because: str


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a pair.

    Attributes:
        verdict: the answer.
        teacher, student: their parts.
        differences: first those that block.
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
    parts, student_parts = parts_of(model), parts_of(learner.make(0))
    for config in (model.config, learner.config) if data is not None else ():
        folders.check_positions(data or {}, folders.count_positions(config))
    tokens = compare_tokenizers(folder, learner.folder) if student_parts.patches is None else []
    differences = compare_parts(parts, student_parts, tokens)
    measured: dict[str, Any] = {}
    pooling = find_pooling(folder)
    if data is not None and not any(difference.effect == BLOCKS for difference in differences):
        batch = _read(data, parts, student_parts)
        pair = Pair(model, parts, learner, student_parts, None if pooling is None else pooling.mode)
        measured = _try(pair, differences, batch, options, progress)
    squeezed = learner.is_squeezed
    verdict = judge(
        differences,
        measured.get("probe"),
        is_squeezed=squeezed,
        is_sentence_encoder=pooling is not None,
        failure=measured.get("failure"),
    )
    return Diagnosis(verdict, parts, student_parts, tuple(differences), learner.has_weights, squeezed, **measured)


def judge(
    differences: Sequence[Difference],
    probe: Probe | None,
    *,
    is_squeezed: bool,
    is_sentence_encoder: bool,
    failure: str | None,
) -> Verdict:
    """The answer, in order of strength: obstacles, then the run of this pair, then experience with other pairs."""
    blocking, hurting = (
        [difference for difference in differences if difference.effect == effect] for effect in (BLOCKS, HURTS)
    )
    if blocking:
        return Verdict(NO, _say_differences(blocking))
    if failure is not None:
        return Verdict(NO, f"the pair cannot be run together: {failure}")
    if probe is not None:
        run = f"{probe.steps} steps and {probe.seeds} seeds"
        if not probe.is_distinguishable:
            return Verdict(UNLIKELY, f"what it gains in {run} is not significant")
        answer, verb = (YES, "lowers") if probe.gain > 0 else (NO, "raises")
        return Verdict(answer, f"it {verb} the held-out {probe.measure} by more than the interval over {run}")
    if hurting:
        return Verdict(UNLIKELY, _say_differences(hurting))
    if is_sentence_encoder:
        # Students of MiniLM, in benchmarks/dozen.toml: no gain from squeezed layers, a loss from random ones.
        return Verdict(UNLIKELY, "sentence encoders gained nothing from SHD, or lost: see --probe")
    if is_squeezed:
        return Verdict(UNLIKELY, "a squeezed start already has most of the benefit of SHD: see --probe")
    return Verdict(YES, "no obstacle in the configurations; --probe tries it")


def _say_differences(differences: Sequence[Difference]) -> str:
    first, count = differences[0], f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"they differ in {first.part}{count} (teacher {first.teacher}, student {first.student}): {first.remedy}"


def _read(data: Arrays, teacher: Parts, student: Parts) -> dict[str, Tensor]:
    """All samples as a batch, with masks; texts without a next token, other tokens and other classes are refused."""
    arrays = dict(data)
    if "input_ids" in arrays and "attention_mask" not in arrays:
        arrays["attention_mask"] = (arrays["input_ids"] >= 0).astype("int64")
    batch = {name: torch.as_tensor(array) for name, array in arrays.items()}
    batch = {name: array.float() if array.is_floating_point() else array.long() for name, array in batch.items()}
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is not None:
        longest = int(batch["attention_mask"].sum(-1).max()) if ids.ndim == 2 and len(ids) else 0
        rule = "hold texts of at least 2 tokens, as attention of one token is always 1"
        need(longest >= 2, "argument-value", "data", rule, longest)
        size, largest = teacher.vocabulary, int(ids.max())
        rule, remedy = f"hold tokens below the teacher's vocabulary of {size}", "use the teacher's tokenizer"
        need(size is None or largest < size, "argument-value", "data", rule, largest, remedy=remedy)
    if labels is not None:
        classes = student.labels if labels.ndim == 1 else student.vocabulary
        counted = labels[labels != IGNORED]
        if classes is not None and counted.numel():
            least, largest = int(counted.min()), int(counted.max())
            rule = f"hold labels below the student's {classes} classes, or {IGNORED}"
            need(0 <= least <= largest < classes, "argument-value", "data", rule, f"{least} to {largest}")
    return batch


class Pair(NamedTuple):
    """A teacher and a student to run together."""

    model: Any  # the teacher
    teacher: Parts
    learner: Student  # from which students are made
    student: Parts
    pooling: str | None  # of a sentence encoder


def _try(
    pair: Pair,
    differences: Sequence[Difference],
    batch: dict[str, Tensor],
    options: DiagnosisOptions,
    progress: Progress,
) -> dict[str, Any]:
    """The base loss, the range of beta and the probe; or why there are none."""
    for difference in differences:
        if difference.part in ("patches", "tokenizer") and difference.effect == HURTS:
            return {"untried": f"the student makes other tokens: {difference.remedy}"}
    tokens, size = batch.get("input_ids"), pair.student.vocabulary
    if tokens is not None and size is not None and int(tokens.max()) >= size:
        problem = f"the data has token {int(tokens.max())}, and the student a vocabulary of {size}"
        return {"failure": f"{problem}: give it the teacher's tokenizer and vocabulary"}
    if getattr(pair.model.config, "is_encoder_decoder", False):
        return {"untried": "an encoder-decoder is not trained here; examples/encoder_decoder.py trains one"}
    if pair.teacher.patches is not None and pair.teacher.specials != pair.student.specials:
        extra = f"{pair.teacher.specials} extra tokens besides the patches, the student {pair.student.specials}"
        remedy = "give it the same, or cut the merged maps with shd_torch.maps.align_tokens in your own training"
        return {"untried": f"the teacher has {extra}: {remedy}"}
    start, two_samples = pair.learner.make(0), {name: array[:2] for name, array in batch.items()}
    live, problems = _run_together(pair, start, two_samples)
    if live is None:
        return problems
    objective = choose_objective(start, pair.model, two_samples, pair.pooling)
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
        value = beta.middle if options.beta is None else options.beta
        probe = trial.probe(pair.learner.make, value, lambda done, total: progress(done, total, "steps of the probe"))
    return {"objective": objective, "beta": beta, "probe": probe}


def _run_together(pair: Pair, start: Any, batch: Mapping[str, Tensor]) -> tuple[OnlineTeacher | None, dict[str, Any]]:
    """The live teacher, squeezed as the student was, after both ran on a batch; None and why, if they did not.

    A teacher whose attention cannot be read as it runs may still teach from a cache, if its graph can be read.
    """
    inputs, targets, problem = inputs_of(batch), None, None
    try:
        if pair.learner.is_squeezed:
            live = OnlineTeacher.for_student(pair.model, pair.learner.folder)
        else:
            layers = layer_map(pair.teacher.layers, min(pair.student.layers, pair.teacher.layers))
            live = OnlineTeacher(pair.model, pair.student.heads, layers)
        targets = live(**inputs)
    except Exception as error:  # of the model's own code too, on data that it does not take
        problem = f"the teacher {_say_error(error)}"
        if not isinstance(error, ShdError) or pair.learner.is_squeezed:
            return None, {"failure": problem}
    student_layers = None if targets is None else targets.layers
    try:
        with torch.no_grad(), capture_attention(start, layers=student_layers) as captured:
            start(**inputs)
        if targets is not None:
            layer_kls(captured, targets, loss_mask=mask_of(batch))
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
