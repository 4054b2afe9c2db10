"""What a model is for: the quality of a student of it, and what a student learns from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import NO_FORM, PrecomputeOptions
from shd_ref.teacher.sentence_folder import Pooling, read_pooling, read_texts
from shd_ref.tolerances import load_tolerances
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.compress.samples import Row, batches
from shd_torch.deploy.inputs import open_graph, run_graph
from shd_torch.export import refuse
from shd_torch.kd import compare_embeddings, pool_states
from shd_torch.shrink.folders import model_class
from shd_torch.training.terms import EmbeddingTerm, HiddenTerm, KdTerm

Forward: TypeAlias = Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]
"""A model: its first output, logits or last states, for a padded batch."""


@dataclass(frozen=True)
class Quality:
    """How well a model does its task on some samples.

    Attributes:
        value: of the task's measure; 1 is the teacher's.
        loss: what rises while the model gets worse, in steps that can be added.
        details: other figures by name.
    """

    value: float
    loss: float
    details: Mapping[str, float]


class Task(ABC):
    """A kind of model and its measure; as it is, one that is taught by the teacher's logits.

    Attributes:
        NAME: of the kind.
        MEASURE: of the quality, in words.
        LOGITS: form in which the cache holds them.
        HAS_LABELS: whether the student has a loss of its own, on the text.
        FREEZES_EMBEDDINGS: of tokens: they cost a sixth of a step and change little.
    """

    NAME: ClassVar[str]
    MEASURE: ClassVar[str]
    LOGITS: ClassVar[str] = "none"
    HAS_LABELS: ClassVar[bool] = False
    FREEZES_EMBEDDINGS: ClassVar[bool] = True

    @abstractmethod
    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """What is compared of a batch's output, with a first axis of samples or of rows."""

    @abstractmethod
    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Of the summaries of all batches."""

    def targets(self, num_layers: int) -> PrecomputeOptions:
        """What the cache holds of a teacher with so many layers, without attention."""
        return PrecomputeOptions(num_student_heads=0, form=NO_FORM, logits=self.LOGITS)

    def terms(self, num_layers: int, student: Any) -> dict[str, Any]:
        """Keywords of ``SHDTrainer``."""
        return {"kd": KdTerm()}


class Decoder(Task):
    """A causal language model, which also learns from the text."""

    NAME: ClassVar[str] = "decoder"
    MEASURE: ClassVar[str] = "teacher's perplexity over the student's"
    LOGITS: ClassVar[str] = "topk"
    HAS_LABELS: ClassVar[bool] = True
    FREEZES_EMBEDDINGS: ClassVar[bool] = False  # they may be the head too

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of each next token ``(rows,)``, in nats."""
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        counted = mask[:, 1:] & mask[:, :-1]
        return nn.functional.cross_entropy(output[:, :-1][counted].float(), ids[:, 1:][counted], reduction="none")

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """``exp`` of the difference of cross entropies."""
        first, second = float(teacher.mean()), float(student.mean())
        return Quality(float(np.exp(first - second)), second, {"cross_entropy": second})


class Classifier(Task):
    """A classifier of texts or images."""

    NAME: ClassVar[str] = "classifier"
    MEASURE: ClassVar[str] = "same class as the teacher"
    LOGITS: ClassVar[str] = "float16"

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits ``(B, C)``."""
        return output

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Share of samples with the same largest logit, and the divergence from the teacher."""
        agreement = float((teacher.argmax(-1) == student.argmax(-1)).double().mean())
        first, second = (side.double().log_softmax(-1) for side in (teacher, student))
        kl = float((first.exp() * (first - second)).sum(-1).mean())
        return Quality(agreement, kl, {"kl": kl})


class Encoder(Task):
    """A model without a head, whose states are read by something else."""

    NAME: ClassVar[str] = "encoder"
    MEASURE: ClassVar[str] = "cosine of last states"

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """States of the positions that count ``(rows, D)``."""
        mask = batch.get("attention_mask")
        return output.flatten(0, 1) if mask is None else output[mask.bool()]

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Mean cosine, and the squared error relative to the teacher's."""
        cosine = float(nn.functional.cosine_similarity(teacher, student, dim=-1).mean())
        error = float((teacher - student).square().mean() / teacher.square().mean())
        return Quality(cosine, error, {"relative_error": error})

    def targets(self, num_layers: int) -> PrecomputeOptions:
        """The last states."""
        return replace(super().targets(num_layers), hidden=(num_layers,))

    def terms(self, num_layers: int, student: Any) -> dict[str, Any]:
        """On the last states."""
        pair = (int(student.config.num_hidden_layers), num_layers)
        return {"hidden": HiddenTerm([pair], distance="normalized_mse")}


