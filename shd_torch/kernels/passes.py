"""The Triton programs: pieces of maps, what a row sums to, then gradients by rows (queries) and by keys.

A tile is ``[rows, keys]`` in every program: what a row brings is then a register or two of a thread, not sixteen.
Logarithms have base 2, the base of the hardware's exponential.

Both maps are rebuilt tile by tile, and their difference ``dz = g (rho A_student - A~)`` is taken in float32 *before*
it is rounded for the matrix unit: rounding both first would leave mostly noise of a student that is already close.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# What the cache's code 1 decodes to before the row is made to sum to one; every other code is its square (CACHE-115).
CODE_1 = tl.constexpr(0.75)


@triton.jit
def load_queries(model, batch, head, rows, exist):
    """Queries of one head ``[rows, padded]``; zero past the last row and column."""
    base = model.queries + batch.to(tl.int64) * model.query_strides[0] + head.to(tl.int64) * model.query_strides[1]
    return load_heads(base, model.query_strides[2], rows, exist, model)


@triton.jit
def load_keys(model, batch, head, keys, exist):
    """The keys ``[keys, padded]`` that a query head reads; zero past the last key and column."""
    kv_head = head // model.group_size
    base = model.keys + batch.to(tl.int64) * model.key_strides[0] + kv_head.to(tl.int64) * model.key_strides[1]
    return load_heads(base, model.key_strides[2], keys, exist, model)


@triton.jit
def load_heads(base, stride, positions, exist, model):
    """Queries or keys of one head."""
    columns = tl.arange(0, model.padded)
    entries = exist[:, None]
    if model.padded != model.width:
        entries = entries & (columns < model.width)[None, :]
    # 64 bits: a packed batch of long sequences outgrows 32.
    return tl.load(base + positions.to(tl.int64)[:, None] * stride + columns[None, :], mask=entries, other=0.0)


@triton.jit
def locate_heads(gradient, line, positions, exist, model):
    """Where a contiguous gradient of one head has its entries ``[positions, padded]``, and which of them exist."""
    columns = tl.arange(0, model.padded)
    pointers = gradient + (line + positions)[:, None] * model.width + columns[None, :]
    return pointers, exist[:, None] & (columns < model.width)[None, :]


@triton.jit
def may_attend(mask, batch, rows, keys):
    """The mask of a tile, True = may attend: keys that exist and are not padding."""
    attended = keys < mask.num_keys
    if mask.key_mask is not None:
        pointers = mask.key_mask + batch.to(tl.int64) * mask.num_keys + keys
        attended = attended & (tl.load(pointers, mask=attended, other=0) != 0)
    row, key = (rows)[:, None], (keys)[None, :]
    allowed = (rows < mask.num_rows)[:, None] & (attended)[None, :]
    if mask.is_causal:
        allowed = allowed & (key <= row)
    if mask.window is not None:
        allowed = allowed & (row - key < mask.window)
        if not mask.is_causal:
            allowed = allowed & (key - row < mask.window)
    return allowed


@triton.jit
def key_range(mask, row_start, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The first key, on a tile's border, and the end of the keys that any row of a block may attend to."""
    first = 0
    end = mask.num_keys
    if mask.is_causal:
        end = tl.minimum(end, row_start + ROWS)
    if mask.window is not None:
        first = tl.maximum(row_start - mask.window + 1, 0) // KEYS * KEYS
        if not mask.is_causal:
            end = tl.minimum(end, row_start + ROWS + mask.window - 1)
    return first, end


