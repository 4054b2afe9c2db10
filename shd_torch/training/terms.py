"""The terms of ``SHDTrainer``: each says what weighs it, which rows it counts, and its losses on a micro-batch.

The term on embeddings is followed by the same loss for ``SentenceTransformerTrainer``. At the end are projectors,
small modules between the student's width and the teacher's, trained with it and left behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shd_ref.cache import CacheReader, Embeddings, Manifest, sample_key
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_torch.capture.outputs import read_every_hidden_state, read_hidden_states, read_logits, read_output
from shd_torch.checks import check_option, check_temperature
from shd_torch.kd import ExactTargets, TeacherHead, embedding_loss, hidden_loss, kd_loss, pool_states
from shd_torch.kd.chunks import DISTANCES, DIVERGENCES, unit
from shd_torch.kd.embeddings import DISTANCES as OF_EMBEDDINGS
from shd_torch.live.online import layer_kls
from shd_torch.supervision.supervision import Taught
from shd_torch.training.batch import ROWS, Counter, Forward, MicroBatch, count_positions, count_samples, every_row

if TYPE_CHECKING:
    from shd_torch.data.dataset import CacheJoin


@dataclass(frozen=True)
class BetaSchedule:
    """A weight until some part of the training, and none of its term's cost from there on.

    Any function of progress in [0, 1] is a weight too, but its term is measured to the end, and logged, also at 0.
    From random weights SHD in the first half alone was better (docs/study.md).

    Attributes:
        weight: beta, or another term's weight, at least 0.
        until: part of the training in which the term is used, in (0, 1].

    Raises:
        ShdError: ``argument-value`` naming what is out of range or no number.
    """

    weight: float
    until: float = 1.0

    def __post_init__(self) -> None:
        check_number("weight", self.weight, least=0.0)
        inside = 0 < check_number("until", self.until) <= 1
        need(inside, "argument-value", "until", "be in (0, 1], a part of the training", repr(self.until))

    def __call__(self, progress: float) -> float:
        """The weight at this part of the training, 0 at its first step and 1 after its last."""
        return 0.0 if self.is_over(progress) else self.weight

    def is_over(self, progress: float) -> bool:
        """Whether the term is left out from here on."""
        return progress >= self.until < 1.0


Weight: TypeAlias = float | Callable[[float], float]

DECODER_KINDS: Final = ("decoder", "cross")
"""Kinds of attention whose rows are of an encoder-decoder's decoder."""


class Measured(NamedTuple):
    """Losses whose sum is a term on a micro-batch, before its weight."""

    losses: Mapping[str, Tensor]  # by the end of their logged names
    counter: Counter  # of the rows that each is a mean over


class Term(ABC):
    """One part of the loss.

    Attributes:
        NAME: of its losses in the log, ``<NAME>_loss`` with endings.
        WEIGHT_NAME: of its weight there.
        KEYWORDS: that the student is called with.
        weight: a number of at least 0, or a function of progress in [0, 1].
    """

    NAME: ClassVar[str]
    WEIGHT_NAME: ClassVar[str]
    KEYWORDS: ClassVar[Mapping[str, Any]] = {}
    weight: Weight

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """Refuse training data that this term cannot learn from, before the first step: ``cache-mismatch``."""
        return

    def make_projectors(
        self, student_width: int | None, manifest: Manifest | None, teacher_width: int | None
    ) -> Mapping[int, nn.Module]:
        """What takes the student's states, by number, to the width of a cache, or to that of a live teacher."""
        return {}

    def is_over(self, progress: float) -> bool:
        """Whether it is left out from here on; a weight of 0 alone is still measured, and logged."""
        return isinstance(self.weight, BetaSchedule) and self.weight.is_over(progress)

    @abstractmethod
    def count(self, batch: MicroBatch) -> int:
        """Rows that count."""

    @abstractmethod
    def measure(self, forward: Forward) -> Measured:
        """Its losses; ``forward.learn`` finds what teaches them. The counter is ``count`` or ``count_samples``."""


TokenGroups: TypeAlias = Tensor | Mapping[int, Tensor]
"""Which of the student's tokens each of the teacher's is part of, see ``layer_kls``."""
Groups: TypeAlias = TokenGroups | Callable[[Any], TokenGroups]
"""The same, or a function that makes it of the student's outputs."""


