/** Chapters MAP, TEMP, TOKEN and LAYER: attention maps, temperature, positions, layers. */
import { NdArray, checkTemperature, checkedProbs, fail, isInteger, realArray, rowMask, spreadMask } from "./arrays.mjs";

const twoOrMore = (axes) => axes >= 2;

/**
 * One row of softmax(z / T) and its logarithm, written at `offset` (MAP-1, MAP-2, LOSS-12).
 * The largest logit is taken off before the division, so that nothing overflows.
 */
export function softmaxRow(z, allowed, offset, S, T, probs, logs = null) {
  let top = -Infinity;
  for (let j = offset; j < offset + S; j++) {
    if ((!allowed || allowed[j]) && z[j] > top) top = z[j];
  }
  if (top === -Infinity) {
    for (let j = offset; j < offset + S; j++) {
      probs[j] = 0;
      if (logs) logs[j] = -Infinity;
    }
    return;
  }
  let sum = 0;
  for (let j = offset; j < offset + S; j++) {
    const open = (!allowed || allowed[j]) && z[j] !== -Infinity;
    const shifted = open ? (z[j] - top) / T : -Infinity;
    probs[j] = open ? Math.exp(shifted) : 0;
    if (logs) logs[j] = shifted;
    sum += probs[j];
  }
  const logSum = Math.log(sum);
  for (let j = offset; j < offset + S; j++) {
    probs[j] /= sum;
    if (logs) logs[j] -= logSum;
  }
}

/** MAP-1, MAP-2, MAP-10, TEMP-2. */
export function softmax({ attn_logits, attn_mask = null, temperature = 1 }) {
  checkTemperature(temperature);
  const z = realArray(attn_logits, "attn_logits", twoOrMore, { logits: true });
  const allowed = spreadMask(attn_mask, z.shape);
  const S = z.shape[z.ndim - 1];
  const out = NdArray.zeros(z.shape);
  for (let offset = 0; offset < z.data.length; offset += S) softmaxRow(z.data, allowed, offset, S, temperature, out.data);
  return out;
}

/** The softened rows of probabilities that were checked before (TEMP-2, TEMP-5, TEMP-6, TEMP-7). */
export function softened(probs, T, rowSums) {
  const out = new NdArray(probs.shape, Float64Array.from(probs.data));
  if (T === 1) return out;
  const S = probs.shape[probs.ndim - 1];
  const data = out.data;
  for (let offset = 0; offset < data.length; offset += S) {
    let top = 0;
    let mass = 0;
    for (let j = offset; j < offset + S; j++) {
      top = Math.max(top, data[j]);
      mass += data[j];
    }
    if (top === 0) continue;
    let sum = 0;
    for (let j = offset; j < offset + S; j++) {
      const ratio = data[j] / top;
      data[j] = ratio === 1 ? 1 : Math.pow(ratio, 1 / T); // 1 ** Infinity is NaN in this language
      sum += data[j];
    }
    const scale = rowSums === "one" ? 1 : mass;
    for (let j = offset; j < offset + S; j++) data[j] = (data[j] / sum) * scale;
  }
  return out;
}

/** Chapter TEMP. */
export function soften({ attn_probs, temperature, row_sums = "one" }) {
  checkTemperature(temperature);
  checkedProbs(attn_probs, "attn_probs", twoOrMore, { rowSums: row_sums });
  return softened(attn_probs, temperature, row_sums);
}

