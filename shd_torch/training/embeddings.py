"""Learning a teacher's embeddings: a term of ``SHDTrainer``, and a loss of ``SentenceTransformerTrainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.cache import CacheReader, Embeddings, sample_key
from shd_ref.errors import ShdError
from shd_torch.capture.outputs import read_every_hidden_state, read_output
from shd_torch.checks import check_option
from shd_torch.kd import EmbeddingAgreement, compare_embeddings, embedding_loss, pool_states
from shd_torch.kd.embeddings import DISTANCES, MOST_TEXTS
from shd_torch.kd.loss import unit
from shd_torch.supervision.targets import EmbeddingTargets
from shd_torch.training.terms import RowsTerm, Weight, read_weight

if TYPE_CHECKING:
    from shd_torch.data.dataset import CacheJoin

EMBEDDING: Final = -1
"""Where ``Projectors`` keep that of embeddings, beside those of hidden states from 0 on."""


@dataclass(frozen=True, eq=False)
class EmbeddingTerm(RowsTerm):
    """Additional loss on embeddings of texts, from a cache: ``weight * embedding_loss(student's, teacher's)``.

    The student's last hidden state is pooled as the teacher's was, over the positions of the attention mask. The loss
    is a mean over texts, also where gradients accumulate; ``"similarity"`` compares the texts of one micro-batch.

    Attributes:
        weight: as of ``KdTerm``.
        distance: ``"cosine"``, ``"mse"`` or ``"similarity"``, see ``embedding_loss``.
        projector: module from the student's width to the teacher's, for ``"cosine"`` and ``"mse"``; None creates a
            linear layer where the widths differ. It is trained with the student, and left behind.

    Raises:
        ShdError: ``argument-value``.
    """

    SUBJECT: ClassVar[str] = "embeddings"
    NAME: ClassVar[str] = "embedding"
    KEYWORDS: ClassVar[Mapping[str, Any]] = {"output_hidden_states": True}  # where the student has a head
    BY_SAMPLE: ClassVar[bool] = True

    weight: Weight = 1.0
    distance: str = "cosine"
    projector: nn.Module | None = None

    def __post_init__(self) -> None:
        read_weight(self.weight)
        check_option("distance", self.distance, DISTANCES)

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must hold embeddings, also beside a live teacher, which gives none."""
        if joined.cache.manifest.embeddings is None:
            rule = f"embedding must have embeddings in {joined.cache.folder}"
            raise ShdError("cache-mismatch", f"{rule}; got none: precompute with --embeddings", "CACHE-181")

    @property
    def lacking(self) -> str:
        """See ``RowsTerm``."""
        return "embedding must have a cache of embeddings, as no live teacher gives them; got none"

    def read_student(self, outputs: Any, name: str, projectors: Callable[..., Any]) -> tuple[Any, int | None]:
        """Its last hidden state ``(B, L, D)``, and what projects embeddings."""
        states = read_output(outputs, "last_hidden_state")
        states = states if isinstance(states, Tensor) else read_every_hidden_state(outputs, name)[-1]
        return (states, projectors), states.shape[1]

    def pool(self, taught: EmbeddingTargets, states: Tensor, mask: Tensor | None) -> Tensor:
        """The student's embeddings, before they are projected or normalised."""
        return pool_states(states, mask, pooling=taught.pooling)

    def parts(
        self, taught: Sequence[Any], student: Any, *, loss_mask: Tensor | None, check: bool
    ) -> dict[str, Tensor]:
        """``loss``."""
        states, projectors = student
        (targets,) = taught  # of the cache: live teachers give none
        own = projectors({EMBEDDING: self.pool(targets, states, loss_mask)})[EMBEDDING]
        own = unit(own) if targets.normalize else own
        return {"": embedding_loss(own, targets.vectors, distance=self.distance, check=check)}