@dataclass(frozen=True, eq=False)
class AttentionTerm(Term):
    """``beta * KL(merged map || student map)`` of all taught layers, over the positions of the samples."""

    NAME: ClassVar[str] = "shd"
    WEIGHT_NAME: ClassVar[str] = "beta"
    weight: Weight
    kl: Mapping[str, Any]  # keywords of ``attention_kl``
    groups: Groups | None = None

    def count(self, batch: MicroBatch) -> int:
        return count_positions(batch)

    def measure(self, forward: Forward) -> Measured:
        assert forward.captured is not None
        layers, batch = forward.layers, forward.batch
        groups = self.groups(forward.outputs) if callable(self.groups) else self.groups
        masks = {layer: batch.padding_mask(of_decoder=layers.kind(layer) in DECODER_KINDS) for layer in layers}
        keywords: dict[str, Any] = {"check": forward.check, **self.kl}
        if not forward.is_training:
            keywords["value"] = "exact"  # a surrogate is for gradients
        supervisions = [supervision for supervision in forward.supervisions if supervision.layers]
        kls = layer_kls(forward.captured, supervisions, loss_mask=masks, groups=groups, **keywords)
        return Measured({f"_layer_{layer}": kl for layer, kl in kls.items()}, self.count)


@dataclass(frozen=True)
class KdTerm(Term):
    """Additional loss on logits: ``weight * kd_loss(targets, student's logits)``.

    Attributes:
        weight: a number of at least 0, or a function of progress in [0, 1] such as ``BetaSchedule``.
        temperature, divergence, mixing, vocab_size: as for ``kd_loss``.
        rows: which rows count: ``"positions"`` of the attention mask, those whose label counts (``"labels"``), or
            those whose next label counts (``"next_labels"``, as in causal language modelling). For a classifier,
            whose logits have no position axis, every sample counts.
        exact: learn from the cache's last states and the teacher's head (``shd precompute --hidden last``), over the
            whole vocabulary; the head is on the device, and its logits are made some rows at a time.

    Raises:
        ShdError: ``argument-value``.
    """

    NAME: ClassVar[str] = "kd"
    WEIGHT_NAME: ClassVar[str] = "kd_weight"

    weight: Weight = 1.0
    temperature: float | None = None
    divergence: str = "kl"
    mixing: float = 0.5
    rows: str = "positions"
    vocab_size: int | None = None
    exact: bool = False
    _head: list[TeacherHead] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read_weight(self.weight)
        if self.temperature is not None:
            check_temperature(self.temperature)
        check_option("divergence", self.divergence, DIVERGENCES)
        check_option("rows", self.rows, tuple(ROWS))

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """Stored logits must be of its temperature and suit its divergence; the head is read now."""
        folder, form = str(joined.cache.folder), joined.logits
        if self.exact and joined.cache.manifest.exact is not None:
            self._head[:] = [TeacherHead.read(joined.cache)]
        elif self.exact and not has_teacher:
            rule = f"kd must have exact targets in {folder}, or a live teacher, where exact is True"
            raise ShdError("cache-mismatch", f"{rule}; got neither: precompute with --hidden last", "CACHE-186")
        elif form is not None:
            check_targets("kd", self.temperature, form.temperature, folder)
        elif not has_teacher:
            raise ShdError("cache-mismatch", no_logits(self.NAME, folder), "CACHE-160")

    def count(self, batch: MicroBatch) -> int:
        return batch.count(ROWS[self.rows])

    def measure(self, forward: Forward) -> Measured:
        """On logits ``(B, L, V)``, or ``(B, V)`` of a classifier, whose samples count."""
        logits = read_logits(forward.outputs)
        if logits is None or logits.ndim > 3:
            got = "none" if logits is None else str(tuple(logits.shape))
            rule = f"kd must have a student that returns logits (B, L, V) or (B, V); got {got}"
            advice = "one that fuses its head with its loss is trained by linear_kd_loss in your own loop"
            raise ShdError("argument-value", f"{rule}: {advice}")
        has_rows = logits.ndim == 3
        length = logits.shape[1] if has_rows else None
        lacking = "kd must have a teacher that returns logits (..., V); got none"
        targets = forward.learn(lambda supervision: self._read(supervision, length), lacking)
        mask = forward.batch.counted(ROWS[self.rows], length) if has_rows else None
        loss = self.loss(targets, logits, loss_mask=mask, check=forward.check)
        return Measured({"": loss}, self.count if has_rows else count_samples)

    def loss(self, targets: Sequence[Any], logits: Tensor, *, loss_mask: Tensor | None, check: bool) -> Tensor:
        """The mean over counted rows of logits ``(B, L, V)`` or ``(B, V)``, and over ``targets``, one per teacher."""
        names = ("divergence", "mixing", "temperature", "vocab_size")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        losses = [kd_loss(target, logits, loss_mask=loss_mask, check=check, **options) for target in targets]
        return sum(losses[1:], losses[0]) / len(losses)

    def _read(self, supervision: Taught, length: int | None) -> Any:
        states = supervision.last_states(length) if self.exact else None
        if states is None:
            return supervision.targets(length)
        if self._head[0].weight.device != states.device:
            self._head[0] = self._head[0].to(states.device)
        return ExactTargets(states, self._head[0])


