/**
 * The point nearest to zero in the convex hull of k vectors (ORACLE-4), by Wolfe's active-set method.
 * Least-squares problems are solved by Householder reflections on the vectors themselves, not on their
 * inner products: a minimum near zero would lose half of its digits there.
 */

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

const norm = (a) => Math.sqrt(dot(a, a));

/** In place: Householder QR of `columns` (arrays of equal length); `also` are columns that are transformed along. */
function triangularise(columns, also) {
  const m = (columns[0] ?? also[0]).length;
  for (let c = 0; c < Math.min(columns.length, m); c++) {
    const v = columns[c].slice(c);
    const length = norm(v);
    if (length === 0) continue;
    v[0] += v[0] > 0 ? length : -length;
    const vv = v.reduce((sum, x) => sum + x * x, 0);
    for (const target of [...columns.slice(c), ...also]) {
      let dot = 0;
      for (let i = 0; i < v.length; i++) dot += v[i] * target[c + i];
      const factor = (2 * dot) / vv;
      for (let i = 0; i < v.length; i++) target[c + i] -= factor * v[i];
    }
  }
}

/** Weights with sum one, of any sign, that bring `sum_i y_i U_i` nearest to zero. */
function affineMinimum(vectors) {
  const [base, ...others] = vectors;
  if (others.length === 0) return [1];
  const columns = others.map((u) => u.map((x, i) => x - base[i]));
  const right = base.map((x) => -x);
  triangularise(columns, [right]);
  const n = columns.length;
  const y = new Array(n).fill(0);
  const largest = Math.max(...columns.map((column, c) => Math.abs(column[c] ?? 0)));
  for (let r = Math.min(n, right.length) - 1; r >= 0; r--) {
    let rest = right[r];
    for (let c = r + 1; c < n; c++) rest -= columns[c][r] * y[c];
    y[r] = Math.abs(columns[r][r]) <= 1e-15 * largest ? 0 : rest / columns[r][r];
  }
  return [1 - y.reduce((a, b) => a + b, 0), ...y];
}

function combine(vectors, weights) {
  const x = new Array(vectors[0].length).fill(0);
  vectors.forEach((u, i) => u.forEach((value, e) => (x[e] += weights[i] * value)));
  return x;
}

/**
 * @param {Float64Array[]} vectors the U_i
 * @returns {number[]} weights on the simplex
 */
export function nearestToZero(vectors) {
  const k = vectors.length;
  let points = vectors.map((u) => Array.from(u));
  if (points[0].length > k) {
    triangularise(points, []); // k numbers hold all lengths and angles
    points = points.map((u) => u.slice(0, k));
  }
  const largest = Math.max(...points.map((u) => norm(u)));
  const first = points.reduce((best, u, i) => (norm(u) < norm(points[best]) ? i : best), 0);
  let active = [first];
  let weights = [1];
  let x = points[first];
  for (let step = 0; step < 50 * k; step++) {
    const length = norm(x);
    let next = -1;
    let gap = 1e-14 * length * largest;
    points.forEach((u, j) => {
      const gain = dot(x, x) - dot(x, u);
      if (!active.includes(j) && gain > gap) [next, gap] = [j, gain];
    });
    if (next < 0 || length <= 1e-15 * largest) break;
    let trial = [...active, next];
    let w = [...weights, 0];
    for (;;) {
      const y = affineMinimum(trial.map((i) => points[i]));
      if (y.every((value) => value > 0)) {
        w = y;
        break;
      }
      let theta = 1;
      y.forEach((value, i) => {
        if (value <= 0) theta = Math.min(theta, w[i] / (w[i] - value || 1));
      });
      const mixed = w.map((value, i) => value + theta * (y[i] - value));
      const smallest = Math.min(...mixed.filter((_, i) => y[i] <= 0));
      const keep = mixed.map((value, i) => !(y[i] <= 0 && value <= smallest));
      trial = trial.filter((_, i) => keep[i]);
      w = mixed.filter((_, i) => keep[i]).map((value) => Math.max(value, 0));
      const sum = w.reduce((a, b) => a + b, 0);
      w = w.map((value) => value / sum);
    }
    const moved = combine(trial.map((i) => points[i]), w);
    if (norm(moved) >= length) break; // as near as rounding allows
    [active, weights, x] = [trial, w, moved];
  }
  const result = new Array(k).fill(0);
  active.forEach((i, at) => (result[i] = weights[at]));
  return result;
}
