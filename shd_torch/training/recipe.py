"""A recipe of ``shd_torch.recipes`` as the base loss of ``SHDTrainer``, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import shd_torch.recipes as recipes
from shd_ref.errors import ShdError
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.recipes import Terms
from shd_torch.training.rows import IGNORED
from shd_torch.training.terms import check_targets


@dataclass(frozen=True)
class _Kind:
    """How a recipe is called."""

    run: Callable[..., Terms]
    # of the teachers: "none", "one" teacher's targets in any form, one's "logits" as they are, or "several" of those
    targets: str
    of_text: bool | None = False  # whether its rows are those of a text, (B, L, V); None = as the labels are
    divergence: str = "cross_entropy"  # that decides which targets will do
    has_token: bool = False  # whether the student has a distillation token
    by_sample: tuple[str, ...] = ()  # terms that are a mean (or a sum) over samples where the others count rows


KINDS: Final[Mapping[str, _Kind]] = {
    "cross_entropy": _Kind(recipes.cross_entropy, "none", of_text=None),
    "language_kd": _Kind(recipes.language_kd, "one", of_text=True),
    "gkd": _Kind(recipes.gkd, "one", of_text=True, divergence="jsd"),
    "babyllama": _Kind(recipes.babyllama, "several", of_text=True, by_sample=("kd",)),
    "image_kd": _Kind(recipes.image_kd, "one"),
    "nkd": _Kind(recipes.nkd, "logits"),
    "deit_soft": _Kind(recipes.deit_soft, "one", divergence="kl", has_token=True),
    "deit_hard": _Kind(recipes.deit_hard, "logits", has_token=True),
}
"""Recipes that need nothing but logits and labels of a batch."""

OF_A_LOOP: Final[Mapping[str, str]] = {
    "vitkd": "features of both models and a projector that is trained with the student",
    "vkd": "features of both models and a projector that is trained with the student",
    "diffusion": "one draw of noise for both models",
    "minillm_policy": "text that is sampled in each step, which no cache has seen",
}
"""Recipes that need more, and what."""


class Recipe:
    """A recipe and its options: ``SHDTrainer(recipe=Recipe("babyllama", kd_weight=0.7), beta=2.0, ...)``.

    Args:
        name: ``cross_entropy``, ``language_kd``, ``gkd``, ``babyllama``, ``image_kd``, ``nkd``, ``deit_soft`` or
            ``deit_hard``, as in ``shd_torch.recipes``.
        shift: of a text, row t predicts the label at t + 1; None = where the student is a causal language model of
            Hugging Face, whose labels are not shifted yet.
        **options: keywords of the recipe, such as ``kd_weight`` and ``temperature``.

    Raises:
        ShdError: ``argument-value`` for another name, an option that the recipe lacks, or a value that it refuses.
    """

    def __init__(self, name: str, *, shift: bool | None = None, **options: Any) -> None:
        if name not in KINDS:
            why = f": it needs {OF_A_LOOP[name]}; write the loop of docs/recipes.md" if name in OF_A_LOOP else ""
            raise ShdError("argument-value", f"recipe must be one of {', '.join(KINDS)}; got {name!r}{why}")
        self.name, self.kind, self.shift = name, KINDS[name], shift
        taken = set(inspect.signature(self.kind.run).parameters) - {"shd", "check", "shift"}
        known = sorted(keyword for keyword in taken if not keyword.endswith(("logits", "labels", "targets")))
        unknown = sorted(set(options) - set(known))
        if unknown or (shift is not None and self.kind.of_text is False):
            rule = f"options of recipe {name} must be of {', '.join(known) or 'none'}"
            raise ShdError("argument-value", f"{rule}; got {', '.join(unknown or ['shift'])}")
        self.options = options
        self._try()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Recipe({self.name!r}{options})"

    @property
    def is_taught(self) -> bool:
        """Whether it has a term on a teacher's logits."""
        return self.kind.targets != "none"

    def is_shifted(self, student: Any) -> bool:
        """Whether rows predict the label after their own."""
        return is_causal_model(student) if self.shift is None else self.shift

    def check_cache(self, codec: str, temperature: float | None, origin: str) -> None:
        """Refuse logits of the cache ``origin`` that this recipe cannot learn from: ``argument-value``."""
        if not self.is_taught:
            return
        if self.kind.targets != "one" and codec != "float16":
            rule = f"recipe {self.name} must have all logits of a teacher; {origin} has {codec} ones"
            advice = "precompute with --logits float16, or give a live teacher"
            raise ShdError("argument-value", f"{rule}, a part of the classes: {advice}")
        expected = 1.0 if self.kind.divergence == "jsd" else self._temperature
        check_targets("recipe", expected, temperature, origin)

    def terms(
        self,
        outputs: Any,
        labels: Tensor,
        targets: Sequence[Any],
        *,
        counted: Tensor | None,
        shift: bool,
        check: bool,
    ) -> Terms:
        """The recipe's terms of a batch; of a text, ``counted`` says which rows count.

        Raises:
            ShdError: ``argument-value`` for outputs or targets of another kind; what the recipe raises.
        """
        names = ("cls_logits", "distillation_logits") if self.kind.has_token else ("logits",)
        arguments: list[Any] = [
            read_output(outputs, name) if len(names) > 1 else read_logits(outputs) for name in names
        ]
        if any(not isinstance(output, Tensor) for output in arguments):
            rule = f"recipe {self.name} must have a student that returns {' and '.join(names)}"
            raise ShdError("argument-value", f"{rule}; got {type(outputs).__name__}")
        keywords = dict(self.options) | {"check": check}
        if self.kind.of_text or (self.kind.of_text is None and arguments[0].ndim == 3):
            keywords["shift"] = shift
            if counted is not None:
                kept = torch.cat((torch.ones_like(counted[:, :1]), counted[:, :-1]), 1) if shift else counted
                labels = labels.masked_fill(~kept.to(labels.device), IGNORED)
        arguments.insert(1, labels)
        return self.kind.run(*arguments, *self._of_teachers(targets), **keywords)

    def _of_teachers(self, targets: Sequence[Any]) -> list[Any]:
        """The targets as the recipe takes them."""
        if not self.is_taught:
            return []
        several = self.kind.targets == "several"
        if not targets or (len(targets) > 1 and not several):
            rule = f"recipe {self.name} must have {'a' if several else 'one'} teacher that returns logits"
            raise ShdError("argument-value", f"{rule}, cached or live; got {len(targets)}")
        if self.kind.targets != "one" and not all(isinstance(target, Tensor) for target in targets):
            message = f"recipe {self.name} must have all logits of a teacher; got a part of the classes"
            raise ShdError("argument-value", message)
        return [list(targets)] if several else [targets[0]]

    @property
    def _temperature(self) -> float | None:
        """T of both sides; None = that of the targets, and of a recipe without one."""
        parameter = inspect.signature(self.kind.run).parameters.get("temperature")
        return None if parameter is None else self.options.get("temperature", parameter.default)

    def _try(self) -> None:
        """Let the recipe look at its options before there is a batch: it is run on three rows of zeros."""
        size = self.options.get("vocab_size")
        classes = max(size, 4) if isinstance(size, int) else 4
        rows = torch.zeros((1, 2, classes) if self.kind.of_text else (2, classes))
        labels = torch.zeros(rows.shape[:-1], dtype=torch.int64)
        tokens = [rows] if self.kind.has_token else []
        teachers = [] if not self.is_taught else [[rows] if self.kind.targets == "several" else rows]
        self.kind.run(rows, labels, *tokens, *teachers, **self.options)


def is_causal_model(model: Any) -> bool:
    """Whether it is of a class that Hugging Face lists as a causal language model, by the class's name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model).__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
