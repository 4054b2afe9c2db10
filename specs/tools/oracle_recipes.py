"""The oracle of ``specs/recipes.md``: values and weights of terms in decimals of 60 digits, from its sentences alone.

Terms are named ``<term>.value`` and ``<term>.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from exact import Nested, Number, decimal, dot, flatten, map_numbers, shape_of, unflatten
from oracle_kd import ZERO, kd_loss, leading, log_probs_of, mean_logits, rows_of

ONE, TWO = Decimal(1), Decimal(2)
Row = list[Decimal]


def mean(numbers: Sequence[Decimal]) -> Decimal:
    """The sum over their number."""
    return sum(numbers, ZERO) / len(numbers)


def terms(**values: tuple[Any, Any]) -> dict[str, Any]:
    """Values and weights by name."""
    found = {}
    for name, (value, weight) in values.items():
        found[f"{name}.value"] = value
        found[f"{name}.weight"] = weight if isinstance(weight, Decimal) else Fraction(weight)
    return found


# --- labels -------------------------------------------------------------------------------------------------------


def classes_of(labels: Nested, shift: bool = False) -> list[int]:
    """Hard labels by row (REC-4, REC-6); -100 = does not count."""
    if shift:
        labels = [[*row[1:], -100] for row in labels]
    return [int(label) for label in flatten(labels)]


def cross_entropy_of(logits: Nested, labels: Nested, *, shift: bool = False) -> Decimal:
    """REC-7."""
    rows = [log_probs_of(row, 1) for row in rows_of(logits)]
    if shape_of(labels) == shape_of(logits):
        soft = [[decimal(y) for y in row] for row in rows_of(labels)]
        return mean([-dot(y, row) for y, row in zip(soft, rows, strict=True)])
    found = [-row[y] for row, y in zip(rows, classes_of(labels, shift), strict=True) if y != -100]
    return mean(found) if found else ZERO


def counted(logits: Nested, labels: Nested, shift: bool) -> Nested:
    """Which rows have a label that counts."""
    return unflatten([y != -100 for y in classes_of(labels, shift)], leading(logits))


def likeliest(row: Sequence[Number]) -> int:
    """The first of the largest."""
    return max(range(len(row)), key=lambda j: (row[j], -j))


def cross_entropy(student_logits: Nested, labels: Nested, *, shift: bool = False) -> dict[str, Any]:
    """REC-7."""
    return terms(cross_entropy=(cross_entropy_of(student_logits, labels, shift=shift), 1))


# --- logits -------------------------------------------------------------------------------------------------------


def language_kd(
    student_logits: Nested,
    labels: Nested,
    targets: Any,
    *,
    kd_weight: Number = Fraction(1, 2),
    temperature: Number | None = None,
    shift: bool = False,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """REC-8."""
    soft = kd_loss(
        targets,
        student_logits,
        divergence="cross_entropy",
        temperature=temperature,
        loss_mask=counted(student_logits, labels, shift),
        vocab_size=vocab_size,
    )
    kept = unflatten(
        [x for row in rows_of(student_logits) for x in row[:vocab_size]],
        [*leading(student_logits), vocab_size or shape_of(student_logits)[-1]],
    )
    hard = cross_entropy_of(kept, labels, shift=shift)
    return terms(cross_entropy=(hard, 1 - Fraction(kd_weight)), kd=(soft, kd_weight))


def image_kd(
    student_logits: Nested,
    labels: Nested,
    targets: Any,
    *,
    kd_weight: Number = Fraction(1, 2),
    temperature: Number = Fraction(4),
) -> dict[str, Any]:
    """REC-9."""
    soft = kd_loss(targets, student_logits, divergence="cross_entropy", temperature=temperature)
    hard = cross_entropy_of(student_logits, labels)
    return terms(cross_entropy=(hard, 1 - Fraction(kd_weight)), kd=(soft, kd_weight))


def nkd(
    student_logits: Nested,
    labels: Nested,
    teacher_logits: Nested,
    *,
    nontarget_weight: Number = 1,
    temperature: Number = Fraction(1),
) -> dict[str, Any]:
    """REC-10, REC-11."""
    soft = shape_of(labels) == shape_of(student_logits)
    chosen = [likeliest(row) for row in labels] if soft else classes_of(labels)
    target, others = [], []
    for z, u, y in zip(student_logits, teacher_logits, chosen, strict=True):
        target.append(-log_probs_of(u, 1)[y].exp() * log_probs_of(z, 1)[y])
        log_p, log_q = (log_probs_of([x for j, x in enumerate(row) if j != y], temperature) for row in (u, z))
        others.append(-dot([x.exp() for x in log_p], log_q))
    return terms(
        cross_entropy=(cross_entropy_of(student_logits, labels), 1),
        target=(mean(target), 1),
        nontarget=(decimal(temperature) ** 2 * mean(others), nontarget_weight),
    )


def deit_soft(
    student_logits: Nested,
    labels: Nested,
    distillation_logits: Nested,
    targets: Any,
    *,
    kd_weight: Number = Fraction(1, 2),
    temperature: Number = Fraction(1),
) -> dict[str, Any]:
    """REC-12."""
    whole = kd_loss(targets, distillation_logits, temperature=temperature, reduction="sum")
    soft = whole / len(list(flatten(distillation_logits)))
    return terms(
        cross_entropy=(cross_entropy_of(student_logits, labels), 1 - Fraction(kd_weight)), kd=(soft, kd_weight)
    )


def deit_hard(
    student_logits: Nested,
    labels: Nested,
    distillation_logits: Nested,
    teacher_logits: Nested,
    *,
    kd_weight: Number = Fraction(1, 2),
) -> dict[str, Any]:
    """REC-13."""
    hard = cross_entropy_of(distillation_logits, [likeliest(row) for row in teacher_logits])
    return terms(
        cross_entropy=(cross_entropy_of(student_logits, labels), 1 - Fraction(kd_weight)), kd=(hard, kd_weight)
    )


def gkd(
    student_logits: Nested,
    labels: Nested,
    targets: Any,
    *,
    mixing: Number = Fraction(1, 2),
    shift: bool = False,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """REC-14."""
    value = kd_loss(
        targets,
        student_logits,
        divergence="jsd",
        mixing=mixing,
        temperature=Fraction(1),
        loss_mask=counted(student_logits, labels, shift),
        vocab_size=vocab_size,
    )
    return terms(jsd=(value, 1))


def babyllama(
    student_logits: Nested,
    labels: Nested,
    teacher_logits: list[Nested],
    *,
    kd_weight: Number = Fraction(1, 2),
    temperature: Number = Fraction(2),
    shift: bool = True,
) -> dict[str, Any]:
    """REC-15."""
    hard = cross_entropy_of(student_logits, labels, shift=shift)
    mean_teacher = map_numbers(Fraction, mean_logits(teacher_logits))  # what the sum of decimals is, as a fraction
    soft = kd_loss(mean_teacher, student_logits, temperature=temperature, reduction="batch_mean")
    return terms(cross_entropy=(hard, 1 - Fraction(kd_weight)), kd=(soft, kd_weight))


# --- features -----------------------------------------------------------------------------------------------------


def linear(row: Sequence[Number], weight: Nested, bias: Sequence[Number]) -> Row:
    """``x W^T + b``."""
    return [decimal(dot(list(row), w)) + decimal(b) for w, b in zip(weight, bias, strict=True)]


def squared_distance(left: Sequence[Decimal], right: Sequence[Number]) -> Decimal:
    """``||x - y||^2``."""
    return sum(((x - decimal(y)) ** 2 for x, y in zip(left, right, strict=True)), ZERO)


def vitkd(
    student_layers: list[Nested],
    student_last: Nested,
    teacher_layers: list[Nested],
    teacher_last: Nested,
    parameters: dict[str, Nested],
    noise: Nested,
    *,
    mimic_weight: Number = 3e-05,
    generate_weight: Number = 3e-06,
    removed: Number = 0.5,
    grid: Sequence[int] | None = None,
) -> dict[str, Any]:
    """REC-16 to REC-18."""
    batch, tokens = shape_of(student_last)[:2]
    mimic = ZERO
    for number, (student, teacher) in enumerate(zip(student_layers, teacher_layers, strict=True)):
        head = parameters[f"mimic_{number}_weight"], parameters[f"mimic_{number}_bias"]
        pairs = zip(rows_of(student), rows_of(teacher), strict=True)
        mimic += sum((squared_distance(linear(row, *head), wanted) for row, wanted in pairs), ZERO)
    height, width = grid or (int(Decimal(tokens).sqrt()),) * 2
    head = parameters["project_weight"], parameters["project_bias"]
    generated = ZERO
    for student, teacher, order in zip(student_last, teacher_last, noise, strict=True):
        stays = int(tokens * (1 - Fraction(removed)))
        kept = {j for _, j in sorted(zip(order, range(tokens), strict=True))[:stays]}
        laid = [
            linear(row, *head) if j in kept else [decimal(x) for x in parameters["mask_token"]]
            for j, row in enumerate(student)
        ]
        hidden = convolve(laid, height, width, parameters["generate_0_weight"], parameters["generate_0_bias"])
        rectified = [[max(x, ZERO) for x in row] for row in hidden]
        made = convolve(rectified, height, width, parameters["generate_2_weight"], parameters["generate_2_bias"])
        generated += sum((squared_distance(made[j], teacher[j]) for j in range(tokens) if j not in kept), ZERO)
    return terms(
        mimic=(mimic / batch, mimic_weight),
        generate=(generated / batch, decimal(Fraction(generate_weight)) / decimal(Fraction(removed))),
    )


def convolve(laid: list[Row], height: int, width: int, weight: Nested, bias: Sequence[Number]) -> list[Row]:
    """A 3 x 3 convolution of patches in rows, with zeros beyond the border (REC-18)."""
    found = []
    for place in range(height * width):
        row, column = divmod(place, width)
        totals = [decimal(b) for b in bias]
        for i in range(3):
            for j in range(3):
                y, x = row + i - 1, column + j - 1
                if 0 <= y < height and 0 <= x < width:
                    here = laid[y * width + x]
                    for d, filters in enumerate(weight):
                        totals[d] += sum((decimal(f[i][j]) * h for f, h in zip(filters, here, strict=True)), ZERO)
        found.append(totals)
    return found


def vkd(
    student_logits: Nested,
    labels: Nested,
    distillation_logits: Nested,
    targets: Any,
    student_features: Nested,
    teacher_features: Nested,
    projection: Nested,
    *,
    kd_weight: Number = 1,
    feature_weight: Number = 1,
    temperature: Number = Fraction(1),
) -> dict[str, Any]:
    """REC-19, REC-20."""
    distances = []
    for tokens, features in zip(student_features, teacher_features, strict=True):
        pooled = [mean([decimal(x) for x in column]) for column in zip(*tokens, strict=True)]
        if len(shape_of(features)) == 3:  # channels first
            teacher = [mean([decimal(x) for x in flatten(channel)]) for channel in features]
        else:
            teacher = [mean([decimal(x) for x in column]) for column in zip(*features, strict=True)]
        centre = mean(teacher)
        deviation = (mean([(x - centre) ** 2 for x in teacher]) + Decimal("1e-5")).sqrt()
        for row, x in zip(projection, teacher, strict=True):
            difference = abs(dot([decimal(w) for w in row], pooled) - (x - centre) / deviation)
            distances.append(difference**2 / 2 if difference < 1 else difference - ONE / 2)
    return terms(
        cross_entropy=(cross_entropy_of(student_logits, labels), 1),
        kd=(kd_loss(targets, distillation_logits, temperature=temperature), kd_weight),
        features=(mean(distances), feature_weight),
    )


def vkd_detection(
    student_tokens: Sequence[Nested], teacher_tokens: Sequence[Nested], *, feature_weight: Number = 4
) -> dict[str, Any]:
    """REC-34."""
    value = ZERO
    for group in zip(student_tokens, teacher_tokens, strict=True):
        channels = [[[decimal(x) for x in column] for column in zip(*rows, strict=True)] for rows in group]
        pairs = [pair for two in zip(*channels, strict=True) for pair in zip(*map(standardised, two), strict=True)]
        apart = [abs(own - taught) for own, taught in pairs]
        value += mean([x**2 / 2 if x < 1 else x - ONE / 2 for x in apart])
    return terms(features=(value, feature_weight))


def standardised(column: Row) -> Row:
    """Mean 0, deviation 1 over n - 1; zeros of a column that does not vary (REC-34)."""
    centre = mean(column)
    variance = sum(((x - centre) ** 2 for x in column), ZERO) / (len(column) - 1)
    return [(x - centre) / variance.sqrt() if variance else ZERO for x in column]


# --- MiniLLM ------------------------------------------------------------------------------------------------------


def sampled_rows(tokens: Nested, mask: Nested) -> Iterator[tuple[int, int, int]]:
    """Text, position and token of the rows that count."""
    for text, (row, counts) in enumerate(zip(tokens, mask, strict=True)):
        for position, (token, counts_here) in enumerate(zip(row, counts, strict=True)):
            if counts_here:
                yield text, position, int(token)


def minillm_rollout(
    student_logits: Nested,
    teacher_logits: Nested,
    tokens: Nested,
    mask: Nested,
    *,
    mix: Number = 0.2,
    reward_scale: Number = 0.5,
    reward_clip: Number = 100.0,
) -> dict[str, Any]:
    """REC-22, REC-23."""
    share, scale, limit = (decimal(Fraction(x)) for x in (mix, reward_scale, reward_clip))
    shape = shape_of(tokens)
    log_probs, rewards, weights, ids = ([[fill] * shape[1] for _ in range(shape[0])] for fill in (ZERO, ZERO, ONE, 0))
    for text, position, token in sampled_rows(tokens, mask):
        own, other = (log_probs_of(side[text][position], 1)[token] for side in (student_logits, teacher_logits))
        ids[text][position] = token
        log_probs[text][position] = own
        rewards[text][position] = min(max((other - own) / scale, -limit), limit)
        weights[text][position] = own.exp() / ((1 - share) * own.exp() + share * other.exp())
    return {"tokens": ids, "mask": mask, "log_probs": log_probs, "rewards": rewards, "weights": weights}


def minillm_advantages(
    rewards: Nested, mask: Nested, *, discount: Number = 0.95, whitening: str = "biased"
) -> dict[str, Any]:
    """REC-24, REC-25."""
    gamma, made = decimal(Fraction(discount)), []
    for row, counts in zip(rewards, mask, strict=True):
        for t in range(len(row)):
            total = ZERO
            for reward in reversed(row[t:]):
                total = decimal(reward) + gamma * total
            made.append(total / max(sum(map(bool, counts[t:])), 1))
    if whitening != "none":
        centre, size = mean(made), len(made) - (whitening == "unbiased")
        variance = sum(((x - centre) ** 2 for x in made), ZERO) / size
        made = [(x - centre) / (variance + Decimal("1e-8")).sqrt() for x in made]
    return {"advantages": unflatten(made, shape_of(rewards))}


def minillm_policy(
    student_logits: Nested,
    teacher_logits: Nested,
    rollout: dict[str, Nested],
    *,
    clip: Number = 0.2,
    discount: Number = 0.95,
    whitening: str = "biased",
    reverse_kl_weight: Number = 1,
) -> dict[str, Any]:
    """REC-26."""
    advantages = minillm_advantages(rollout["rewards"], rollout["mask"], discount=discount, whitening=whitening)
    width = decimal(Fraction(clip))
    found = []
    for text, position, token in sampled_rows(rollout["tokens"], rollout["mask"]):
        before, weight = (decimal(rollout[name][text][position]) for name in ("log_probs", "weights"))
        x = weight * (log_probs_of(student_logits[text][position], 1)[token] - before).exp()
        a = advantages["advantages"][text][position]
        found.append(max(-a * x, -a * min(max(x, 1 - width), 1 + width)))
    reverse = kd_loss(teacher_logits, student_logits, divergence="reverse_kl", loss_mask=rollout["mask"])
    return terms(policy=(mean(found) if found else ZERO, 1), reverse_kl=(reverse, reverse_kl_weight))


# --- diffusion ----------------------------------------------------------------------------------------------------


def linear_betas(steps: int = 1000) -> dict[str, Any]:
    """REC-27."""
    first, last = Fraction(1, 10 * steps), Fraction(20, steps)
    return {"betas": [first + (last - first) * Fraction(k, steps - 1) for k in range(steps)]}


class Schedule:
    """beta, and abar up to and including a step (REC-27)."""

    def __init__(self, betas: Nested | None) -> None:
        self.betas = [decimal(beta) for beta in (linear_betas()["betas"] if betas is None else betas)]
        self.kept = []
        product = ONE
        for beta in self.betas:
            product *= 1 - beta
            self.kept.append(product)

    def before(self, t: int) -> Decimal:
        """``abar_{t - 1}``."""
        return self.kept[t - 1] if t else ONE

    def variance(self, t: int) -> Decimal:
        """``s^2`` (REC-31)."""
        step = max(t, 1)
        return self.betas[step] * (1 - self.before(step)) / (1 - self.kept[step])


def noised(x0: Nested, noise: Nested, t: Nested, *, betas: Nested | None = None) -> dict[str, Any]:
    """REC-28."""
    schedule = Schedule(betas)
    made = [
        schedule.kept[int(step)].sqrt() * decimal(x) + (1 - schedule.kept[int(step)]).sqrt() * decimal(e)
        for sample, drawn, step in zip(x0, noise, t, strict=True)
        for x, e in zip(flatten(sample), flatten(drawn), strict=True)
    ]
    return {"x_t": unflatten(made, shape_of(x0))}


def diffusion(
    student_output: Nested,
    x0: Nested,
    noise: Nested,
    t: Nested,
    *,
    teacher_output: Nested | None = None,
    betas: Nested | None = None,
    snr_clip: Number | None = 5.0,
    kd_weight: Number = 1,
    bound_weight: Number = 1,
) -> dict[str, Any]:
    """REC-29 to REC-33."""
    schedule = Schedule(betas)
    channels = shape_of(x0)[1]
    mse, bounds, kd = [], [], []
    for number, step in enumerate(int(step) for step in t):
        start, drawn = ([decimal(x) for x in flatten(side[number])] for side in (x0, noise))
        epsilon, span = halves(student_output[number], channels)
        kept = schedule.kept[step]
        snr = kept / (1 - kept)
        weight = ONE if snr_clip is None else min(snr, decimal(Fraction(snr_clip))) / snr
        mse.append(weight * mean([(a - b) ** 2 for a, b in zip(epsilon, drawn, strict=True)]))
        if span:
            whole = zip(start, drawn, epsilon, span, strict=True)
            bounds.append(mean([bound(schedule, step, *each) for each in whole]))
        if teacher_output is not None:
            teacher, _ = halves(teacher_output[number], channels)
            kd.append(weight * mean([(a - b) ** 2 for a, b in zip(epsilon, teacher, strict=True)]))
    found = terms(mse=(mean(mse), 1))
    if bounds:
        found |= terms(bound=(mean(bounds), bound_weight))
    return found | (terms(kd=(mean(kd), kd_weight)) if kd else {})


def halves(output: Nested, channels: int) -> tuple[Row, Row]:
    """Epsilon and range of one sample (REC-29)."""
    epsilon, span = ([decimal(x) for x in flatten(part)] for part in (output[:channels], output[channels:]))
    return epsilon, span


def bound(schedule: Schedule, t: int, x0: Decimal, noise: Decimal, epsilon: Decimal, span: Decimal) -> Decimal:
    """One number's part of the bound, in bits (REC-31, REC-32)."""
    beta, kept, before, variance = schedule.betas[t], schedule.kept[t], schedule.before(t), schedule.variance(t)
    noisy = kept.sqrt() * x0 + (1 - kept).sqrt() * noise
    guess = (noisy - (1 - kept).sqrt() * epsilon) / kept.sqrt()
    true, made = (
        (beta * before.sqrt() * start + (1 - before) * (1 - beta).sqrt() * noisy) / (1 - kept)
        for start in (x0, guess)
    )
    own = ((span + 1) / 2 * beta.ln() + (1 - span) / 2 * variance.ln()).exp()
    if t:
        nats = ((own / variance).ln() - 1 + variance / own + (true - made) ** 2 / own) / 2
        return nats / TWO.ln()
    above, below = (normal_cdf((x0 - made + sign / Decimal(255)) / own.sqrt()) for sign in (1, -1))
    mass = above if x0 < Decimal("-0.999") else 1 - below if x0 > Decimal("0.999") else above - below
    return -max(mass, Decimal("1e-12")).ln() / TWO.ln()


def normal_cdf(x: Decimal) -> Decimal:
    """The published approximation: ``(1 + tanh a) / 2`` is ``1 / (1 + exp(-2 a))`` (REC-32)."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    a = (2 / pi).sqrt() * (x + Decimal("0.044715") * x**3)
    return 1 / (1 + (-2 * a).exp())
