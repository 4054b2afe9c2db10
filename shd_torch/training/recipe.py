"""A recipe of ``shd_torch.recipes`` as the base loss of ``SHDTrainer``, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import shd_torch.recipes as recipes
from shd_ref.errors import ShdError, need
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.recipes import Terms
from shd_torch.recipes.terms import IGNORED
from shd_torch.training.batch import Forward, MicroBatch, Rule, count_samples, labelled_rows, rows_before_labels
from shd_torch.training.terms import Measured, check_targets


@dataclass(frozen=True)
class _Kind:
    """How a recipe is called."""

    run: Callable[..., Terms]
    of_text: bool | None = False  # whether its rows are those of a text, (B, L, V); None = as the labels are
    is_taught: bool = True  # by a teacher's targets
    needs_all: bool = False  # all logits of a teacher, not the likeliest alone
    takes_several: bool = False  # logits of one or more teachers
    at_any_temperature: bool = True  # whether its targets may be of another than 1
    has_token: bool = False  # whether the student has a distillation token
    by_sample: tuple[str, ...] = ()  # terms that are a mean (or a sum) over samples where the others count rows


RECIPES: Final[Mapping[str, _Kind]] = {
    "cross_entropy": _Kind(recipes.cross_entropy, of_text=None, is_taught=False),
    "language_kd": _Kind(recipes.language_kd, of_text=True),
    "gkd": _Kind(recipes.gkd, of_text=True, at_any_temperature=False),
    "babyllama": _Kind(recipes.babyllama, of_text=True, needs_all=True, takes_several=True, by_sample=("kd",)),
    "image_kd": _Kind(recipes.image_kd),
    "nkd": _Kind(recipes.nkd, needs_all=True),
    "deit_soft": _Kind(recipes.deit_soft, has_token=True),
    "deit_hard": _Kind(recipes.deit_hard, needs_all=True, has_token=True),
}
"""Recipes that need nothing but logits and labels of a batch."""


class Recipe:
    """A recipe and its options: ``SHDTrainer(recipe=Recipe("babyllama", kd_weight=0.7), beta=2.0, ...)``.

    Args:
        name: ``cross_entropy``, ``language_kd``, ``gkd``, ``babyllama``, ``image_kd``, ``nkd``, ``deit_soft`` or
            ``deit_hard``, as in ``shd_torch.recipes``.
        shift: of a text, row t predicts the label at t + 1; None = where the student is a causal language model of
            Hugging Face, whose labels are not shifted yet.
        **options: keywords of the recipe, such as ``kd_weight`` and ``temperature``.

    Raises:
        ShdError: ``argument-value`` for another name, or an option that the recipe lacks.
    """

    def __init__(self, name: str, *, shift: bool | None = None, **options: Any) -> None:
        rule, advice = f"be one of {', '.join(RECIPES)}", "others need a loop (docs/recipes.md)"
        need(name in RECIPES, "argument-value", "recipe", rule, repr(name), remedy=advice)
        self.name, self.kind, self.shift = name, RECIPES[name], shift
        parameters = set(inspect.signature(self.kind.run).parameters) - {"shd", "check", "shift"}
        known = sorted(keyword for keyword in parameters if not keyword.endswith(("logits", "labels", "targets")))
        unknown = sorted(set(options) - set(known))
        unknown += ["shift"] * (shift is not None and self.kind.of_text is False)
        rule = f"be of {', '.join(known) or 'none'}"
        need(not unknown, "argument-value", f"options of recipe {name}", rule, ", ".join(unknown))
        self.options = options

    def for_student(self, student: Any) -> RecipeTerms:
        """Its terms; labels of a causal language model of Hugging Face are not shifted yet."""
        return RecipeTerms(self, is_causal_model(student) if self.shift is None else self.shift)

    def check_cache(self, codec: str, temperature: float | None, origin: str) -> None:
        """Refuse logits of the cache ``origin`` that this recipe cannot learn from: ``argument-value``."""
        if not self.kind.is_taught:
            return
        if self.kind.needs_all and codec != "float16":
            rule = f"recipe {self.name} must have all logits of a teacher; {origin} has {codec} ones"
            advice = "precompute with --logits float16, or give a live teacher"
            raise ShdError("argument-value", f"{rule}, a part of the classes: {advice}")
        parameter = inspect.signature(self.kind.run).parameters.get("temperature")
        # None = that of the targets, as of a recipe without one.
        temperature_of_recipe = None if parameter is None else self.options.get("temperature", parameter.default)
        check_targets("recipe", temperature_of_recipe if self.kind.at_any_temperature else 1.0, temperature, origin)


@dataclass(frozen=True, eq=False)
class RecipeTerms:
    """A recipe's terms in the training of one student."""

    recipe: Recipe
    is_shifted: bool  # whether rows predict the label after their own

    def count(self, batch: MicroBatch) -> int:
        """Samples, or rows of a text by their labels."""
        return batch.count(self._rule) if self._reads_text(batch) else count_samples(batch)

    def measure(self, forward: Forward) -> Iterator[tuple[str, float, Measured]]:
        """Each term's name, weight and loss.

        Raises:
            ShdError: ``argument-value`` for outputs or targets of another kind; what the recipe raises.
        """
        recipe, kind, batch, outputs = self.recipe, self.recipe.kind, forward.batch, forward.outputs
        name, labels = f"recipe {recipe.name}", forward.batch.inputs.get("labels")
        if not isinstance(labels, Tensor):
            raise ShdError("argument-value", f"a batch must hold labels for {name}; got none")
        logits = read_logits(outputs)
        length = 0 if logits is None else logits.shape[1]
        padded = kind.by_sample and batch.stored is not None and not bool(batch.stored.query_mask(length).all())
        rule = "be full where a cache teaches, which holds nothing of padding and counts every position"
        advice = "train on texts of one length, or with a live teacher"
        need(not padded, "argument-value", f"a batch of {name}", rule, "padding", remedy=advice)
        tokens = ("cls_logits", "distillation_logits")
        students: list[Any] = [read_output(outputs, token) for token in tokens] if kind.has_token else [logits]
        rule = f"have a student that returns {' and '.join(tokens) if kind.has_token else 'logits'}"
        are_tensors = all(isinstance(tensor, Tensor) for tensor in students)
        need(are_tensors, "argument-value", name, rule, type(outputs).__name__)
        keywords = dict(recipe.options) | {"check": forward.check}
        if kind.of_text or (kind.of_text is None and students[0].ndim == 3):
            keywords["shift"] = self.is_shifted
        counted = batch.counted(self._rule, length) if self._reads_text(batch) else None
        if counted is not None:
            # A row counts where it is read, its label stands one further on.
            first = torch.ones_like(counted[:, :1])
            label_rows = torch.cat((first, counted[:, :-1]), 1) if self.is_shifted else counted
            labels = labels.masked_fill(~label_rows.to(labels.device), IGNORED)
        terms = kind.run(students[0], labels, *students[1:], *self._learn(forward, length), **keywords)
        for term, (value, weight) in terms.items():
            yield term, weight, Measured({"": value}, count_samples if term in kind.by_sample else self.count)

    def _learn(self, forward: Forward, length: int) -> list[Any]:
        name, kind = f"recipe {self.recipe.name}", self.recipe.kind
        if not kind.is_taught:
            return []
        targets = [
            target for supervision in forward.supervisions if (target := supervision.targets(length)) is not None
        ]
        rule = f"have {'a' if kind.takes_several else 'one'} teacher that returns logits, cached or live"
        fits = len(targets) == 1 or (kind.takes_several and bool(targets))
        need(fits, "argument-value", name, rule, len(targets))
        return [targets] if kind.takes_several else targets

    @property
    def _rule(self) -> Rule:
        return rows_before_labels if self.is_shifted else labelled_rows

    def _reads_text(self, batch: MicroBatch) -> bool:
        """Whether rows are those of a text; None of a recipe leaves that to the labels."""
        labels, of_text = batch.inputs.get("labels"), self.recipe.kind.of_text
        hard_rows = isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()
        return hard_rows if of_text is None else of_text


def is_causal_model(model: Any) -> bool:
    """Whether it is of a class that Hugging Face lists as a causal language model, by the class's name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model).__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
