/**
 * Arrays, errors and the checks of chapter MAP that several operations share.
 * An array is a flat Float64Array with a shape, the last axis fastest.
 */
import { readFileSync } from "node:fs";

const tolerances = JSON.parse(readFileSync(new URL("../../../../specs/tolerances.json", import.meta.url), "utf8"));

/** The threshold of ALPHA-6 and GRAM-3. */
export const DEGENERATE = tolerances.constants.degenerate;

/** ROW_SUM for the dtype of an argument; an integer argument takes that of float64. */
export function rowSumTolerance(array) {
  return tolerances.row_sum[array.dtype] ?? tolerances.row_sum.float64;
}

/** An error with a code (ERR-1, ERR-2). */
export class ShdError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "ShdError";
    this.code = code;
  }
}

/** @returns {never} */
export function fail(code, message) {
  throw new ShdError(code, message);
}

/** An array. `dtype` is a name such as "float64", "int64" or "bool"; `data` holds numbers (1 and 0 for a boolean). */
export class NdArray {
  constructor(shape, data, dtype = "float64") {
    this.shape = shape;
    this.data = data;
    this.dtype = dtype;
  }

  static zeros(shape) {
    return new NdArray(shape, new Float64Array(size(shape)));
  }

  get ndim() {
    return this.shape.length;
  }
}

export function size(shape) {
  return shape.reduce((product, n) => product * n, 1);
}

export function isInteger(x) {
  return typeof x === "number" && Number.isInteger(x);
}

function sameShape(a, b) {
  return a.length === b.length && a.every((n, axis) => n === b[axis]);
}

/** A position in words: sample and head for four axes (MAP-5). */
function place(array, flat, where) {
  const index = [];
  for (let axis = array.ndim - 1; axis >= 0; axis--) {
    index.unshift(flat % array.shape[axis]);
    flat = Math.floor(flat / array.shape[axis]);
  }
  const names = { 4: ["sample", "head"], 3: ["sample"], 5: ["sample"], 6: ["sample"] }[array.ndim] ?? [];
  const words = names.map((name, axis) => `${name} ${index[axis]}`);
  return `${where ? `${where}, ` : ""}${words.length ? words.join(", ") : `index [${index}]`}`;
}

/** An array of real numbers with the number of axes asked for (MAP-4, MAP-5). */
export function realArray(x, name, axes, { logits = false, where = "" } = {}) {
  if (!(x instanceof NdArray)) fail("argument-dtype", `${name}: an array of real numbers is needed`);
  if (!/^(b?float|u?int)/.test(x.dtype)) fail("argument-dtype", `${name}: real numbers are needed, not ${x.dtype}`);
  const right = typeof axes === "function" ? axes(x.ndim) : x.ndim === axes;
  if (!right) fail("argument-shape", `${name}: wrong number of axes (${x.ndim})`);
  for (let i = 0; i < x.data.length; i++) {
    const v = x.data[i];
    if (!Number.isFinite(v) && !(logits && v === -Infinity)) {
      fail("not-finite", `${name}: ${v} at ${place(x, i, where)}`);
    }
  }
  return x;
}

/** A query or loss mask of shape (B, L), or null (MAP-7). */
export function rowMask(mask, name, B, L) {
  if (mask === null || mask === undefined) return null;
  if (!(mask instanceof NdArray) || mask.dtype !== "bool") fail("argument-dtype", `${name}: a boolean mask is needed`);
  if (!sameShape(mask.shape, [B, L])) fail("argument-shape", `${name}: the shape must be (${B}, ${L})`);
  return mask;
}

/** `attn_mask` spread over all entries of the logits, or null (MAP-7, MAP-10). */
export function spreadMask(mask, shape) {
  if (mask === null || mask === undefined) return null;
  if (!(mask instanceof NdArray) || mask.dtype !== "bool") fail("argument-dtype", "attn_mask: a boolean mask is needed");
  const offset = shape.length - mask.ndim;
  if (offset < 0 || mask.shape.some((n, axis) => n !== 1 && n !== shape[axis + offset])) {
    fail("argument-shape", `attn_mask: (${mask.shape}) does not broadcast to (${shape})`);
  }
  let spread = mask.data;
  let inner = 1; // entries of the axes already spread
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    const own = axis >= offset ? mask.shape[axis - offset] : 1;
    if (own !== shape[axis]) {
      const blocks = spread.length / inner;
      const wider = new Float64Array(spread.length * shape[axis]);
      for (let block = 0; block < blocks; block++) {
        const part = spread.subarray(block * inner, (block + 1) * inner);
        for (let copy = 0; copy < shape[axis]; copy++) wider.set(part, (block * shape[axis] + copy) * inner);
      }
      spread = wider;
    }
    inner *= shape[axis];
  }
  return spread;
}

export function checkRowSums(rowSums) {
  if (rowSums !== "one" && rowSums !== "at_most_one") fail("argument-value", `row_sums: ${rowSums}`); // MAP-9
  return rowSums;
}

/**
 * Attention probabilities (MAP-3, MAP-5, MAP-9). Rows where the mask (B, L) is False are exempt from the sum.
 * With three axes the rows are those of (B, L, S), with four those of (B, H, L, S).
 */
export function checkedProbs(x, name, axes, { rowSums = "one", mask = null, where = "" } = {}) {
  checkRowSums(rowSums);
  realArray(x, name, axes, { where });
  const S = x.shape[x.ndim - 1];
  const L = x.shape[x.ndim - 2];
  const rowsPerSample = size(x.shape.slice(1, -1));
  const tolerance = rowSumTolerance(x);
  const rows = x.data.length / S;
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    for (let j = 0; j < S; j++) {
      const v = x.data[row * S + j];
      if (v < 0) fail("not-a-distribution", `${name}: ${v} at ${place(x, row * S + j, where)}`);
      sum += v;
    }
    if (mask && !mask.data[Math.floor(row / rowsPerSample) * L + (row % L)]) continue;
    const good = rowSums === "one" ? sum === 0 || Math.abs(sum - 1) <= tolerance : sum <= 1 + tolerance;
    if (!good) fail("not-a-distribution", `${name}: a row sums to ${sum} at ${place(x, row * S, where)}, row ${row % L}`);
  }
  return x;
}

export function checkTemperature(T) {
  if (typeof T !== "number" || !Number.isFinite(T) || T <= 0) fail("argument-value", `temperature: ${T}`); // TEMP-1
  return T;
}

export function oneOf(value, options, name) {
  if (!options.includes(value)) fail("argument-value", `${name}: ${value}`);
  return value;
}
