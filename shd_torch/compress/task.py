"""Kinds of models: how the quality of a student is measured, and the terms that it is trained with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import NO_FORM, PrecomputeOptions
from shd_ref.teacher.sentence_folder import MODULES, Pooling, modules_after_model, read_pooling, read_texts
from shd_ref.tolerances import load_tolerances
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.compress.measures import Labelled, compare_labels, compare_orders, correlate, rank_relevant
from shd_torch.compress.samples import LABEL_COLUMNS, QUERY, Row, batches, inputs_of
from shd_torch.deploy.inputs import open_graph, run_graph
from shd_torch.export import refuse
from shd_torch.kd import compare_embeddings, pool_states
from shd_torch.shrink.folders import model_class
from shd_torch.supervision.supervision import Taught
from shd_torch.training.batch import Forward as TrainedForward
from shd_torch.training.batch import MicroBatch, count_samples
from shd_torch.training.terms import EmbeddingTerm, HiddenTerm, KdTerm, Measured, Term, Weight

Forward: TypeAlias = Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]
"""A model: its first output, logits or last states, for a padded batch."""


@dataclass(frozen=True)
class Quality:
    """How well a model does its task on some samples.

    Attributes:
        value: of the task's measure; 1 is the teacher's.
        loss: higher for a worse model, in steps that can be added.
        details: other figures by name.
        labels: agreement with the labels of the samples, by name, where they have any.
    """

    value: float
    loss: float
    details: Mapping[str, float]
    labels: Mapping[str, float] = field(default_factory=dict)


class Task(ABC):
    """A kind of model and its measure; as it is, one that is taught by the teacher's logits.

    Attributes:
        NAME: of the kind.
        MEASURE: of the quality, in words.
        DETAILS: other figures that the page shows, 1 being the teacher's, in words by name.
        LABELS: columns that its labels may be in, the first that a file has.
        LOGITS: form in which the cache holds them.
        HAS_STATES: whether the cache holds the last states, which the student learns.
        HAS_LABELS: whether the student also has a loss on the text.
        READS_PAIRS: of texts.
        FREEZES_EMBEDDINGS: of tokens: they cost a sixth of a step and change little.
    """

    NAME: ClassVar[str]
    MEASURE: ClassVar[str]
    DETAILS: ClassVar[Mapping[str, str]] = {}
    LABELS: ClassVar[Sequence[str]] = ()
    LOGITS: ClassVar[str] = "none"
    HAS_STATES: ClassVar[bool] = False
    HAS_LABELS: ClassVar[bool] = False
    READS_PAIRS: ClassVar[bool] = False
    FREEZES_EMBEDDINGS: ClassVar[bool] = True

    @abstractmethod
    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The part of a batch's output that is compared, with a first axis of samples or of rows."""

    @abstractmethod
    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Of the summaries of all batches."""

    def tells_apart(self, summary: Tensor) -> bool:
        """Whether not every student that gives one answer to all samples agrees with these answers."""
        return True

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """Agreement with labels by name, of the summary of all labelled rows in their order; nothing: undefined."""
        return {}

    def targets(self, num_layers: int) -> PrecomputeOptions:
        """Options of the cache of a teacher with so many layers, without attention."""
        hidden = (num_layers,) if self.HAS_STATES else ()
        return PrecomputeOptions(num_student_heads=0, form=NO_FORM, logits=self.LOGITS, hidden=hidden)

    def terms(self, num_layers: int, student: Any) -> dict[str, Any]:
        """Keywords of ``SHDTrainer``."""
        pair = (int(student.config.num_hidden_layers), num_layers)
        hidden = {"hidden": HiddenTerm([pair], distance="normalized_mse")} if self.HAS_STATES else {}
        return self.own_terms() | hidden

    def own_terms(self) -> dict[str, Any]:
        """All but that of the last states."""
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
    DETAILS: ClassVar[Mapping[str, str]] = {"kappa": "the same beyond chance, 0 for a student that knows nothing"}
    LABELS: ClassVar[Sequence[str]] = ("label",)
    LOGITS: ClassVar[str] = "float16"
    READS_PAIRS: ClassVar[bool] = True

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits ``(B, C)``."""
        return output

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Share of samples with the same largest logit, and the divergence from the teacher."""
        agreement = float((teacher.argmax(-1) == student.argmax(-1)).double().mean())
        first, second = (side.double().log_softmax(-1) for side in (teacher, student))
        kl = float((first.exp() * (first - second)).sum(-1).mean())
        classes = (nn.functional.one_hot(side.argmax(-1), side.shape[-1]) > 0 for side in (teacher, student))
        return Quality(agreement, kl, {"kl": kl, "kappa": compare_labels(*classes)["kappa"]})

    def tells_apart(self, summary: Tensor) -> bool:
        classes = summary.argmax(-1)
        return bool((classes != classes[0]).any())

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """Share of samples whose class is the label."""
        return {"accuracy": float((summary.argmax(-1) == labels.classes(summary.shape[-1])).double().mean())}


class IndependentLabels(Classifier):
    """A classifier each of whose labels a sample has or not."""

    NAME: ClassVar[str] = "classifier of independent labels"
    MEASURE: ClassVar[str] = "agreement with the teacher's labels beyond chance (kappa)"
    DETAILS: ClassVar[Mapping[str, str]] = {
        "worst": "kappa of the label with the least",
        "agreement": "share of equal labels, which is high by chance where most samples lack most labels",
    }

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Kappa over all labels, and the divergence of their probabilities, summed over labels."""
        details = compare_labels(teacher > 0, student > 0)
        first, second = (side.double() for side in (teacher, student))
        signs = torch.tensor([1.0, -1.0])[:, None, None]
        logs = [nn.functional.logsigmoid(signs * side) for side in (first, second)]
        kl = float((logs[0].exp() * (logs[0] - logs[1])).sum((0, -1)).mean())
        return Quality(details.pop("kappa"), kl, details | {"kl": kl})

    def tells_apart(self, summary: Tensor) -> bool:
        return bool(((summary > 0) != (summary[0] > 0)).any())

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """F1 over all labels together."""
        predicted, human = summary > 0, labels.flags(summary.shape[-1])
        return {"f1": float(2 * (predicted & human).sum() / (predicted.sum() + human.sum()).clamp(min=1))}

    def own_terms(self) -> dict[str, Any]:
        return {"kd": LabelTerm()}


