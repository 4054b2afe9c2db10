"""The core of the method in JAX, in float32 and float64, written from specs/shd.md alone and judged in CI.

Operations check their arguments in NumPy, then call jitted functions that a training step may call directly:
``squeeze`` for a teacher and ``divergence`` for a student, with JAX's own gradient. No option but masks is here.
"""

import jax
import jax.numpy as jnp
import numpy as np

from shd_ref.tolerances import degenerate_threshold, row_sum_tolerance

jax.config.update("jax_enable_x64", True)  # without it JAX computes float64 in float32, silently
jax.config.update("jax_default_matmul_precision", "highest")  # accelerators would round factors to bfloat16


def need(ok, code, message, bad=None):
    """Refuse unless ``ok``; MAP-5 and LOSS-6 ask for the place of the first bad entry."""
    if not ok:
        place = () if bad is None else zip(("sample", "head", "row", "key"), np.argwhere(bad)[0], strict=False)
        raise type("Refusal", (ValueError,), {"code": code})(" ".join([message, *(f"{n} {i}" for n, i in place)]))


def take(name, value, axes, shape=(), *, logits=False, rows=None, least=1, code="not-a-distribution"):
    """An array of float32 or float64; of maps, ``rows`` that count sum to ``least`` at least and to one at most."""
    value = np.asarray(value)
    need(value.dtype.kind in "fiu", "argument-dtype", f"{name} must hold real numbers")
    fits = all(n in (m, None) for n, m in zip(shape, value.shape, strict=False)) and value.ndim > 1
    need(fits and axes in (value.ndim, None), "argument-shape", f"{name} must be {shape}; got {value.shape}")
    need(not (bad := ~np.isfinite(value) & ~(logits & (value == -np.inf))).any(), "not-finite", f"{name}:", bad)
    if rows is not None:
        need(not (bad := value < 0).any(), code, f"{name} must be at least 0:", bad)
        total, near = value.sum(-1, dtype="f8"), row_sum_tolerance(value.dtype.name)
        short = (total < least - near) & ((total > 0) | (code == "mixing-invalid"))
        need(not (bad := rows & (short | (total > 1 + near))).any(), code, f"{name} must sum to one:", bad)
    return value.astype("f4" if value.dtype.kind == "f" and value.dtype.itemsize < 8 else "f8")


def take_mask(name, value, shape, broadcast=False):
    value = np.ones(shape, bool) if value is None else np.asarray(value)
    need(value.dtype == bool, "argument-dtype", f"{name} must be boolean, True where it counts")
    sizes = zip(value.shape[::-1], shape[::-1], strict=False)
    fits = value.ndim <= len(shape) and all(n in (1, m) for n, m in sizes) if broadcast else value.shape == shape
    need(fits, "argument-shape", f"{name} must be {shape}; got {value.shape}")
    return np.broadcast_to(value, shape)


@jax.jit
def log_softmax(z, may):
    z = jnp.where(may := may & (z > -jnp.inf), z, 0)  # an infinity, masked or not, would make the gradient NaN
    z -= jnp.where(may.any(-1, keepdims=True), jnp.where(may, z, -jnp.inf).max(-1, keepdims=True), 0)
    total = jnp.where(may, jnp.exp(jnp.where(may, z, 0)), 0).sum(-1, keepdims=True)
    return jnp.where(may, z - jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)


def inner(y, z, rows):
    return jnp.where(rows[..., None], y * z, 0).sum((-2, -1))


@jax.jit
def alpha(a_p, a_q, x_p, x_q, rows):
    """ALPHA-2, -3, -6: clipped alphas ``(B)``, and which were clipped, which degenerate."""
    u, m, p, q = (a_p - a_q) @ x_p, (a_p - a_q) @ (x_p + x_q), a_p @ (x_p + x_q), a_q @ (x_p + x_q)
    flat = inner(m, m, rows) <= degenerate_threshold() * (inner(p, p, rows) + inner(q, q, rows))
    best = inner(u, m, rows) / jnp.where(flat, 1, inner(m, m, rows))
    return jnp.where(flat, 0.5, best.clip(0, 1)), ~flat & ((best < 0) | (best > 1)), flat


@jax.jit(static_argnames="plan")
def squeeze(a, x, rows, plan):
    """MIX-4, -8: maps ``(B, H_t, L, S)`` and value outputs ``(B, H_t, S, D)`` along the plan."""
    first, output, rounds = a, (a @ x).sum(1), []
    c = jnp.broadcast_to(jnp.eye(a.shape[1], dtype=a.dtype), (len(a), a.shape[1], a.shape[1]))
    for pairs in plan:
        p, q = jnp.array(pairs).T
        rest = jnp.array(sorted({*range(a.shape[1])} - {i for pair in pairs for i in pair}), int)
        rounds += [jax.vmap(alpha, (1, 1, 1, 1, None), 1)(a[:, p], a[:, q], x[:, p], x[:, q], rows)]
        w = rounds[-1][0][..., None]
        c = jnp.concatenate([w * c[:, p] + (1 - w) * c[:, q], c[:, rest]], 1)
        a, x = jnp.einsum("bht,btls->bhls", c, first), jnp.concatenate([x[:, p] + x[:, q], x[:, rest]], 1)
    missed, whole = (inner(y, y, rows) for y in ((a @ x).sum(1) - output, output))
    return a, c, rounds, jnp.where(missed > 0, jnp.sqrt(missed / whole), 0)