class SeenEmbeddings:
    """Embeddings of an evaluation, of the first ``MOST_TEXTS`` texts, on the host."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._left = MOST_TEXTS

    def add(self, teacher: Tensor, student: Tensor) -> None:
        """Those of a batch."""
        kept = [side[: self._left].detach().to("cpu", torch.float32) for side in (teacher, student)]
        self._pairs.append((kept[0], kept[1]))
        self._left -= len(kept[0])

    def agreement(self) -> EmbeddingAgreement | None:
        """None of fewer than three texts."""
        if MOST_TEXTS - self._left < 3:
            return None
        teacher, student = (torch.cat(side) for side in zip(*self._pairs, strict=True))
        return compare_embeddings(teacher, student)


class EmbeddingLoss(nn.Module):
    """A loss for ``SentenceTransformerTrainer`` towards a teacher's embeddings, from a cache or from labels.

    ``SentenceTransformerTrainer(student, train_dataset=texts, loss=EmbeddingLoss(student, "cache"))``. Every column
    of texts is compared with its own embeddings, which are found by the content of its tokens.

    Args:
        model: the student, a ``SentenceTransformer``, with all its modules.
        cache: of ``shd precompute --embeddings``: its folder, address, or a reader; None: labels hold the teacher's
            embeddings, ``(B, D)`` for every column of texts, or ``(B, columns, D)``.
        distance: ``"cosine"``, ``"mse"`` or ``"similarity"``, see ``embedding_loss``.
        projector: module from the student's width to the teacher's; None creates a linear layer where the cache has
            another width. It is trained with the student, and no part of it.

    Raises:
        ShdError: ``argument-value`` for a cache without embeddings, and in a batch without labels or cache;
            ``sample-missing`` for a text that is not in the cache; what opening the cache and ``embedding_loss``
            raise.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: CacheReader | str | Path | None = None,
        *,
        distance: str = "cosine",
        projector: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_option("distance", distance, DISTANCES)
        self.model, self.distance = model, distance
        self.cache = CacheReader(cache) if isinstance(cache, str | Path) else cache
        form = None if self.cache is None else self.cache.manifest.need(Embeddings, "embeddings")
        names = ("get_embedding_dimension", "get_sentence_embedding_dimension")  # the second before version 6
        width = next((getattr(model, name)() for name in names if hasattr(model, name)), None)
        self.projector = make_projector(projector, distance, width, None if form is None else form.width)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean over all texts of a batch; ``sentence_features`` hold the tokens of each column."""
        columns = list(sentence_features)
        if self.cache is not None:
            taught = torch.cat([self._read(features) for features in columns])
        elif isinstance(labels, Tensor) and labels.ndim in (2, 3) and labels.is_floating_point():
            spread = labels[:, None].expand(-1, len(columns), -1) if labels.ndim == 2 else labels
            taught = spread.transpose(0, 1).flatten(0, 1)
        else:
            got = "none" if labels is None else f"{tuple(labels.shape)} {labels.dtype}"
            message = f"labels must hold the teacher's embeddings (B, D) where there is no cache; got {got}"
            raise ShdError("argument-value", message)
        own = torch.cat([self.model(dict(features))["sentence_embedding"] for features in columns])
        if self.projector is not None:
            own = self.projector(own.to(next(self.projector.parameters(), own).dtype))
        return embedding_loss(own, taught, distance=self.distance, check=False)

    def _read(self, features: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of a column from the cache, ``(B, D)``, by its tokens without their padding."""
        assert self.cache is not None
        inputs = self.cache.manifest.inputs
        arrays = {name: features[name].cpu().numpy() for name in inputs.names if name in features}
        if len(arrays) < len(inputs.names) or inputs.mask is None:
            rule = f"a batch must hold the teacher's inputs {', '.join(inputs.names)}"
            raise ShdError("inputs-invalid", f"{rule}; got {', '.join(features)}", "CACHE-30")
        counted = arrays[inputs.mask] != 0
        texts = [{name: array[row][some] for name, array in arrays.items()} for row, some in enumerate(counted)]
        keys = [sample_key(text) for text in texts]
        lost = [text for text, key in zip(texts, keys, strict=True) if key not in self.cache]
        if lost:
            rule = f"{self.cache.folder} must hold every text; it lacks {len(lost)} of {len(keys)} of a batch, first "
            rule += f"tokens {lost[0][inputs.names[-1]].tolist()[:20]}"
            advice = "tokenise as precompute did, with its --max-length as max_seq_length and without prompts"
            raise ShdError("sample-missing", f"{rule}: {advice}", "CACHE-82")
        records = self.cache.read_batch(keys, (), logits=False, hidden=())
        return torch.from_numpy(np.stack([self.cache.decode_embedding(record) for record in records]))


def make_projector(
    projector: nn.Module | None, distance: str, student_width: int | None, teacher_width: int | None
) -> nn.Module | None:
    """The given module, or a linear layer between different widths; None where neither is needed."""
    if distance == "similarity":
        if projector is not None:
            rule = "projector must be left out with distance='similarity', which compares embeddings of any widths"
            raise ShdError("argument-value", f"{rule}; got {type(projector).__name__}")
        return None
    if projector is not None or student_width is None or teacher_width in (None, student_width):
        return projector
    return nn.Linear(student_width, teacher_width)
