"""MiniLLM: policy gradient of the reverse KL on text sampled from student and teacher together.

The order of a step: sample with ``TeacherMixture``; ``minillm_rollout`` on the sampled text, once; then, for each
pass over it, ``minillm_policy`` on the student's new logits, plus ``language_kd`` on a batch of pre-training text
(weight 1, ``scaled`` for another). SHD joins either batch: on the sampled text its teachers are live, on the
pre-training text a cache will do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_torch.checks import check_mask, check_option, check_real, check_shapes, compute_dtype, without_autocast
from shd_torch.kd import kd_loss
from shd_torch.recipes.terms import SHD, Term, Terms, check_alike, check_integers, check_share, check_weight, join


class TeacherMixture:
    """A logits processor that makes ``generate`` sample from ``(1 - mix) p_S + mix p_T``.

    Probabilities are mixed, not logits, as the importance weights of ``minillm_rollout`` require. ::

        mixture = TeacherMixture(teacher, mix=0.2, attention_mask=batch["attention_mask"])
        ids = student.generate(**batch, do_sample=True, top_k=0, logits_processor=[mixture])

    Other changes of the distribution (``top_p``, ``top_k``, a temperature) come after it in ``generate``, and would
    act on the mixture. The teacher reads the whole text again at every token, in the mode it is in, and shares the
    student's vocabulary.

    Args:
        teacher: a Hugging Face causal language model on the student's device.
        mix: the teacher's share, 0 to 1; the published .2.
        attention_mask: of the prompts ``(B, prompt length)``, padded on the left; None where none is padded.
    """

    def __init__(self, teacher: nn.Module, mix: float = 0.2, *, attention_mask: Tensor | None = None) -> None:
        self.teacher, self.mix, self.attention_mask = teacher, check_share("mix", mix), attention_mask

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logarithm of the mixture ``(B, V)``, of the student's scores and the text so far ``(B, n)``."""
        student = scores.float().log_softmax(-1)
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self.attention_mask is not None:
            mask = self.attention_mask.to(input_ids.device)
            sampled = mask.new_ones((len(mask), input_ids.shape[1] - mask.shape[1]))
            mask = arguments["attention_mask"] = torch.cat((mask, sampled), 1)
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)  # from the first token after the padding
        teacher: Tensor = self.teacher(**arguments).logits[:, -1].float().log_softmax(-1).to(student.device)
        shares = student.new_tensor([1 - self.mix, self.mix]).log()  # -inf adds nothing
        return torch.logaddexp(shares[0] + student, shares[1] + teacher)


WHITENINGS: tuple[str, ...] = ("biased", "unbiased", "none")
WHITENING_EPSILON = 1e-8  # MiniLLM's


class Rollout(NamedTuple):
    """Sampled tokens and their statistics at sampling time."""

    tokens: Tensor  # (B, R)
    mask: Tensor  # (B, R), True = the row counts
    log_probs: Tensor  # (B, R), of the student that sampled; 0 where the row does not count
    rewards: Tensor  # (B, R), 0 where the row does not count
    weights: Tensor  # (B, R), student over mixture; 1 where the row does not count


@without_autocast
@torch.no_grad()
def minillm_rollout(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    mix: float = 0.2,
    reward_scale: float = 0.5,
    reward_clip: float = 100.0,
    check: bool = True,
) -> Rollout:
    """Rewards and importance weights of text that was drawn from ``(1 - mix) p_S + mix p_T``.

    ``r = clip((log p_T(y) - log p_S(y)) / scale)`` and ``w = p_S(y) / ((1 - mix) p_S(y) + mix p_T(y))``, token by
    token. Defaults are MiniLLM's (mix = ``teacher_mixed_alpha`` .2, ``reward_scaling`` .5, clip 100).

    Args:
        student_logits: rows that predict the tokens ``(B, R, V)``, of the student that sampled them: of the whole
            text's logits, ``logits[:, prompt_length - 1 : -1]``.
        teacher_logits: the teacher's, on the same text.
        tokens: ``(B, R)``.
        mask: boolean ``(B, R)``, True = the row counts. Where the end of text is the padding token, the first of them
            counts: the published mask is that of the row's own input, ``(ids != pad)[:, prompt_length - 1 : -1]``.
        mix: the teacher's share of the mixture, 0 to 1.
        reward_scale: divides the rewards; above 0.
        reward_clip: the largest magnitude of a reward after that.

    Returns:
        The record, without a graph.
    """
    mix = check_share("mix", mix)
    check_number("reward_scale", reward_scale, above=0)
    check_number("reward_clip", reward_clip, above=0)
    ids, counted = _check_text(student_logits, teacher_logits, tokens, mask, check)
    student, teacher = (_token_log_probs(logits, ids, counted) for logits in (student_logits, teacher_logits))
    teacher = teacher.to(student)
    rewards = ((teacher - student) / reward_scale).clamp(-reward_clip, reward_clip)
    shares = torch.tensor([1 - mix, mix], dtype=student.dtype, device=student.device).log()
    mixture = torch.logaddexp(shares[0] + student, shares[1] + teacher)
    weights = (student - mixture).exp().masked_fill(~counted, 1.0)
    return Rollout(ids, counted, student, rewards, weights)