@dataclass(frozen=True, eq=False)
class HiddenTerm(Term):
    """Additional loss on hidden states.

    Attributes:
        pairs: (student, teacher) numbers of hidden states as in Hugging Face: 0 are the embeddings, k is the output
            of block k; each of the student's at most once.
        weight: as of ``KdTerm``.
        distance: ``"mse"``, ``"cosine"`` or ``"normalized_mse"``.

    A pair of different widths gets a linear layer, which is trained with the student and saved in its own file.

    Raises:
        ShdError: ``argument-value``, ``layers-invalid``.
    """

    NAME: ClassVar[str] = "hidden"
    WEIGHT_NAME: ClassVar[str] = "hidden_weight"
    KEYWORDS: ClassVar[Mapping[str, Any]] = {"output_hidden_states": True}

    pairs: Sequence[tuple[int, int]] = ()
    weight: Weight = 1.0
    distance: str = "mse"

    def __post_init__(self) -> None:
        read_weight(self.weight)
        check_option("distance", self.distance, DISTANCES)
        pairs = tuple((student, teacher) for student, teacher in self.pairs)
        numbers = [number for pair in pairs for number in pair]
        fits = bool(pairs) and all(type(number) is int and number >= 0 for number in numbers)
        fits = fits and len({student for student, _ in pairs}) == len(pairs)
        rule = "be (student, teacher) numbers of hidden states of at least 0, each student's once"
        need(fits, "layers-invalid", "pairs", rule, repr(self.pairs))
        object.__setattr__(self, "pairs", pairs)

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """The teacher's hidden states that are compared, each once, ascending."""
        return tuple(sorted({teacher for _, teacher in self.pairs}))

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must hold the teacher's layers, or nothing where a live teacher gives them."""
        numbers, stored = self.teacher_layers, joined.hidden_layers
        fits = set(numbers) <= set(stored) or (has_teacher and not stored)
        rule = f"have the teacher's hidden states {list(numbers)} in {joined.cache.folder}"
        got = f"{list(stored)}: precompute with --hidden, and read them"
        need(fits, "cache-mismatch", "hidden", rule, got, spec_id="CACHE-176")

    def make_projectors(
        self, student_width: int | None, manifest: Manifest | None, teacher_width: int | None
    ) -> Mapping[int, nn.Module]:
        """A linear layer for each pair of different widths, as far as they are known."""
        stored = None if manifest is None else manifest.hidden
        widths = {} if stored is None else {layer.layer: layer.width for layer in stored.layers}
        widths |= {} if teacher_width is None else dict.fromkeys(self.teacher_layers, teacher_width)
        return {
            student: nn.Linear(student_width, width)
            for student, teacher in self.pairs
            if student_width is not None and (width := widths.get(teacher)) not in (None, student_width)
        }

    def count(self, batch: MicroBatch) -> int:
        return batch.count(every_row)

    def measure(self, forward: Forward) -> Measured:
        """By layer the mean over counted rows, averaged over teachers."""
        numbers = [student for student, _ in self.pairs]
        students = forward.project(read_hidden_states(forward.outputs, numbers, forward.student))
        length = students[numbers[0]].shape[1]
        lacking = "hidden must have a teacher that keeps hidden states; got none"
        lacking += f": give OnlineTeacher hidden_layers={self.teacher_layers}"
        teachers = forward.learn(lambda supervision: supervision.hidden_states(length) or None, lacking)
        mask = forward.batch.counted(every_row, length)
        options: dict[str, Any] = {"distance": self.distance, "loss_mask": mask, "check": forward.check}
        losses: dict[str, Tensor] = {}
        for number, source in sorted(self.pairs):
            distances = [hidden_loss(students[number], states[source], **options) for states in teachers]
            losses[f"_layer_{number}"] = sum(distances[1:], distances[0]) / len(distances)
        return Measured(losses, self.count)