class Regressor(Task):
    """A model of one score or several of a text, a pair of texts or an image."""

    NAME: ClassVar[str] = "regressor"
    MEASURE: ClassVar[str] = "Spearman of scores with the teacher's"
    DETAILS: ClassVar[Mapping[str, str]] = {
        "kendall": "Kendall's coefficient within a query, the pairs with one first text",
        "ndcg": "NDCG@10 within a query by the teacher's scores, on a scale where a random order has 0",
        "worst": "Spearman of the score with the least",
    }
    LABELS: ClassVar[Sequence[str]] = tuple(reversed(LABEL_COLUMNS))
    LOGITS: ClassVar[str] = "float16"
    HAS_STATES: ClassVar[bool] = True
    READS_PAIRS: ClassVar[bool] = True

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of the query, -1 where there is none, and the scores ``(B, 1 + K)``."""
        queries = batch.get(QUERY, torch.full((len(output),), -1))
        return torch.cat([queries[:, None].double(), output.double()], -1)

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Mean rank correlation of scores, orders within queries, and the squared error over the variance."""
        queries, (first, second) = teacher[:, 0], (side[:, 1:] for side in (teacher, student))
        correlations = correlate(first, second) or [0.0]
        details = {"worst": min(correlations)} if len(correlations) > 1 else {}
        if first.shape[1] == 1 and bool((queries >= 0).all()):
            details |= compare_orders(first[:, 0], second[:, 0], queries)
        variance = first.var(0)
        error = (first - second).square().mean(0) / torch.where(variance > 0, variance, 1.0)
        return Quality(sum(correlations) / len(correlations), float(error.mean()), details)

    def tells_apart(self, summary: Tensor) -> bool:
        return bool((summary[:, 1:] != summary[0, 1:]).any())

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """Rank correlation with the labels, the mean over scores."""
        correlations = correlate(labels.numbers(summary.shape[1] - 1), summary[:, 1:])
        return {"spearman": sum(correlations) / len(correlations)} if correlations else {}

    def own_terms(self) -> dict[str, Any]:
        return {"terms": [ScoreTerm()]}


