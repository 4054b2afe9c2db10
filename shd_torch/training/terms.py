"""Terms beside the student's own loss and that of attention: on logits, and on hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.capture.outputs import read_hidden_states, read_logits
from shd_torch.checks import check_option, check_temperature
from shd_torch.kd import ExactTargets, TeacherHead, hidden_loss, kd_loss, mean_logits
from shd_torch.kd.loss import DISTANCES
from shd_torch.kd.loss import REDUCTIONS as OVER_LAYERS
from shd_torch.kd.rows import DIVERGENCES
from shd_torch.training.rows import ROWS
from shd_torch.training.schedules import BetaSchedule

if TYPE_CHECKING:
    from shd_torch.data.dataset import CacheJoin

Weight: TypeAlias = float | Callable[[float], float]

TEACHERS: Final[tuple[str, ...]] = ("losses", "logits", "probs")
"""What is averaged where several teachers have logits."""


class RowsTerm(ABC):
    """A term on what records hold beside attention, or a live teacher gives; the table of forms names one per form.

    Attributes:
        SUBJECT: of the form.
        NAME: of what it logs, ``<NAME>_loss`` and ``<NAME>_weight``.
        KEYWORDS: that the student is called with.
        BY_SAMPLE: whether it is a mean over samples, although rows of positions are read.
        weight: a number of at least 0, or a function of progress in [0, 1].
        rows: which rows count, see ``KdTerm``.
    """

    SUBJECT: ClassVar[str]
    NAME: ClassVar[str]
    KEYWORDS: ClassVar[Mapping[str, Any]] = {}
    BY_SAMPLE: ClassVar[bool] = False
    weight: Weight
    rows: str = "positions"

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """Refuse training data that this term cannot learn from, before the first step.

        Raises:
            ShdError: ``cache-mismatch``, ``argument-value``.
        """
        if not has_teacher and all(form.SUBJECT != self.SUBJECT for form in joined.cache.manifest.forms):
            rule = f"{self.NAME} must have {self.SUBJECT} in {joined.cache.folder}, or a live teacher"
            raise ShdError("cache-mismatch", f"{rule}; got neither: precompute it with them", "CACHE-160")

    def read_taught(self, taught: Any, length: int | None) -> Any:
        """What a cache's batch or a live teacher's gives; None for nothing."""
        return taught.embeddings() if hasattr(taught, "embeddings") else None

    @abstractmethod
    def read_student(self, outputs: Any, name: str, projectors: Callable[..., Any]) -> tuple[Any, int | None]:
        """What is compared of the outputs of the student ``name``, and its L; None of one row per sample.

        ``projectors`` takes its hidden states by number to the teacher's widths.

        Raises:
            ShdError: ``argument-value``.
        """

    @abstractmethod
    def parts(
        self, taught: Sequence[Any], student: Any, *, loss_mask: Tensor | None, check: bool
    ) -> dict[str, Tensor]:
        """Losses whose sum is the term, by what their logged names end in; before the weight.

        Args:
            taught: one per teacher, as ``read_taught`` gives it.
            student: as ``read_student`` gives it.
            loss_mask: boolean ``(B, L)``, True = counts.
            check: validate the values, which costs a device sync.
        """

    @property
    def lacking(self) -> str:
        """The error where no teacher gives what it needs."""
        return f"{self.NAME} must have a teacher that gives {self.SUBJECT}; got none"


@dataclass(frozen=True)
class KdTerm(RowsTerm):
    """Additional loss on logits: ``weight * kd_loss(targets, student's logits)``.

    Attributes:
        weight: a number of at least 0, or a function of progress in [0, 1] such as ``BetaSchedule``.
        temperature: T of both sides; None: the targets' temperature if they have one, else 1.
        divergence: ``"kl"``, ``"reverse_kl"``, ``"jsd"`` or ``"cross_entropy"``.
        mixing: the m of ``jsd``.
        t_squared: multiply by T^2, so that the balance with the student's loss does not depend on T.
        rows: which rows count: ``"positions"`` of the attention mask, those whose label counts (``"labels"``), or
            those whose next label counts (``"next_labels"``, as in causal language modelling). For a classifier,
            whose logits have no position axis, every sample counts.
        vocab_size: number of classes to read on both sides; the others are padding.
        exact: learn from the cache's last states and the teacher's head (``shd precompute --hidden last``), over the
            whole vocabulary; the head is on the device, and its logits are made some rows at a time.
        teachers: with several teachers, average the ``"losses"``, or the ``"logits"`` or ``"probs"`` before one loss,
            which needs all logits of every teacher.

    Raises:
        ShdError: ``argument-value``.
    """

    SUBJECT: ClassVar[str] = "logits"
    NAME: ClassVar[str] = "kd"

    weight: Weight = 1.0
    temperature: float | None = None
    divergence: str = "kl"
    mixing: float = 0.5
    t_squared: bool = True
    rows: str = "positions"
    vocab_size: int | None = None
    teachers: str = "losses"
    exact: bool = False
    _head: list[TeacherHead] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read_weight(self.weight)
        if self.temperature is not None:
            check_temperature(self.temperature)
        check_option("divergence", self.divergence, DIVERGENCES)
        check_option("rows", self.rows, ROWS)
        check_option("teachers", self.teachers, TEACHERS)

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """Stored logits must be of its temperature and suit its divergence."""
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

    def read_taught(self, taught: Any, length: int | None) -> Any:
        """Its logits, or what makes them."""
        if not (self.exact and hasattr(taught, "last_states")):
            return taught.targets(length)
        states = taught.last_states(length)
        if self._head[0].weight.device != states.device:
            self._head[0] = self._head[0].to(states.device)
        return ExactTargets(states, self._head[0])

    def read_student(self, outputs: Any, name: str, projectors: Callable[..., Any]) -> tuple[Any, int | None]:
        """Its logits ``(B, L, V)``, or ``(B, V)``."""
        logits = read_logits(outputs)
        if logits is None or logits.ndim > 3:
            got = "none" if logits is None else str(tuple(logits.shape))
            rule = f"kd must have a student that returns logits (B, L, V) or (B, V); got {got}"
            advice = "one that fuses its head with its loss is trained by linear_kd_loss in a loop of your own"
            raise ShdError("argument-value", f"{rule}: {advice}")
        return logits, None if logits.ndim == 2 else logits.shape[1]

    def parts(
        self, taught: Sequence[Any], student: Any, *, loss_mask: Tensor | None, check: bool
    ) -> dict[str, Tensor]:
        """``loss``."""
        return {"": self.loss(taught, student, loss_mask=loss_mask, check=check)}

    @property
    def lacking(self) -> str:
        """See ``RowsTerm``."""
        return "kd must have a teacher that returns logits (..., V); got none"

    def loss(self, targets: Sequence[Any], logits: Tensor, *, loss_mask: Tensor | None, check: bool) -> Tensor:
        """The mean over counted rows, before the weight.

        Args:
            targets: one per teacher, each as in ``kd_loss``.
            logits: of the student ``(B, L, V)``, or ``(B, V)``.
            loss_mask: boolean, the shape of the rows; True = counts.
            check: validate the values, which costs a device sync.

        Raises:
            ShdError: what ``kd_loss`` raises; ``argument-value`` for records where teachers' logits are averaged.
        """
        sources = list(targets)
        if len(sources) > 1 and self.teachers != "losses":
            if not all(isinstance(source, Tensor) for source in sources):
                rule = "kd must have teachers='losses' where a teacher gives some of its classes alone"
                reason = "the mean of truncated rows is not the truncated mean"
                raise ShdError("argument-value", f"{rule}; got {self.teachers!r}: {reason}")
            temperature = 1.0 if self.temperature is None else self.temperature
            sources = [mean_logits(sources, of=self.teachers, temperature=temperature, check=check)]
        names = ("divergence", "mixing", "temperature", "t_squared", "vocab_size")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        terms = [kd_loss(source, logits, loss_mask=loss_mask, check=check, **options) for source in sources]
        return sum(terms[1:], terms[0]) / len(terms)


def exact_term(weight: Weight) -> KdTerm:
    """The term on exact targets, as the table of forms makes it."""
    return KdTerm(weight=weight, exact=True)


@dataclass(frozen=True, eq=False)
class HiddenTerm(RowsTerm):
    """Additional loss on hidden states.

    Attributes:
        pairs: (student, teacher) numbers of hidden states as in Hugging Face: 0 are the embeddings, k is the output
            of block k; each of the student's at most once.
        weight: as of ``KdTerm``.
        distance: ``"mse"``, ``"cosine"`` or ``"normalized_mse"``.
        reduction: ``"sum"`` over pairs or ``"mean"``.
        projectors: from the student's width to the teacher's: a module for all pairs, or modules by student number;
            None creates a linear layer per pair with different widths. They are trained with the student, and saved
            in checkpoints in a separate file.

    Raises:
        ShdError: ``argument-value``, ``layers-invalid``.
    """

    SUBJECT: ClassVar[str] = "hidden"
    NAME: ClassVar[str] = "hidden"
    KEYWORDS: ClassVar[Mapping[str, Any]] = {"output_hidden_states": True}

    pairs: Sequence[tuple[int, int]] = ()
    weight: Weight = 1.0
    distance: str = "mse"
    reduction: str = "sum"
    projectors: nn.Module | Mapping[int, nn.Module] | None = None

    def __post_init__(self) -> None:
        read_weight(self.weight)
        check_option("distance", self.distance, DISTANCES)
        check_option("reduction", self.reduction, OVER_LAYERS)
        pairs = tuple(self.pairs)
        good = bool(pairs) and all(
            isinstance(pair, tuple | list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
            for pair in pairs
        )
        if not good or len({student for student, _ in pairs}) < len(pairs):
            rule = "pairs must be (student, teacher) numbers of hidden states of at least 0, each student's once"
            raise ShdError("layers-invalid", f"{rule}; got {self.pairs!r}")
        object.__setattr__(self, "pairs", tuple((student, teacher) for student, teacher in pairs))

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """The teacher's hidden states that are compared, each once, ascending."""
        return tuple(sorted({teacher for _, teacher in self.pairs}))

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must hold the teacher's layers, or nothing where a live teacher gives them."""
        folder, held = joined.cache.folder, joined.hidden_layers
        if not set(self.teacher_layers) <= set(held) and (held or not has_teacher):
            rule = f"hidden must have the teacher's hidden states {list(self.teacher_layers)} in {folder}"
            message = f"{rule}; got {list(held)}: precompute with --hidden, and read them"
            raise ShdError("cache-mismatch", message, "CACHE-176")

    def read_taught(self, taught: Any, length: int | None) -> Any:
        """Its hidden states by number."""
        return taught.hidden_states(length) or None

    def read_student(self, outputs: Any, name: str, projectors: Callable[..., Any]) -> tuple[Any, int | None]:
        """Its hidden states by number, projected."""
        numbers = [student for student, _ in self.pairs]
        states = projectors(read_hidden_states(outputs, numbers, name))
        return states, states[numbers[0]].shape[1]

    def parts(
        self, taught: Sequence[Any], student: Any, *, loss_mask: Tensor | None, check: bool
    ) -> dict[str, Tensor]:
        """``losses``, by layer."""
        losses = self.losses(taught, student, loss_mask=loss_mask, check=check)
        return {f"_layer_{number}": loss for number, loss in losses.items()}

    @property
    def lacking(self) -> str:
        """See ``RowsTerm``."""
        rule = "hidden must have a teacher that keeps hidden states; got none"
        return f"{rule}: give OnlineTeacher hidden_layers={self.teacher_layers}"

    def losses(
        self,
        teachers: Sequence[Mapping[int, Tensor]],
        students: Mapping[int, Tensor],
        *,
        loss_mask: Tensor | None,
        check: bool,
    ) -> dict[int, Tensor]:
        """By student number the mean over counted rows, averaged over teachers; their sum is the term."""
        count = len(teachers) * (len(self.pairs) if self.reduction == "mean" else 1)
        losses: dict[int, Tensor] = {}
        for number, source in sorted(self.pairs):
            for states in teachers:
                pair = students[number], states[source]
                loss = hidden_loss(*pair, distance=self.distance, loss_mask=loss_mask, check=check) / count
                losses[number] = losses[number] + loss if number in losses else loss
        return losses


def no_logits(name: str, folder: str) -> str:
    """The error for a cache without logits."""
    rule = f"{name} must have logits in {folder}, or a live teacher"
    return f"{rule}; got neither: precompute with --logits, and read them (logits=True)"


def read_weight(weight: Weight) -> Callable[[float], float]:
    """A schedule, from a number or a function of progress."""
    return weight if callable(weight) else BetaSchedule(weight)


def check_targets(argument: str, own: float | None, temperature: float | None, origin: str) -> None:
    """Refuse targets of another temperature than an argument's own: ``argument-value``."""
    if temperature is not None and own not in (None, temperature):
        rule = f"{argument} must have the temperature {temperature:g} of {origin}, or None; got {own:g}"
        reason = "what lies outside of the kept classes cannot be moved to another"
        raise ShdError("argument-value", f"{rule}: {reason}, so make the targets at this one")