@dataclass(frozen=True)
class SentenceEncoder(Encoder):
    """A sentence-transformers folder."""

    NAME: ClassVar[str] = "sentence encoder"
    MEASURE: ClassVar[str] = "Spearman of cosines"

    pooling: Pooling

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Embeddings ``(B, D)``."""
        mask = batch["attention_mask"].bool()
        return pool_states(output, mask, pooling=self.pooling.mode, normalize=self.pooling.normalize)

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Rank correlation of the cosines of all pairs of texts, and shared neighbours."""
        agreement = compare_embeddings(teacher, student)
        loss = float(1 - nn.functional.cosine_similarity(teacher, student).mean())
        return Quality(agreement.spearman, loss, {"neighbours": agreement.neighbours})

    def targets(self, num_layers: int) -> PrecomputeOptions:
        """Embeddings too."""
        return replace(super().targets(num_layers), embeddings=self.pooling)

    def terms(self, num_layers: int, student: Any) -> dict[str, Any]:
        """On both."""
        return {"embeddings": EmbeddingTerm()} | super().terms(num_layers, student)


def find_task(folder: Path, config: Any) -> Task:
    """The kind of a model, by its folder and the class that ``read_config`` found.

    Raises:
        ShdError: ``shrink-unsupported`` for an encoder-decoder, and for a head that no kind has.
    """
    name = model_class(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        rule = "teacher must be an encoder, a decoder or a classifier"
        raise ShdError("shrink-unsupported", f"{rule}; got the encoder-decoder {name}: shrink its stacks yourself")
    if read_texts(folder).drops_head:
        return SentenceEncoder(read_pooling(folder))
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Decoder()
    if "Classification" in name and "Token" not in name:
        kind = getattr(config, "problem_type", None) or "single_label_classification"
        if config.num_labels > 1 and kind == "single_label_classification":
            return Classifier()
        rule = "teacher must choose one of two classes or more"
        got = f"got {name} with num_labels={config.num_labels} and problem_type={config.problem_type!r}"
        remedy = "compress has no measure for scores and independent labels yet: use shd-torch shrink, then train"
        raise ShdError("shrink-unsupported", f"{rule}; {got}; {remedy}")
    if name.endswith("Model"):
        return Encoder()
    rule = "teacher must be a sentence encoder, a decoder, a classifier, or a model without a head"
    raise ShdError("shrink-unsupported", f"{rule}; got {name}: compress its base model, and train the head after")


class Judge:
    """Some samples, with what the teacher makes of them."""

    def __init__(self, task: Task, rows: Sequence[Row], teacher: Forward, pad_id: int = 0) -> None:
        self.task, self._batches = task, list(batches(rows, pad_id=pad_id))
        self._teacher = summarise(task, teacher, self._batches)

    @torch.no_grad()
    def measure(self, forward: Forward) -> Quality:
        """A model's quality; ``not-finite`` where it gives NaN or infinity."""
        return self.task.compare(self._teacher, summarise(self.task, forward, self._batches))


def summarise(task: Task, forward: Forward, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Tensor:
    """What is compared of a model's outputs, of all batches; ``not-finite``."""
    summaries = []
    for batch in batches:
        output = torch.from_numpy(np.asarray(forward(batch)))
        need(bool(torch.isfinite(output).all()), "not-finite", "a model", "give finite outputs", "NaN or infinity")
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        summaries.append(task.summarise(output, tensors))
    return torch.cat(summaries)


def check_causal(forward: Forward) -> None:
    """Refuse a model that looks ahead, such as an encoder kept as a decoder: its perplexity says nothing."""
    ids = np.array([[0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 0]])
    first, second = forward({"input_ids": ids, "attention_mask": np.ones_like(ids)})[:, :-1]
    if np.abs(first - second).max() > load_tolerances()["graph"]["probs"]["float32"] * max(1.0, np.abs(first).max()):
        rule = (
            "a decoder must read each token from those before it alone; got one whose logits change with later ones"
        )
        remedy = "set is_decoder in its config.json, or compress its base model as an encoder"
        raise ShdError("shrink-unsupported", f"{rule}: {remedy}")


def model_run(model: Any) -> Forward:
    """A PyTorch model, from now on in evaluation mode, without a cache of keys."""
    model.eval()
    keywords = {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}

    @torch.no_grad()
    def forward(batch: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        device = next(model.parameters()).device
        tensors = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
        try:
            outputs = model(**tensors, **keywords)
        except Exception as error:  # a model raises what it likes
            remedy = (
                "take its own tokenizer, with no id beyond its table, and no text beyond its positions (--max-length)"
            )
            raise refuse(model, "take the data", error, remedy, "inputs-invalid") from error
        logits = read_logits(outputs)
        states: Tensor = logits if logits is not None else read_output(outputs, "last_hidden_state")
        array: NDArray[Any] = states.cpu().numpy()
        return array

    return forward


def graph_run(path: Path, threads: int = 1) -> Forward:
    """A graph in onnxruntime."""
    session = open_graph(path, threads)
    names = [entry.name for entry in session.get_inputs()]
    return lambda batch: run_graph(session, {name: batch[name] for name in names}, path)[0]
