"""What recipes draw: text from student and teacher together, and the noise that two models share."""

import numpy as np
import pytest
import torch

from shd_torch import ShdError
from shd_torch.recipes import TeacherMixture, draw_diffusion, minillm_rollout


@pytest.fixture
def models() -> tuple[object, object]:
    pytest.importorskip("transformers", reason="generate is Hugging Face's")
    from support.binding.trainer_cases import make_model

    return make_model(2, seed=2).eval(), make_model(4, seed=1).eval()


def test_text_is_sampled_from_the_mixture_of_probabilities(models: tuple[object, object]) -> None:
    """What ``generate`` samples from, step by step, is .8 p_S + .2 p_T on the text so far, for padded prompts too."""
    student, teacher = models
    ids = torch.tensor([[0, 0, 5, 7], [9, 4, 6, 8]])
    mask = (ids != 0).long()
    mixture = TeacherMixture(teacher, attention_mask=mask)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    options |= {"logits_processor": [mixture], "output_scores": True, "return_dict_in_generate": True}
    sampled = student.generate(input_ids=ids, attention_mask=mask, **options)
    whole = torch.cat((mask, mask.new_ones(2, 4)), 1)
    arguments = {
        "input_ids": sampled.sequences,
        "attention_mask": whole,
        "position_ids": (whole.cumsum(1) - 1).clamp(min=0),
    }
    with torch.no_grad():
        logits = [model(**arguments).logits[:, 3:-1] for model in (student, teacher)]
    banned = torch.zeros(30, dtype=torch.bool)
    banned[2] = True  # the end of text, as at least four tokens are asked for
    p_student = logits[0].masked_fill(banned, -torch.inf).softmax(-1)
    mixed = 0.8 * p_student + 0.2 * logits[1].softmax(-1)
    for step, scores in enumerate(sampled.scores):
        torch.testing.assert_close(scores.softmax(-1), mixed[:, step], atol=1e-6, rtol=1e-4)
    tokens = sampled.sequences[:, 4:]
    rollout = minillm_rollout(*logits, tokens, torch.ones_like(tokens, dtype=torch.bool))
    own, other = (each.softmax(-1).gather(-1, tokens[..., None])[..., 0] for each in logits)
    torch.testing.assert_close(rollout.weights, own / (0.8 * own + 0.2 * other))


def test_the_ends_of_the_mixture(models: tuple[object, object]) -> None:
    student, teacher = models
    ids = torch.tensor([[5, 7], [9, 4]])
    with torch.no_grad():
        scores, theirs = (model(ids).logits[:, -1] for model in (student, teacher))
    torch.testing.assert_close(TeacherMixture(teacher, 0)(ids, scores), scores.log_softmax(-1))
    torch.testing.assert_close(TeacherMixture(teacher, 1)(ids, scores), theirs.log_softmax(-1))
    with pytest.raises(ShdError, match="and at most 1"):
        TeacherMixture(teacher, 1.2)


def test_a_draw_is_each_samples_own() -> None:
    """In any batch, in any order, on any day: what a cache was made with can be drawn again."""
    draw = draw_diffusion([3, 4, 5], (2, 4, 4))
    other = draw_diffusion([5, 3], (2, 4, 4))
    for mine, theirs in zip(draw, other, strict=True):
        assert torch.equal(mine[[2, 0]], theirs)
    assert (draw.noise.shape, draw.t.dtype) == ((3, 2, 4, 4), torch.int64)
    many = draw_diffusion(range(2000), (1,), steps=4)
    assert np.bincount(many.t).min() > 400
    assert abs(many.noise.mean()) < 0.1
    assert abs(many.noise.std() - 1) < 0.1