@jax.jit
def divergence(p, z, may, rows):
    """LOSS-1, -4 of one layer: the sum over heads of the mean over counted rows."""
    terms = jnp.log(jnp.where(p > 0, p, 1)) - jnp.where(p > 0, log_softmax(z, may), 0)
    counted = rows[:, None] & (p > 0).any(-1)
    return (jnp.where(counted, (p * terms).sum(-1), 0).sum((0, 2)) / counted.sum((0, 2)).clip(1)).sum()


def softmax(attn_logits, attn_mask=None):
    z = take("attn_logits", attn_logits, None, logits=True)
    return np.asarray(jnp.exp(log_softmax(z, take_mask("attn_mask", attn_mask, z.shape, broadcast=True))))


def value_outputs(values, output_projection):
    v, w = take("values", values, 4), take("output_projection", output_projection, 2)
    groups, left = divmod(len(w), v.shape[1] * v.shape[3])
    need(groups and not left, "argument-shape", "output_projection must have a positive multiple of H_kv d_v rows")
    return np.asarray(jnp.repeat(v, groups, 1) @ w.reshape(-1, v.shape[3], w.shape[1]))


def merge_plan(num_teacher_heads, num_student_heads):
    pool, wanted, plan = num_teacher_heads, num_student_heads, []
    for n in pool, wanted:
        need(type(n) is not bool and isinstance(n, int | np.integer) and n > 0, "argument-value", f"{n} heads")
    need(wanted <= pool, "heads-exceed", f"a student of this teacher has at most {pool} heads; got {wanted}")
    while pool > wanted:
        plan += [tuple((2 * i, 2 * i + 1) for i in range(min(pool // 2, pool - wanted)))]
        pool -= len(plan[-1])
    return tuple(plan)


def solve_alpha(probs_p, probs_q, value_outputs_p, value_outputs_q, *, query_mask=None):
    rows = take_mask("query_mask", query_mask, np.shape(probs_p)[:2])
    a_p = take("probs_p", probs_p, 3, rows=rows)
    a_q, x_p = take("probs_q", probs_q, 3, a_p.shape, rows=rows), take("x_p", value_outputs_p, 3, a_p.shape[::2])
    return np.asarray(alpha(a_p, a_q, x_p, take("value_outputs_q", value_outputs_q, 3, x_p.shape), rows)[0])


def mix_heads(teacher_probs, mixing):
    a = take("teacher_probs", teacher_probs, 4, rows=True, least=0)
    c = take("mixing", mixing, 3, (len(a), None, a.shape[1]), rows=True, code="mixing-invalid")
    return np.asarray(jnp.einsum("bht,btls->bhls", c, a))


def squeeze_heads(teacher_probs, value_outputs, num_student_heads, *, query_mask=None):
    rows = take_mask("query_mask", query_mask, np.shape(teacher_probs)[::2])
    a = take("teacher_probs", teacher_probs, 4, rows=rows[:, None])
    x = take("value_outputs", value_outputs, 4, (*a.shape[:2], a.shape[3]))
    probs, c, rounds, residual = squeeze(a, x, rows, plan := merge_plan(a.shape[1], num_student_heads))
    alphas, clipped, flat = ([found[i] for found in rounds] for i in range(3))
    counts = {"num_clipped": sum(int(n.sum()) for n in clipped), "num_degenerate": sum(int(n.sum()) for n in flat)}
    return counts | {"probs": probs, "mixing": c, "residual": residual, "alphas": alphas, "plan": plan}


def shd_loss(supervision, student_logits, *, loss_mask=None, attn_mask=None):
    many, loss = [isinstance(y, list | tuple) for y in (supervision, student_logits)], 0.0
    maps, logits = (supervision, student_logits) if all(many) else ([supervision], [student_logits])
    need(many[0] == many[1] and len(maps) == len(logits) > 0, "argument-shape", "as many logits as maps")
    for layer, (p, z) in enumerate(zip(maps, logits, strict=True)):
        z = take(f"student_logits of layer {layer}", z, 4, logits=True)
        rows, may = take_mask("loss_mask", loss_mask, z.shape[::2]), take_mask("attn_mask", attn_mask, z.shape, True)
        p = take(f"supervision of layer {layer}", p, 4, z.shape, rows=rows[:, None])
        lost = (p > 0) & ~(may & (z > -np.inf)) & rows[:, None, :, None]
        need(not lost.any(), "support-mismatch", f"mass on a key that the student masks: layer {layer}", lost)
        loss += float(divergence(p, z, may, rows))
    return loss
