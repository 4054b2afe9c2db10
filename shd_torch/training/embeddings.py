"""Embeddings of texts: a loss for ``SentenceTransformerTrainer``, and the pairs that an evaluation compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.cache import CacheReader, Embeddings, sample_key
from shd_ref.errors import ShdError
from shd_torch.checks import check_option
from shd_torch.kd import EmbeddingAgreement, compare_embeddings, embedding_loss
from shd_torch.kd.embeddings import DISTANCES, MOST_TEXTS
from shd_torch.training.terms import make_projector


class SeenEmbeddings:
    """Embeddings of an evaluation, of the first ``MOST_TEXTS`` texts, on the host."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._room = MOST_TEXTS

    def add(self, teacher: Tensor, student: Tensor) -> None:
        first = [side[: self._room].detach().to("cpu", torch.float32) for side in (teacher, student)]
        self._pairs.append((first[0], first[1]))
        self._room -= len(first[0])

    def agreement(self) -> EmbeddingAgreement | None:
        if MOST_TEXTS - self._room < 3:
            return None
        teacher, student = (torch.cat(side) for side in zip(*self._pairs, strict=True))
        return compare_embeddings(teacher, student)


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
        check_option("distance", distance, DISTANCES)
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
