"""Sampling from student and teacher together, in Hugging Face's own ``generate`` (REC-21)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shd_torch.recipes.terms import check_share


class TeacherMixture:
    """A logits processor that makes ``generate`` sample from ``(1 - mix) p_S + mix p_T`` (REC-21).

    Probabilities are mixed, not logits: the importance weights of ``minillm_rollout`` hold for nothing else. ::

        mixture = TeacherMixture(teacher, mix=0.2, attention_mask=batch["attention_mask"])
        ids = student.generate(**batch, do_sample=True, top_k=0, logits_processor=[mixture])

    Other changes of the distribution (``top_p``, ``top_k``, a temperature) come after it in ``generate``, and would
    act on the mixture. The teacher reads the whole text again at every token, in the mode it is in, and shares the
    student's vocabulary.

    Args:
        teacher: a Hugging Face causal language model on the student's device.
        mix: the teacher's share, 0 to 1; the published .2.
        attention_mask: of the prompts ``(B, prompt length)``, padded on the left; None where none is padded.

    Raises:
        ShdError: ``argument-value``.
    """

    def __init__(self, teacher: nn.Module, mix: float = 0.2, *, attention_mask: Tensor | None = None) -> None:
        self.teacher, self.mix, self.attention_mask = teacher, check_share("mix", mix), attention_mask

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logarithm of the mixture ``(B, V)``, of the student's scores and the text so far ``(B, n)``."""
        student = scores.float().log_softmax(-1)
        if self.mix == 0:
            return student
        given: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self.attention_mask is not None:
            mask = self.attention_mask.to(input_ids.device)
            made = mask.new_ones((len(mask), input_ids.shape[1] - mask.shape[1]))
            mask = given["attention_mask"] = torch.cat((mask, made), 1)
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        teacher: Tensor = self.teacher(**given).logits[:, -1].float().log_softmax(-1).to(student.device)
        if self.mix == 1:
            return teacher
        return torch.logaddexp(math.log1p(-self.mix) + student, math.log(self.mix) + teacher)
