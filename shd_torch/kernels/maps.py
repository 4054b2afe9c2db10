"""Pieces of attention maps inside a Triton program: tiles of logits, of the supervision, and who may attend.

A tile is ``[rows, keys]`` in every program: what a row brings is then a register or two of a thread, not sixteen.
Logarithms have base 2, the base of the hardware's exponential.
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
        at = mask.key_mask + batch.to(tl.int64) * mask.num_keys + keys
        attended = attended & (tl.load(at, mask=attended, other=0) != 0)
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
    held = load_keys(teacher, batch, member, keys, keys < num_keys)
    line = (batch.to(tl.int64) * teacher.num_heads + member) * supervision.num_rows
    lse = tl.load(teacher.lse + line + rows, mask=exist, other=0.0) * LOG2_E
    shift = lse - tl.log2(load_mixing(supervision, batch, head, member, rows, exist) * gain)
    return tl.exp2(logits_tile(queries, held, teacher) - (shift)[:, None])


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
    held = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
    if supervision.is_triangular:
        held = held & (keys[None, :] <= rows[:, None])
    codes = tl.load(base + (offsets[:, None] + keys[None, :]), mask=held, other=0).to(tl.float32)
    return tl.where(codes == 1.0, CODE_1, codes * codes)