@dataclass(frozen=True, eq=False)
class EmbeddingTerm(Term):
    """Additional loss on embeddings of texts, from a cache: ``weight * embedding_loss(student's, teacher's)``.

    The student's last hidden state is pooled as the teacher's was, over the positions of the attention mask. The loss
    is a mean over texts, also where gradients accumulate; ``"similarity"`` compares the texts of one micro-batch. For
    the other distances a linear layer between different widths is trained with the student, and left behind.

    Attributes:
        weight: as of ``KdTerm``.
        distance: ``"cosine"``, ``"mse"`` or ``"similarity"``, see ``embedding_loss``.

    Raises:
        ShdError: ``argument-value``.
    """

    NAME: ClassVar[str] = "embedding"
    WEIGHT_NAME: ClassVar[str] = "embedding_weight"
    KEYWORDS: ClassVar[Mapping[str, Any]] = {"output_hidden_states": True}  # where the student has a head

    weight: Weight = 1.0
    distance: str = "cosine"

    def __post_init__(self) -> None:
        read_weight(self.weight)
        check_option("distance", self.distance, OF_EMBEDDINGS)

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must have embeddings, also where a live teacher is given, which has none."""
        rule, got = f"have embeddings in {joined.cache.folder}", "none: precompute with --embeddings"
        is_held = joined.cache.manifest.embeddings is not None
        need(is_held, "cache-mismatch", "embedding", rule, got, spec_id="CACHE-181")

    def make_projectors(
        self, student_width: int | None, manifest: Manifest | None, teacher_width: int | None
    ) -> Mapping[int, nn.Module]:
        form = None if manifest is None else manifest.embeddings
        width = None if form is None else form.width
        projector = make_projector(self.distance, student_width, width)
        return {} if projector is None else {EMBEDDING: projector}

    def count(self, batch: MicroBatch) -> int:
        return count_samples(batch)

    def measure(self, forward: Forward) -> Measured:
        states = read_output(forward.outputs, "last_hidden_state")
        if not isinstance(states, Tensor):
            states = read_every_hidden_state(forward.outputs, forward.student)[-1]
        lacking = "embedding must have a cache of embeddings, as no live teacher gives them; got none"
        (targets,) = forward.learn(lambda supervision: supervision.embeddings(), lacking)
        pooled = pool_states(states, forward.batch.counted(every_row, states.shape[1]), pooling=targets.pooling)
        if forward.seen is not None:
            forward.seen.add(targets.vectors, pooled)
        projected = forward.project({EMBEDDING: pooled})[EMBEDDING]
        projected = unit(projected) if targets.normalize else projected
        loss = embedding_loss(projected, targets.vectors, distance=self.distance, check=forward.check)
        return Measured({"": loss}, count_samples)


class EmbeddingLoss(nn.Module):
    """A loss for ``SentenceTransformerTrainer`` towards the teacher's embeddings in a cache.

    ``SentenceTransformerTrainer(student, train_dataset=texts, loss=EmbeddingLoss(student, "cache"))``. Every column
    of texts is compared with its own embeddings, which are found by the content of its tokens.

    Args:
        model: the student, a ``SentenceTransformer``, with all its modules.
        cache: of ``shd precompute --embeddings``: its folder, address, or a reader.
        distance: ``"cosine"``, ``"mse"`` or ``"similarity"``, see ``embedding_loss``. For the first two a linear
            layer between different widths is trained with the student, and no part of it.

    Raises:
        ShdError: ``argument-value`` for a cache without embeddings; ``sample-missing`` for a text that is not in the
            cache; what opening the cache and ``embedding_loss`` raise.
    """

    def __init__(self, model: nn.Module, cache: CacheReader | str | Path, *, distance: str = "cosine") -> None:
        super().__init__()
        check_option("distance", distance, OF_EMBEDDINGS)
        self.model, self.distance = model, distance
        self.cache = CacheReader(cache) if isinstance(cache, str | Path) else cache
        form = self.cache.manifest.need(Embeddings, "embeddings")
        names = ("get_embedding_dimension", "get_sentence_embedding_dimension")  # the second before version 6
        width = next((getattr(model, name)() for name in names if hasattr(model, name)), None)
        self.projector = make_projector(distance, width, form.width)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean over all texts of a batch; ``sentence_features`` hold the tokens of each column."""
        columns = list(sentence_features)
        of_teacher = torch.cat([self._read(features) for features in columns])
        embeddings = torch.cat([self.model(dict(features))["sentence_embedding"] for features in columns])
        if self.projector is not None:
            embeddings = self.projector(embeddings.to(self.projector.weight.dtype))
        return embedding_loss(embeddings, of_teacher, distance=self.distance, check=False)

    def _read(self, features: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of a column from the cache, ``(B, D)``, by its tokens without their padding."""
        inputs = self.cache.manifest.inputs
        arrays = {name: features[name].cpu().numpy() for name in inputs.names if name in features}
        if len(arrays) < len(inputs.names) or inputs.mask is None:
            rule = f"a batch must hold the teacher's inputs {', '.join(inputs.names)}"
            raise ShdError("inputs-invalid", f"{rule}; got {', '.join(features)}", "CACHE-30")
        counted = arrays[inputs.mask] != 0
        texts = [{name: array[row][mask] for name, array in arrays.items()} for row, mask in enumerate(counted)]
        keys = [sample_key(text) for text in texts]
        absent = [text for text, key in zip(texts, keys, strict=True) if key not in self.cache]
        if absent:
            rule = f"{self.cache.folder} must hold every text; it lacks {len(absent)} of {len(keys)} of a batch, "
            rule += f"first tokens {absent[0][inputs.names[-1]].tolist()[:20]}"
            advice = "tokenise as precompute did, with its --max-length as max_seq_length and without prompts"
            raise ShdError("sample-missing", f"{rule}: {advice}", "CACHE-82")
        records = self.cache.read_batch(keys, (), logits=False, hidden=())
        return torch.from_numpy(np.stack([self.cache.decode_embedding(record) for record in records]))


def no_logits(name: str, folder: str) -> str:
    rule = f"{name} must have logits in {folder}, or a live teacher"
    return f"{rule}; got neither: precompute with --logits, and read them (logits=True)"


def read_weight(weight: Weight) -> Callable[[float], float]:
    return weight if callable(weight) else BetaSchedule(weight)


def check_targets(argument: str, of_argument: float | None, temperature: float | None, origin: str) -> None:
    """Refuse targets of another temperature than an argument's own: ``argument-value``."""
    if temperature is not None and of_argument not in (None, temperature):
        rule = f"{argument} must have the temperature {temperature:g} of {origin}, or None; got {of_argument:g}"
        reason = "what lies outside of the kept classes cannot be moved to another"
        raise ShdError("argument-value", f"{rule}: {reason}, so make the targets at this one")


PROJECTORS_FILE: Final = "hidden_projectors.safetensors"
"""In a checkpoint's folder, next to the student."""

EMBEDDING: Final = -1
"""The number of the projector of embeddings; those of hidden states count from 0."""


class Projectors(nn.Module):
    """The projectors of all terms by the student's number of hidden states; one may serve several."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.by_number = nn.ModuleDict({str(number): module for number, module in modules.items()})

    def forward(self, states: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Hidden states by number, projected where there is a projector, in its dtype."""
        projected = dict(states)
        for number, module in self.by_number.items():
            if (state := states.get(int(number))) is not None:
                projected[int(number)] = module(state.to(next(module.parameters(), state).dtype))
        return projected

    def join_ranks(self) -> None:
        """Give every rank the first one's parameters, and average their gradients as each backward pass makes them.

        They stand outside of the student, which DDP and FSDP take care of. The mean of what ranks hold is also right
        where gradients accumulate, as what they share already is its own mean.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        for parameter in self.parameters():
            dist.broadcast(parameter.detach(), 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_average_gradient)  # type: ignore[no-untyped-call]

    def save(self, folder: str | Path) -> None:
        """Write the parameters into a checkpoint, where there are any."""
        from safetensors.torch import save_model

        if self.state_dict():
            save_model(self, str(Path(folder) / PROJECTORS_FILE))

    def load(self, folder: str | Path) -> None:
        """Read them from one; ``argument-value`` where it has none for these projectors."""
        from safetensors.torch import load_model

        if not self.state_dict():
            return
        path = Path(folder) / PROJECTORS_FILE
        try:
            load_model(self, str(path))
        except (OSError, RuntimeError) as error:
            rule = f"resume_from_checkpoint must hold the projectors of these terms in {path}"
            raise ShdError("argument-value", f"{rule}; got: {error}") from error


def make_projector(distance: str, student_width: int | None, teacher_width: int | None) -> nn.Linear | None:
    """Of embeddings: a linear layer between different widths that are compared directly."""
    if distance == "similarity" or student_width is None or teacher_width in (None, student_width):
        return None
    return nn.Linear(student_width, teacher_width)


def _average_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
