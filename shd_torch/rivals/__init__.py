"""Rivals of SHD behind one interface: what else can be taught beside a base loss, to compare with on your own task.

``make_rival("hard", teacher, student, batch)`` reads both models on one batch; another name is another rival:

- merged maps, as SHD has them: ``shd``, ``hard`` selection, ``constant`` 1/2, ``mean``, ``as_printed``,
  each with ``plan="matched"`` and ``alpha_per="row"``; ``geometric_mean`` of a group's maps (AttnDistill);
- other losses on SHD's maps: ``mse``, ``js``, ``reverse_kl``; ``score_mse`` on unmerged logits (TinyBERT);
- unequal heads without merging: sums and means of all heads' logits, ``sum_mse`` and ``mean_ce`` (TextBrewer),
  ``relation_kl`` (MiniLMv2), ``soft_alignment`` (AMAD), ``learned_alignment`` by a trained mixing matrix;
- features: ``linear_projector``, ``mlp_projector``, ``orthogonal_projector`` (VkD), ``self_correlation``,
  ``attention_output``;
- ``attention_copy``: the student attends with the merged maps themselves, a bound that needs the teacher for ever.

A rival teaches live. Start with ``rival.py``; may import every room of the training path.
"""

from shd_torch.rivals.make import RIVALS, make_rival
from shd_torch.rivals.rival import ForwardPass, Rival, RivalTerm, TeacherOutputs

__all__ = ["RIVALS", "ForwardPass", "Rival", "RivalTerm", "TeacherOutputs", "make_rival"]
