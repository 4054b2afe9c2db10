"""Wrong implementations of ``specs/kd.md``: the reference with one change of its text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import shd_ref.kd

SOURCES = Path(shd_ref.kd.__file__).parent
FILES = ("targets", "loss", "gradients", "hidden")
COPY = "mutated_kd"


class Mutant(NamedTuple):
    """One mistake: in a file, ``old`` (there once) becomes ``new``; ``on`` names operations that show it."""

    name: str
    wrong: str
    file: str
    old: str
    new: str
    on: str = "kd_loss"


MUTANTS = (
    Mutant(
        "renormalised",
        "the top k are renormalised and the tail is dropped",
        "loss",
        "    return np.concatenate((log_probs, log_tail[..., None]), axis=-1)",
        "    return log_probs - logsumexp(log_probs)[..., None]",
    ),
    Mutant(
        "tail-by-subtraction",
        "the student's tail is 1 less the sum of its probabilities",
        "loss",
        "        return logsumexp(others)",
        "        kept = np.exp(np.take_along_axis(self.log_q, self.ids, -1)).sum(-1)\n"
        "        return np.log(np.maximum(1 - kept, 1e-30))",
    ),
    Mutant(
        "targets-tail-by-subtraction",
        "the teacher's tail is 1 less the sum",
        "targets",
        "np.take_along_axis(log_p, ids, -1), logsumexp(others), temperature",
        "np.take_along_axis(log_p, ids, -1), "
        "np.log(np.maximum(1 - np.exp(np.take_along_axis(log_p, ids, -1)).sum(-1), 1e-30)), temperature",
        "kd_targets_topk",
    ),
    Mutant(
        "no-t-squared",
        "the loss is never multiplied by T^2",
        "loss",
        "(temperature**2 if t_squared else 1.0) / divisor",
        "1.0 / divisor",
    ),
    Mutant(
        "t-once",
        "the loss is multiplied by T",
        "loss",
        "(temperature**2 if t_squared else 1.0)",
        "(temperature if t_squared else 1.0)",
    ),
    Mutant(
        "student-not-softened",
        "only the teacher is divided by T",
        "loss",
        "log_softmax(student[counted] / temperature)",
        "log_softmax(student[counted])",
    ),
    Mutant(
        "mean-over-all-rows",
        "the mean is over rows that do not count as well",
        "loss",
        "divisor = max(int(counted.sum()), 1)",
        "divisor = max(counted.size, 1)",
    ),
    Mutant(
        "batch-mean-for-mean",
        "the mean is the sum over B, as batchmean does with a sequence axis",
        "loss",
        "divisor = max(int(counted.sum()), 1)",
        "divisor = shape[0]",
    ),
    Mutant(
        "mean-for-batch-mean",
        "batch_mean divides by all rows",
        "loss",
        "divisor = max(shape[0], 1) if",
        "divisor = counted.size if",
    ),
    Mutant(
        "mask-ignored",
        "all rows count",
        "loss",
        'np.ones(shape, np.bool_) if loss_mask is None else as_mask(loss_mask, "loss_mask", shape)',
        'np.ones(shape, np.bool_) if loss_mask is None else as_mask(loss_mask, "loss_mask", shape) | True',
    ),
    Mutant(
        "another-temperature",
        "a record is used at any temperature",
        "loss",
        "if temperature is not None and check_temperature(temperature) != own:",
        "if False:",
    ),
    Mutant(
        "temperature-defaults-to-one",
        "a record without a temperature in the call is read at 1",
        "loss",
        "    own = check_temperature(record.temperature)\n",
        "    own = check_temperature(record.temperature)\n    if temperature is None:\n        return 1.0\n",
    ),
    Mutant(
        "reversed",
        "kl and reverse_kl are exchanged",
        "loss",
        'elif rows.divergence == "kl":',
        'elif rows.divergence == "reverse_kl":',
    ),
    Mutant(
        "cross-entropy-called-kl",
        "kl lacks the teacher's entropy",
        "loss",
        "terms = times_log(p, log_p) - times_log(p, log_q)",
        "terms = -times_log(p, log_q)",
    ),
    Mutant(
        "entropy-forgotten",
        "kl of draws lacks the teacher's entropy",
        "loss",
        'return cross if rows.divergence == "cross_entropy" else cross - rows.entropy',
        "return cross",
    ),
    Mutant(
        "jsd-weights-swapped",
        "the weights of the two halves of jsd are exchanged, the mixture is not",
        "loss",
        "        m = rows.mixing\n",
        "        m = 1 - rows.mixing\n",
    ),
    Mutant(
        "jsd-mixture-swapped",
        "the mixture has the weights the other way round",
        "loss",
        "np.logaddexp(np.log(rows.mixing) + rows.log_p, np.log1p(-rows.mixing) + log_q)",
        "np.logaddexp(np.log1p(-rows.mixing) + rows.log_p, np.log(rows.mixing) + log_q)",
    ),
    Mutant(
        "jsd-ends-exchanged",
        "at a mixing of 0 jsd is the reverse KL",
        "loss",
        'divergence = "kl" if mixing == 0.0 else "reverse_kl"',
        'divergence = "kl" if mixing == 1.0 else "reverse_kl"',
    ),
    Mutant(
        "biased-draws-accepted",
        "draws are taken for jsd",
        "loss",
        'if asked in ("reverse_kl", "jsd"):',
        'if asked == "reverse_kl":',
    ),
    Mutant(
        "ids-twice-accepted",
        "a class may be twice in a record",
        "loss",
        "if (own[:, 1:] == own[:, :-1]).any():",
        "if False:",
    ),
    Mutant(
        "any-sum-accepted",
        "the masses of a record need not sum to one",
        "loss",
        "    wrong = np.abs(sums - 1.0) > tolerance\n",
        "    wrong = sums < 0.0\n",
    ),
    Mutant(
        "padding-unchecked",
        "classes with mass are cut",
        "targets",
        "    if largest > allowed:",
        "    if False:",
        "kd_loss kd_targets_topk kd_targets_sampled",
    ),
    Mutant(
        "padding-in-the-softmax",
        "the student's padding stays in its softmax",
        "loss",
        '"log_q": log_softmax(student[counted] / temperature),',
        '"log_q": log_softmax(whole[counted] / temperature)[..., : student.shape[-1]],',
    ),
    Mutant(
        "ids-by-probability",
        "ids come in the order of probability",
        "targets",
        "ascending: Ids = np.sort(order, axis=-1).astype(np.int64)",
        "ascending: Ids = order.astype(np.int64)",
        "kd_targets_topk",
    ),
    Mutant(
        "weights-normalised",
        "the weights of draws are divided by their sum",
        "targets",
        "    weights = np.exp(np.take_along_axis(log_p - np.where(np.isneginf(log_q), 0.0, log_q), drawn, -1))\n",
        "    weights = np.exp(np.take_along_axis(log_p - np.where(np.isneginf(log_q), 0.0, log_q), drawn, -1))\n"
        "    weights = weights / weights.mean(-1, keepdims=True)\n",
        "kd_targets_sampled",
    ),
    Mutant(
        "proposal-ignored",
        "a draw weighs P / n, for every distribution that it was drawn from",
        "targets",
        "log_p - np.where(np.isneginf(log_q), 0.0, log_q)",
        "log_p",
        "kd_targets_sampled",
    ),
    Mutant(
        "kept-drawn-again",
        "kept classes can be drawn as well",
        "targets",
        "proposal = _without(power * log_p, kept)",
        "proposal = power * log_p",
        "kd_targets_sampled",
    ),
    Mutant(
        "entropy-of-the-kept",
        "the entropy is that of the classes drawn",
        "targets",
        "        -(np.exp(log_p) * log_p).sum(axis=-1),\n",
        "        -(np.exp(log_p) * log_p * np.isneginf(_without(log_p, kept))).sum(axis=-1),\n",
        "kd_targets_sampled",
    ),
    Mutant(
        "probabilities-averaged",
        "the mean of logits is that of probabilities",
        "targets",
        'if of == "logits":',
        'if of == "neither":',
        "mean_logits",
    ),
    Mutant(
        "mean-not-scaled",
        "the mean of probabilities is returned divided by T",
        "targets",
        "return temperature * logsumexp(",
        "return logsumexp(",
        "mean_logits",
    ),
    Mutant(
        "weights-as-given",
        "the weights of teachers are not divided by their sum",
        "targets",
        "    shares = shares / shares.sum()\n",
        "    shares = shares / (1 if weights else shares.sum())\n",
        "mean_logits",
    ),
    Mutant(
        "gradient-without-t",
        "dz is not divided by T",
        "gradients",
        "rows.factor / rows.temperature * _row_gradient(rows)",
        "rows.factor * _row_gradient(rows)",
        "kd_loss_gradient",
    ),
    Mutant(
        "gradient-assumes-one",
        "dz of draws is Q - P, though the weights need not sum to one",
        "gradients",
        "rows.weights.sum(axis=-1, keepdims=True) * np.exp(rows.log_q)",
        "np.exp(rows.log_q)",
        "kd_loss_gradient",
    ),
    Mutant(
        "draws-counted-once",
        "a class that was drawn twice counts once",
        "gradients",
        "        np.subtract.at(whole, (np.arange(len(whole))[:, None], rows.ids), rows.weights)\n",
        "        whole[np.arange(len(whole))[:, None], rows.ids] -= rows.weights\n",
        "kd_loss_gradient",
    ),
    Mutant(
        "tail-spread-evenly",
        "the gradient of the tail is spread evenly over its classes",
        "gradients",
        "np.exp(rows.log_q - rows.log_tail[:, None]) * by_class[:, k:]",
        "by_class[:, k:] / (rows.log_q.shape[-1] - k) + 0 * rows.log_q",
        "kd_loss_gradient",
    ),
    Mutant(
        "cosine-over-features",
        "the squared distance of unit vectors is a mean over features",
        "hidden",
        "squares: Array = ((student - teacher) ** 2).sum(axis=-1)",
        "squares: Array = ((student - teacher) ** 2).mean(axis=-1)",
        "hidden_loss",
    ),
    Mutant(
        "mse-summed",
        "mse is a sum over features",
        "hidden",
        "terms: Array = ((layer.student - layer.teacher) ** 2).mean(axis=-1)",
        "terms: Array = ((layer.student - layer.teacher) ** 2).sum(axis=-1)",
        "hidden_loss",
    ),
    Mutant(
        "padding-in-hidden-states",
        "rows that do not count enter the loss on hidden states",
        "hidden",
        "_terms(layer, distance)[layer.counted].sum()",
        "_terms(layer, distance).sum()",
        "hidden_loss",
    ),
    Mutant(
        "layers-always-averaged",
        "layers are averaged, also where their sum is asked for",
        "hidden",
        'scale = len(students) if reduction == "mean" else 1',
        "scale = len(students)",
        "hidden_loss",
    ),
    Mutant(
        "zero-vector-nan",
        "a zero vector is divided by its norm",
        "hidden",
        "scaled / np.where(length == 0.0, 1.0, length), largest * length",
        "scaled / length, largest * length",
        "hidden_loss",
    ),
)


@contextmanager
def built(wrong: Mutant | None) -> Iterator[SimpleNamespace]:
    """The operations of a copy of the reference with this mistake; of a true copy without one."""
    try:
        package = sys.modules[COPY] = ModuleType(COPY)
        package.__path__ = []
        for name in FILES:
            path = SOURCES / f"{name}.py"
            text = path.read_text(encoding="utf-8")
            if wrong is not None and wrong.file == name:
                assert text.count(wrong.old) == 1, f"{path.name} must hold this once: write it again\n{wrong.old}"
                text = text.replace(wrong.old, wrong.new)
            # The gradients come after the losses that they are made of.
            module = sys.modules[f"{COPY}.{name}"] = ModuleType(f"{COPY}.{name}")
            exec(compile(text.replace("shd_ref.kd.", f"{COPY}."), f"{path} with edits", "exec"), vars(module))
        homes = [sys.modules[f"{COPY}.{name}"] for name in FILES]
        operations = {name for name in shd_ref.kd.__all__ if name[0].islower()}
        yield SimpleNamespace(
            **{name: getattr(home, name) for home in homes for name in operations if hasattr(home, name)}
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == COPY]:
            del sys.modules[name]