@triton.jit
def row_range(mask, key_start, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The first row, on a tile's border, and the end of the rows that may attend to any key of a block."""
    first = 0
    end = mask.num_rows
    if mask.is_causal:
        first = key_start // ROWS * ROWS
    if mask.window is not None:
        end = tl.minimum(end, key_start + KEYS + mask.window - 1)
        if not mask.is_causal:
            first = tl.maximum(key_start - mask.window + 1, 0) // ROWS * ROWS
    return first, end


@triton.jit
def logits_tile(queries, keys, model):
    """Scaled logits, float32."""
    return tl.dot(queries, tl.trans(keys), input_precision=model.precision) * model.scale


@triton.jit
def load_mixing(supervision, batch, head, member, rows, exist):
    """C[h, t, i]; the query axis has stride 0 where one weight serves all rows."""
    strides = supervision.mixing_strides
    base = supervision.mixing + batch.to(tl.int64) * strides[0] + head * strides[1] + member * strides[2]
    return tl.load(base + rows * strides[3], mask=exist, other=0.0)


@triton.jit
def member_tile(supervision, teacher, batch, head, index, rows, keys, gain, num_keys):
    """One teacher head's map times its mixing weight and the row's gain."""
    member = tl.load(supervision.members + head * supervision.max_members + index)
    exist = rows < supervision.num_rows
    queries = load_queries(teacher, batch, member, rows, exist)
    key_vectors = load_keys(teacher, batch, member, keys, keys < num_keys)
    line = (batch.to(tl.int64) * teacher.num_heads + member) * supervision.num_rows
    lse = tl.load(teacher.lse + line + rows, mask=exist, other=0.0)
    weight = load_mixing(supervision, batch, head, member, rows, exist) * gain
    return tl.exp2(logits_tile(queries, key_vectors, teacher) - lse[:, None]) * weight[:, None]


@triton.jit
def factored_tile(supervision, batch, head, rows, keys, gain, num_keys):
    """The merged map from the teacher's queries and keys: only the heads merged into this one are computed."""
    # A tuple loses its constants where it gets a name: the teacher has none here.
    probs = tl.zeros([rows.shape[0], keys.shape[0]], tl.float32)
    if supervision.unrolled > 0:
        # Unrolled, the loop over tiles stays the innermost one, which the compiler overlaps with its loads.
        for index in tl.static_range(supervision.unrolled):
            probs += member_tile(supervision, supervision.teacher, batch, head, index, rows, keys, gain, num_keys)
    else:
        for index in range(tl.load(supervision.counts + head)):
            probs += member_tile(supervision, supervision.teacher, batch, head, index, rows, keys, gain, num_keys)
    return probs


@triton.jit
def coded_tile(supervision, batch, head, start, rows, keys):
    """Entries of the stored map in units of a code squared, before the row is made to sum to one."""
    num_rows = tl.load(supervision.num_rows + batch)
    num_keys = tl.load(supervision.num_keys + batch)
    base = supervision.codes + tl.load(supervision.starts + batch * supervision.num_heads + head)
    # 64 bits for where the block begins, 32 within it.
    first = tl.zeros([], tl.int64) + start
    if supervision.is_triangular:
        base += first * (first + 1) // 2
        offsets = (rows - start) * (rows + start + 1) // 2
    else:
        base += first * num_keys
        offsets = (rows - start) * num_keys
    is_stored = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
    if supervision.is_triangular:
        is_stored = is_stored & (keys[None, :] <= rows[:, None])
    codes = tl.load(base + (offsets[:, None] + keys[None, :]), mask=is_stored, other=0).to(tl.float32)
    return tl.where(codes == 1.0, CODE_1, codes * codes)


# Differences of probabilities times this stay normal numbers in float16 down to 1.5e-8, and below its maximum.
HEADROOM = tl.constexpr(4096.0)


@triton.jit
def lse_pass(lse, model, mask, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Log-sum-exp of every row ``(B, H, L)``; -inf on rows that may attend to nothing."""
    start = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // model.num_heads, tl.program_id(1) % model.num_heads
    rows = start + tl.arange(0, ROWS)
    exist = rows < mask.num_rows
    queries = load_queries(model, batch, head, rows, exist)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, end = key_range(mask, start, ROWS, KEYS)
    for key_start in range(first, end, KEYS):
        keys = key_start + tl.arange(0, KEYS)
        key_vectors = load_keys(model, batch, head, keys, keys < mask.num_keys)
        logits = tl.where(
            may_attend(mask, batch, rows, keys), logits_tile(queries, key_vectors, model), float("-inf")
        )
        raised = tl.maximum(peak, tl.max(logits, 1))
        # A row without a key so far has no peak to subtract; any finite number serves.
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        total = total * tl.exp2(peak - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
        peak = raised
    # log2(0) is -inf, where the peak is as well.
    result = tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    line = tl.program_id(1).to(tl.int64) * mask.num_rows
    tl.store(lse + line + rows, result, mask=exist)


@triton.jit
def mass_pass(masses, supervision, mask, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """What the stored entries of a row sum to ``(B, H_s, L)``; NaN where one lies outside the student's mask."""
    start = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // supervision.num_heads, tl.program_id(1) % supervision.num_heads
    rows = start + tl.arange(0, ROWS)
    exist = rows < mask.num_rows
    total = tl.zeros([ROWS], tl.float32)
    outside = tl.zeros([ROWS], tl.float32)
    for key_start in range(0, mask.num_keys, KEYS):
        keys = key_start + tl.arange(0, KEYS)
        entries = coded_tile(supervision, batch, head, start, rows, keys)
        total += tl.sum(entries, 1)
        outside += tl.sum(tl.where(may_attend(mask, batch, rows, keys), 0.0, entries), 1)
    result = tl.where(outside > 0.0, float("nan"), total)
    tl.store(masses + tl.program_id(1).to(tl.int64) * mask.num_rows + rows, result, mask=exist)


@triton.jit
def load_rows(student, supervision, weights, largest, num_rows, batch, head, rows):
    """What each row brings: its weight g, g's share of the largest, and log-sum-exp, rho and the codes' factor."""
    line = (batch.to(tl.int64) * student.num_heads + head) * num_rows
    exist = rows < num_rows
    weight = tl.load(weights + line + rows, mask=exist, other=0.0)
    lse = tl.load(student.lse + line + rows, mask=exist, other=0.0)
    mass = tl.load(supervision.masses + line + rows, mask=exist, other=0.0)
    if supervision.is_coded:
        # A row without supervision, or with some where the student may not attend (NaN), moves nothing.
        has_mass = mass > 0.0
        factor = tl.where(has_mass, 1.0 / tl.where(has_mass, mass, 1.0), 0.0)
        mass = tl.where(has_mass, 1.0, 0.0)
    else:
        factor = mass
    return weight, weight / tl.where(largest > 0.0, largest, 1.0), (lse, mass, factor)


@triton.jit
def difference_tile(student, supervision, mask, queries, key_vectors, batch, head, start, rows, keys, terms, gain):
    """``gain (rho A_student - A~)``, then ``gain A~`` and log2 of ``A_student``.

    In the exponent a row's factors would cost nothing, but round a probability near 1 as the logarithm of gain, 12.
    """
    lse, mass, factor = terms
    allowed = may_attend(mask, batch, rows, keys)
    logits = logits_tile(queries, key_vectors, student)
    log_probs = tl.where(allowed, logits - lse[:, None], float("-inf"))
    if supervision.is_coded:
        target = coded_tile(supervision, batch, head, start, rows, keys) * (factor * gain)[:, None]
    else:
        target = factored_tile(supervision, batch, head, rows, keys, gain, mask.num_keys)
        target = tl.where(allowed, target, 0.0)
    return tl.exp2(log_probs) * (mass * gain)[:, None] - target, target, log_probs


@triton.jit
def rows_pass(dq, dk, kl, student, supervision, mask, weights, peak, factor, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """dq ``(B, H_s, L, d)`` and, if wanted, the divergence of each row; with ``dk`` also dk, by atomic additions."""
    start = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // student.num_heads, tl.program_id(1) % student.num_heads
    rows = start + tl.arange(0, ROWS)
    exist = rows < mask.num_rows
    largest = tl.load(peak)
    weight, share, terms = load_rows(student, supervision, weights, largest, mask.num_rows, batch, head, rows)
    queries = load_queries(student, batch, head, rows, exist)
    gain = tl.full([ROWS], HEADROOM, tl.float32)
    student_mass = terms[1] * HEADROOM
    unit = 1.0 / tl.where(student_mass > 0.0, student_mass, 1.0)
    gradient = tl.zeros([ROWS, student.padded], tl.float32)
    divergence = tl.zeros([ROWS], tl.float32)
    first, end = key_range(mask, start, ROWS, KEYS)
    # A block without a row that counts (prompt tokens, padding) has nothing to compute.
    end = tl.where(tl.max(tl.abs(weight), 0) > 0.0, end, first)
    for key_start in range(first, end, KEYS):
        keys = key_start + tl.arange(0, KEYS)
        key_vectors = load_keys(student, batch, head, keys, keys < mask.num_keys)
        difference, target, log_probs = difference_tile(
            student, supervision, mask, queries, key_vectors, batch, head, start, rows, keys, terms, gain
        )
        gradient = tl.dot(difference.to(key_vectors.dtype), key_vectors, gradient, input_precision=student.precision)
        if kl is not None:
            surprise = tl.log2(tl.where(target > 0.0, target * unit[:, None], 1.0)) - log_probs
            divergence += tl.sum(tl.where(target > 0.0, target * surprise, 0.0), 1)
        if dk is not None:
            weighted = (difference * share[:, None]).to(queries.dtype)
            product = tl.dot(tl.trans(weighted), queries, input_precision=student.precision) * (
                factor * largest / HEADROOM
            )
            line = batch.to(tl.int64) * (student.num_heads // student.group_size) + head // student.group_size
            pointers, inside = locate_heads(dk, line * mask.num_keys, keys, keys < mask.num_keys, student)
            tl.atomic_add(pointers, product, mask=inside, sem="relaxed")
    line = tl.program_id(1).to(tl.int64) * mask.num_rows
    pointers, inside = locate_heads(dq, line, rows, exist, student)
    tl.store(pointers, gradient * (weight * (factor / HEADROOM))[:, None], mask=inside)
    if kl is not None:
        divergence = divergence / (HEADROOM * LOG2_E)
        if supervision.is_coded:
            masses = tl.load(supervision.masses + line + rows, mask=exist, other=0.0)
            divergence = tl.where(masses != masses, float("inf"), divergence)
        tl.store(kl + line + rows, tl.where(weight != 0.0, divergence, 0.0), mask=exist)


@triton.jit
def keys_pass(dk, student, supervision, mask, weights, peak, factor, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """dk ``(B, H_kv, S, d)``, summed in one order over the rows and over the query heads that read a key head."""
    key_start = tl.program_id(0) * KEYS
    num_kv_heads = student.num_heads // student.group_size
    batch, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    keys = key_start + tl.arange(0, KEYS)
    exist = keys < mask.num_keys
    first_head = kv_head * student.group_size
    key_vectors = load_keys(student, batch, first_head, keys, exist)
    largest = tl.load(peak)
    gradient = tl.zeros([KEYS, student.padded], tl.float32)
    first, end = row_range(mask, key_start, ROWS, KEYS)
    num_blocks = tl.cdiv(tl.maximum(end - first, 0), ROWS)
    # One loop over heads and blocks of rows, not two: only an innermost loop is overlapped with its loads.
    for step in range(num_blocks * student.group_size):
        head = first_head + step // num_blocks
        start = first + step % num_blocks * ROWS
        rows = start + tl.arange(0, ROWS)
        _, share, terms = load_rows(student, supervision, weights, largest, mask.num_rows, batch, head, rows)
        queries = load_queries(student, batch, head, rows, rows < mask.num_rows)
        difference, _, _ = difference_tile(
            student, supervision, mask, queries, key_vectors, batch, head, start, rows, keys, terms, share * HEADROOM
        )
        gradient = tl.dot(
            tl.trans(difference.to(queries.dtype)), queries, gradient, input_precision=student.precision
        )
    line = tl.program_id(1).to(tl.int64) * mask.num_keys
    pointers, inside = locate_heads(dk, line, keys, exist, student)
    tl.store(pointers, gradient * (factor * largest / HEADROOM), mask=inside)