@torch.no_grad()
def minillm_advantages(
    rewards: Tensor, mask: Tensor, *, discount: float = 0.95, whitening: str = "biased", check: bool = True
) -> Tensor:
    """Discounted returns over the number of rows left, whitened over the whole batch.

    ``A_t = sum_{k >= t} gamma^(k - t) r_k / n_t``, n_t the number of rows from t on that count; then less the mean,
    over ``sqrt(variance + 1e-8)``. Mean and variance are of all B R numbers, padding included, and of every rank
    where a process group runs. The published training ran on several ranks, where its variance divides by n:
    ``"biased"``.

    Args:
        rewards: ``(B, R)``, 0 where the row does not count.
        mask: boolean ``(B, R)``.
        discount: gamma, 0 to 1.
        whitening: ``"biased"`` (variance over n, as published), ``"unbiased"`` (over n - 1) or ``"none"``.

    Returns:
        Advantages ``(B, R)``.
    """
    discount = check_share("discount", discount)
    check_option("whitening", whitening, WHITENINGS)
    check_real(rewards, "rewards", check=check, ndim=2)
    check_mask(mask, "mask", rewards.shape)
    values = rewards.to(compute_dtype(rewards))
    returns, discounted = torch.empty_like(values), torch.zeros_like(values[:, 0])
    for position in reversed(range(values.shape[1])):
        discounted = values[:, position] + discount * discounted
        returns[:, position] = discounted
    rows_left = mask.to(values.device).flip(1).cumsum(1).flip(1)
    normalised = returns / rows_left.clamp(min=1)
    return normalised if whitening == "none" else _whiten(normalised, whitening)


@without_autocast
def minillm_policy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    rollout: Rollout,
    *,
    clip: float = 0.2,
    discount: float = 0.95,
    whitening: str = "biased",
    reverse_kl_weight: float = 1.0,
    shd: SHD | None = None,
    check: bool = True,
) -> Terms:
    """``mean max(-A rho w, -A clip(rho w, 1 - c, 1 + c)) + b mean KL(p_S || p_T)`` over counted rows.

    ``rho = p_S(y) / p_S(y) when it was sampled``; A are the advantages of this batch. Denominator of both
    terms: the number of rows that count. Defaults are MiniLLM's (c = .2, gamma = .95, ``--single-step-reg``,
    b = 1); its student runs without dropout.

    Args:
        student_logits: of the student that learns, on the rows of the rollout ``(B, R, V)``.
        teacher_logits: u ``(B, R, V)``.
        rollout: as ``minillm_rollout`` gives it, or rows of it.
        clip: c, at least 0.
        discount: as in ``minillm_advantages``.
        whitening: as in ``minillm_advantages``.
        reverse_kl_weight: b, of the single-step term over the whole vocabulary.
        shd: the attention term, of live teachers: no cache holds text that was sampled just now.

    Returns:
        The terms ``policy`` (1) and ``reverse_kl`` (b).
    """
    clip, weight = check_weight("clip", clip), check_weight("reverse_kl_weight", reverse_kl_weight)
    ids, counted = _check_text(student_logits, teacher_logits, rollout.tokens, rollout.mask, check)
    advantages = minillm_advantages(rollout.rewards, counted, discount=discount, whitening=whitening, check=check)
    log_probs = _token_log_probs(student_logits, ids, counted)
    sampled_log_probs, weights, advantages = (
        tensor.to(log_probs) for tensor in (rollout.log_probs, rollout.weights, advantages)
    )
    ratio = (log_probs - sampled_log_probs).exp() * weights
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    policy = surrogate.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)
    reverse = kd_loss(teacher_logits, student_logits, divergence="reverse_kl", loss_mask=counted, check=check)
    return join(shd, policy=Term(policy, 1.0), reverse_kl=Term(reverse, weight))


def _whiten(numbers: Tensor, whitening: str) -> Tensor:
    count = numbers.new_tensor(float(numbers.numel()))
    sums = torch.stack([numbers.sum(), count])
    is_distributed = dist.is_available() and dist.is_initialized()
    if is_distributed:
        dist.all_reduce(sums)
    mean, count = sums[0] / sums[1], sums[1]
    squares = (numbers - mean).square().sum()
    if is_distributed:  # around the mean of all ranks
        dist.all_reduce(squares)
    if whitening == "unbiased":
        has_several = is_distributed or numbers.numel() > 1
        need(has_several, "argument-value", "whitening", "be biased or none for a single number", whitening)
        count = count - 1
    return (numbers - mean) * torch.rsqrt(squares / count + WHITENING_EPSILON)


def _check_text(
    student_logits: Tensor, teacher_logits: Tensor, tokens: Tensor, mask: Tensor, check: bool
) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(B, R)`` on the student's device; ids of rows that do not count are 0."""
    check_alike("(B, R, V)", check=check, student_logits=student_logits, teacher_logits=teacher_logits)
    check_shapes(student_logits.ndim == 3, "student_logits must be (B, R, V)", student_logits)
    rows, size = tuple(student_logits.shape[:2]), student_logits.shape[2]
    check_integers(tokens, "tokens", rows)
    check_mask(mask, "mask", rows)
    counted = mask.to(student_logits.device)
    ids = tokens.to(counted.device, torch.int64).masked_fill(~counted, 0)
    if check and bool(((ids < 0) | (ids >= size)).any()):
        first = int(ids[(ids < 0) | (ids >= size)][0])
        raise ShdError("argument-value", f"tokens must be 0 to {size - 1} where the row counts; got {first}")
    return ids, counted


def _token_log_probs(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """Log-probabilities of tokens ``(B, R)``, 0 where the row does not count, with no gradient there."""
    rows = counted.to(logits.device)
    # Filled before the logarithm, and after it: a NaN that only the result hides still has a NaN for its gradient.
    filled = logits.to(compute_dtype(logits)).masked_fill(~rows[..., None], 0.0)
    log_probs = filled.gather(-1, ids.to(logits.device)[..., None])[..., 0] - filled.logsumexp(-1)
    return log_probs.masked_fill(~rows, 0.0)