class Reranker(Regressor):
    """A cross encoder: one score of a query and a text."""

    NAME: ClassVar[str] = "reranker"
    LABELS: ClassVar[Sequence[str]] = LABEL_COLUMNS

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """MAP and MRR of texts whose label is above 0, where queries have several; else the rank correlation."""
        queries = summary[:, 0]
        if labels.column != "label" or len(torch.unique(queries)) in (1, len(queries)):
            return super().grade(summary, labels)
        return rank_relevant(summary[:, 1], labels.numbers(1)[:, 0] > 0, queries)


class Encoder(Task):
    """A model without a head, whose states are read by something else."""

    NAME: ClassVar[str] = "encoder"
    MEASURE: ClassVar[str] = "cosine of last states"
    HAS_STATES: ClassVar[bool] = True

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """States of the positions that count ``(rows, D)``."""
        mask = batch.get("attention_mask")
        return output.flatten(0, 1) if mask is None else output[mask.bool()]

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Mean cosine, and the squared error relative to the teacher's."""
        cosine = float(nn.functional.cosine_similarity(teacher, student, dim=-1).mean())
        error = float((teacher - student).square().mean() / teacher.square().mean())
        return Quality(cosine, error, {"relative_error": error})

    def own_terms(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class SentenceEncoder(Encoder):
    """A sentence-transformers folder."""

    NAME: ClassVar[str] = "sentence encoder"
    MEASURE: ClassVar[str] = "Spearman of cosines"
    DETAILS: ClassVar[Mapping[str, str]] = {
        "neighbours": "share of a text's ten nearest that are the teacher's",
        "index": "the same among embeddings of the teacher, as where it made the index and the student the query",
    }
    LABELS: ClassVar[Sequence[str]] = tuple(reversed(LABEL_COLUMNS))
    READS_PAIRS: ClassVar[bool] = True

    pooling: Pooling

    def summarise(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Embeddings ``(B, D)``."""
        mask = batch["attention_mask"].bool()
        return pool_states(output, mask, pooling=self.pooling.mode, normalize=self.pooling.normalize)

    def compare(self, teacher: Tensor, student: Tensor) -> Quality:
        """Rank correlation of the cosines of all pairs of texts, and shared neighbours."""
        agreement = compare_embeddings(teacher, student)
        loss = float(1 - nn.functional.cosine_similarity(teacher, student).mean())
        shares = {"neighbours": agreement.neighbours, "index": agreement.index}
        return Quality(agreement.spearman, loss, {name: share for name, share in shares.items() if share is not None})

    def grade(self, summary: Tensor, labels: Labelled) -> dict[str, float]:
        """Rank correlation of the cosines of pairs with the labels; texts alone have none."""
        first, second = summary[: len(labels.values)], summary[len(labels.values) :]
        cosines = nn.functional.cosine_similarity(first, second)[:, None]
        return {"spearman": sum(correlations)} if (correlations := correlate(labels.numbers(1), cosines)) else {}

    def targets(self, num_layers: int) -> PrecomputeOptions:
        """Embeddings too."""
        return replace(super().targets(num_layers), embeddings=self.pooling)

    def own_terms(self) -> dict[str, Any]:
        return {"embeddings": EmbeddingTerm()}


_BY_PROBLEM: Final[Mapping[str, Task]] = {
    "single_label_classification": Classifier(),
    "multi_label_classification": IndependentLabels(),
    "regression": Regressor(),
}


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
    if (folder / MODULES).exists() and (others := modules_after_model(folder)):
        rule = "teacher must give its scores or classes by the head of its model"
        raise ShdError("shrink-unsupported", f"{rule}; got the module {others[0]['type']} in {MODULES}")
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return Decoder()
    if "Classification" in name and "Token" not in name:
        problem = getattr(config, "problem_type", None)
        if config.num_labels == 1 and problem != "regression" and "Sequence" in name:
            return Reranker()  # one class is none to choose: such heads are trained to score
        return _BY_PROBLEM[problem or ("single_label_classification" if config.num_labels > 1 else "regression")]
    if name.endswith("Model"):
        return Encoder()
    rule = "teacher must be a sentence encoder, a decoder, a classifier, or a model without a head"
    raise ShdError("shrink-unsupported", f"{rule}; got {name}: compress its base model, and train the head after")


class Judge:
    """Some samples, with what the teacher makes of them."""

    def __init__(
        self, task: Task, rows: Sequence[Row], teacher: Forward, pad_id: int = 0, labels: Labelled | None = None
    ) -> None:
        self.task, self._batches, self._labels = task, list(batches(rows, pad_id=pad_id)), labels
        self._teacher = summarise(task, teacher, self._batches)
        self._pad_id = pad_id

    def check(self) -> None:
        """Refuse samples on which a student that knows nothing would agree: ``inputs-invalid``."""
        rule, remedy = "differ in what the teacher answers", "give more of them, or others (--held-out)"
        fits = self.task.tells_apart(self._teacher)
        need(fits, "inputs-invalid", "held-out samples", rule, "one answer for all", remedy=remedy)

    @torch.no_grad()
    def measure(self, forward: Forward, task: Task | None = None) -> Quality:
        """A model's quality; ``not-finite`` where it gives NaN or infinity; ``task``: one that pools otherwise."""
        task = task or self.task
        quality = self.task.compare(self._teacher, summarise(task, forward, self._batches))
        if self._labels is None:
            return quality
        summary = summarise(task, forward, batches(self._labels.rows, pad_id=self._pad_id))
        return replace(quality, labels=self.task.grade(self._labels.restore(summary), self._labels))


def read_measure(quality: Mapping[str, Any], name: str) -> float:
    """Of a ``Quality`` as a mapping: its value as ``quality``, or a detail or agreement with labels by its name."""
    figures: dict[str, float] = {"quality": quality["value"]} | quality["details"] | quality["labels"]
    need(name in figures, "argument-value", "at_least", f"name one of {', '.join(figures)}", name)
    return figures[name]


def summarise(task: Task, forward: Forward, batches: Iterable[Mapping[str, NDArray[Any]]]) -> Tensor:
    """Summaries of a model's outputs for all batches, joined; ``not-finite``."""
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
        tensors = {name: torch.from_numpy(array).to(device) for name, array in inputs_of(batch).items()}
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


if TYPE_CHECKING:
    from shd_torch.data.dataset import CacheJoin

_MEASURED: Final = 1000  # records whose scores say how far scores are from each other


@dataclass(frozen=True, eq=False)
class ScoreTerm(Term):
    """The squared error of scores, and that of their differences within a query, in units of the teacher's variance.

    So both sides are standardised by the teacher's mean, which falls out, and deviation.
    """

    NAME: ClassVar[str] = "score"
    WEIGHT_NAME: ClassVar[str] = "score_weight"

    weight: Weight = 1.0
    _deviation: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def check_cache(self, joined: CacheJoin, *, has_teacher: bool) -> None:
        """The cache must hold scores; their deviation is read now."""
        cache = joined.cache
        records = (cache.read(key, (), logits=True, hidden=()) for key in sorted(cache.keys())[:_MEASURED])
        scores = torch.stack([torch.as_tensor(cache.decode_logits(record)).reshape(-1) for record in records])
        deviation = scores.float().std(0)
        self._deviation[:] = [torch.where(deviation > 0, deviation, 1.0)]

    def count(self, batch: MicroBatch) -> int:
        return count_samples(batch)

    def measure(self, forward: TrainedForward) -> Measured:
        """On scores ``(B, K)``."""
        logits = read_logits(forward.outputs)
        assert logits is not None
        (scores,) = forward.learn(_read_scores, "score must have a cache of scores; got none")
        errors = (logits.float() - scores) / self._deviation[0].to(logits.device)
        losses = {"_errors": errors.square().mean()}
        queries = forward.batch.inputs.get(QUERY)
        if queries is not None:
            same = (queries[:, None] == queries).fill_diagonal_(False)
            differences = (errors[:, None] - errors).square().mean(-1)
            losses["_differences"] = (differences * same).sum() / same.sum().clamp(min=1)
        return Measured(losses, count_samples)


def _read_scores(taught: Taught) -> Tensor | None:
    targets = taught.targets()
    return targets if isinstance(targets, Tensor) else None


class LabelTerm(KdTerm):
    """``KdTerm`` on each label by itself: has it or not, the sigmoid of its logit."""

    def loss(self, targets: Sequence[Any], logits: Tensor, *, loss_mask: Tensor | None, check: bool) -> Tensor:
        """The mean over samples and labels of logits ``(B, C)``."""
        return super().loss([_in_two(target) for target in targets], _in_two(logits), loss_mask=None, check=check)


def _in_two(logits: Tensor) -> Tensor:
    """Logits of yes and no ``(B, C, 2)``, whose softmax is the sigmoid."""
    return torch.stack((logits, torch.zeros_like(logits)), -1)