/** X = V W for each query head (MAP-6, MAP-11). With `heads` given, the projection must have rows for just as many. */
export function value_outputs({ values, output_projection }, heads = null) {
  const v = realArray(values, "values", 4);
  const w = realArray(output_projection, "output_projection", 2);
  const [B, Hkv, S, dv] = v.shape;
  const [rows, D] = w.shape;
  if (rows < 1 || rows % (Hkv * dv) !== 0 || (heads !== null && rows !== heads * dv)) {
    fail("argument-shape", `output_projection: ${rows} rows do not fit ${Hkv} value heads of width ${dv}`);
  }
  const H = rows / dv;
  const out = NdArray.zeros([B, H, S, D]);
  for (let b = 0; b < B; b++) {
    for (let h = 0; h < H; h++) {
      const source = (b * Hkv + Math.floor(h / (H / Hkv))) * S;
      for (let s = 0; s < S; s++) {
        const target = ((b * H + h) * S + s) * D;
        for (let e = 0; e < dv; e++) {
          const x = v.data[(source + s) * dv + e];
          for (let c = 0; c < D; c++) out.data[target + c] += x * w.data[(h * dv + e) * D + c];
        }
      }
    }
  }
  return out;
}

function positions(list, length, name) {
  if (list === null || list === undefined) return Array.from({ length }, (_, i) => i);
  const good =
    Array.isArray(list) &&
    list.length > 0 &&
    list.every((i) => isInteger(i) && i >= 0 && i < length) &&
    new Set(list).size === list.length;
  if (!good) fail("argument-value", `${name}: distinct positions from 0 to ${length - 1} are needed`); // TOKEN-4
  return list;
}

/** Chapter TOKEN. */
export function align_tokens({ attn_probs, rows = null, columns = null, query_mask = null, row_sums = "one" }) {
  const probs = realArray(attn_probs, "attn_probs", 4);
  const [B, H, L, S] = probs.shape;
  const mask = rowMask(query_mask, "query_mask", B, L);
  checkedProbs(probs, "attn_probs", 4, { rowSums: row_sums, mask });
  const keptRows = positions(rows, L, "rows");
  const keptColumns = positions(columns, S, "columns");
  const isKept = new Uint8Array(S);
  for (const j of keptColumns) isKept[j] = 1;
  const out = NdArray.zeros([B, H, keptRows.length, keptColumns.length]);
  const dropped = NdArray.zeros([B, H, keptRows.length]);
  let at = 0;
  for (let map = 0; map < B * H; map++) {
    for (const i of keptRows) {
      const row = probs.data.subarray((map * L + i) * S, (map * L + i + 1) * S);
      let kept = 0;
      let lost = 0;
      for (let j = 0; j < S; j++) {
        if (isKept[j]) kept += row[j];
        else lost += row[j];
      }
      dropped.data[at] = lost;
      keptColumns.forEach((j, c) => {
        const share = lost === 0 || row[j] === 0 ? row[j] : (row[j] / kept) * (kept + lost); // TOKEN-3
        out.data[at * keptColumns.length + c] = share;
      });
      at++;
    }
  }
  return { probs: out, dropped };
}

/** Chapter LAYER. */
export function layer_map({ num_teacher_layers: Lt, num_student_layers: Ls, pairs = null }) {
  if (!isInteger(Lt) || !isInteger(Ls) || Lt < 1 || Ls < 1) fail("layers-invalid", "counts are integers of at least 1");
  if (pairs === null) {
    if (Ls > Lt) fail("layers-invalid", `${Ls} student layers and ${Lt} teacher layers`);
    return Array.from({ length: Ls }, (_, i) => [i, Math.floor((2 * (i + 1) * Lt + Ls) / (2 * Ls)) - 1]); // LAYER-1, -6
  }
  const good =
    Array.isArray(pairs) &&
    pairs.length > 0 &&
    pairs.every((pair) => Array.isArray(pair) && pair.length === 2 && pair.every((n) => isInteger(n) && n >= 0)) &&
    pairs.every(([s, t]) => s < Ls && t < Lt) &&
    new Set(pairs.map(([s]) => s)).size === pairs.length;
  if (!good) fail("layers-invalid", "pairs: (student, teacher) in range, no student layer twice"); // LAYER-4
  return pairs.map(([s, t]) => [s, t]).sort((a, b) => a[0] - b[0]); // LAYER-5
}
