/** Chapter ORACLE: the best that any merge could do. */
import { DEGENERATE, NdArray, fail } from "./arrays.mjs";
import { STRATEGIES, difference, inner, readRow, squeeze_heads, sum } from "./merging.mjs";
import { plan_groups } from "./plans.mjs";
import { nearestToZero } from "./simplex.mjs";

/** Orthonormal vectors that span the rows of X' (S x D), the longest remainder first. */
function rowSpace(X, S, D) {
  const rests = Array.from({ length: S }, (_, j) => X.slice(j * D, (j + 1) * D));
  const largest = Math.sqrt(Math.max(...rests.map((row) => inner(row, row))));
  const basis = [];
  while (basis.length < Math.min(S, D)) {
    const longest = rests.reduce((a, b) => (inner(b, b) > inner(a, a) ? b : a));
    const length = Math.sqrt(inner(longest, longest));
    if (length <= 1e-13 * largest) break;
    const unit = without(longest.map((x) => x / length), basis);
    const again = Math.sqrt(inner(unit, unit));
    basis.push(unit.map((x) => x / again));
    rests.forEach((row) => row.set(without(row, [basis.at(-1)])));
  }
  return basis;
}

/** A vector without its parts along orthonormal ones. */
function without(vector, basis) {
  let rest = Float64Array.from(vector);
  for (let pass = 0; pass < 2; pass++) {
    for (const unit of basis) {
      const along = inner(rest, unit);
      rest = rest.map((x, i) => x - along * unit[i]);
    }
  }
  return rest;
}

/** ORACLE-3 for one row: the smallest `||a X' - o||^2`. */
function stochasticError(X, keys, o, D, rowSums) {
  if (keys.length === 0) return inner(o, o);
  const rows = keys.map((j) => X.slice(j * D, (j + 1) * D));
  const length = (x) => Math.sqrt(inner(x, x));
  if (rowSums === "at_most_one" && length(o) === 0) return 0;
  // With a sink, o may be far smaller than X': then weights that sum to less are looked for at its scale first.
  let most = rowSums === "at_most_one" ? Math.min(1, (4 * length(o)) / Math.max(...rows.map(length), 1e-300)) : 1;
  for (;;) {
    const points = rows.map((row) => difference(row.map((x) => most * x), o));
    if (rowSums === "at_most_one") points.push(o.map((x) => -x)); // a sink is one more key
    const weights = nearestToZero(points);
    const off = points.map((p, i) => p.map((x) => x * weights[i])).reduce(sum);
    if (most === 1 || weights.at(-1) > 1e-9) return inner(off, off);
    most = Math.min(1, 16 * most);
  }
}

/** ORACLE-1: from the sums of squares of one sample. */
function headResidual(error, whole) {
  return whole > 0 ? Math.sqrt(error / whole) : error > 0 ? Infinity : 0;
}

/** ORACLE-6. */
function ratio(a, b) {
  const isZero = (x) => x * x <= DEGENERATE;
  if (isZero(b)) return isZero(a) ? 1 : Infinity;
  if (a === Infinity && b === Infinity) return 1;
  return isZero(a) ? 0 : a / b;
}

const vector = (list) => new NdArray([list.length], Float64Array.from(list));

/** ORACLE-1 to ORACLE-7. */
export function diagnose({
  teacher_probs,
  value_outputs,
  num_student_heads,
  plan = "progressive",
  strategies = STRATEGIES,
  query_mask = null,
  row_sums = "one",
}) {
  if (!Array.isArray(strategies)) fail("argument-value", "strategies: a list of names is needed");
  const squeeze = (strategy) =>
    squeeze_heads({ teacher_probs, value_outputs, num_student_heads, plan, strategy, query_mask, row_sums });
  const checked = squeeze("constant"); // checks all arguments, and gives the plan
  const results = strategies.map((name) => [name, squeeze(name)]);
  const groups = plan_groups({ plan: checked.plan, num_teacher_heads: teacher_probs.shape[1] });
  const [B, Ht, L, S] = teacher_probs.shape;
  const D = value_outputs.shape[3];
  const unconstrained = [];
  const stochastic = [];
  const merged = results.map(() => []);
  for (let b = 0; b < B; b++) {
    const rows = Array.from({ length: L }, (_, i) => i).filter((i) => !query_mask || query_mask.data[b * L + i] !== 0);
    const outputs = (t) => value_outputs.data.subarray((b * Ht + t) * S * D, (b * Ht + t + 1) * S * D);
    const allowed = rows.map((i) =>
      Array.from({ length: S }, (_, j) => j).filter((j) =>
        Array.from({ length: Ht }, (_, t) => teacher_probs.data[((b * Ht + t) * L + i) * S + j]).some((a) => a > 0),
      ),
    );
    let whole = 0;
    let free = 0;
    let onSimplex = 0;
    const errors = results.map(() => 0);
    groups.forEach((group, h) => {
      const X = group.map(outputs).reduce(sum);
      const basis = rowSpace(X, S, D);
      rows.forEach((i, r) => {
        const o = group.map((t) => readRow(teacher_probs.data, (b * Ht + t) * L + i, S, outputs(t), D)).reduce(sum);
        const rest = without(o, basis); // o - o X'^+ X' (ORACLE-2)
        whole += inner(o, o);
        free += inner(rest, rest);
        onSimplex += stochasticError(X, allowed[r], o, D, row_sums);
        results.forEach(([, { probs }], s) => {
          const off = difference(readRow(probs.data, (b * groups.length + h) * L + i, S, X, D), o);
          errors[s] += inner(off, off);
        });
      });
    });
    unconstrained.push(headResidual(free, whole));
    stochastic.push(headResidual(onSimplex, whole));
    errors.forEach((error, s) => merged[s].push(headResidual(error, whole)));
  }
  const report = {};
  results.forEach(([name, { residual }], s) => {
    report[name] = {
      residual,
      head_residual: vector(merged[s]),
      over_unconstrained: vector(merged[s].map((x, b) => ratio(x, unconstrained[b]))),
      over_stochastic: vector(merged[s].map((x, b) => ratio(x, stochastic[b]))),
    };
  });
  return { plan: checked.plan, unconstrained: vector(unconstrained), stochastic: vector(stochastic), strategies: report };
}
