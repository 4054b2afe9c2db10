/** Chapters ALPHA, MIX and GRAM: the weights of merged heads and what they make. */
import {
  DEGENERATE,
  NdArray,
  checkRowSums,
  checkTemperature,
  checkedProbs,
  fail,
  isInteger,
  oneOf,
  realArray,
  rowMask,
  rowSumTolerance,
} from "./arrays.mjs";
import { softened, value_outputs } from "./maps.mjs";
import { checkRounds, plan_groups, poolAfter, resolvePlan } from "./plans.mjs";

/** One row of a map times the value outputs: `sum_j a_j X_j`. */
export function readRow(map, i, S, X, D) {
  const out = new Float64Array(D);
  for (let j = 0; j < S; j++) {
    const a = map[i * S + j];
    if (a === 0) continue;
    for (let c = 0; c < D; c++) out[c] += a * X[j * D + c];
  }
  return out;
}

export const difference = (a, b) => a.map((x, i) => x - b[i]);
export const sum = (a, b) => a.map((x, i) => x + b[i]);

export function inner(a, b) {
  let total = 0;
  for (let i = 0; i < a.length; i++) total += a[i] * b[i];
  return total;
}

/**
 * The alpha of one pair in one sample.
 * `star` is a* before the clip; a degenerate pair has a* = 1/2 (ALPHA-6, ALPHA-7, MIX-14).
 */
function pairAlpha(p, q, { L, S, D, counted, rule }) {
  const X = sum(p.X, q.X);
  const delta = difference(p.A, q.A);
  let nm = 0;
  let mm = 0;
  let scale = 0;
  for (let i = 0; i < L; i++) {
    if (!counted(i)) continue;
    const M = readRow(delta, i, S, X, D);
    // -N: least squares reads delta with X_p, the printed form A_p X_q - A_q X_p (ALPHA-4)
    const minusN =
      rule === "least_squares"
        ? readRow(delta, i, S, p.X, D)
        : difference(readRow(p.A, i, S, q.X, D), readRow(q.A, i, S, p.X, D));
    const readP = readRow(p.A, i, S, X, D);
    const readQ = readRow(q.A, i, S, X, D);
    nm += inner(minusN, M);
    mm += inner(M, M);
    scale += inner(readP, readP) + inner(readQ, readQ);
  }
  if (mm <= DEGENERATE * scale) return { star: 0.5, alpha: 0.5, degenerate: true };
  const star = nm / mm;
  return { star, alpha: Math.min(1, Math.max(0, star)), degenerate: false };
}

/** Chapter ALPHA. */
export function solve_alpha({
  probs_p,
  probs_q,
  value_outputs_p,
  value_outputs_q,
  query_mask = null,
  rule = "least_squares",
  row_sums = "one",
}) {
  oneOf(rule, ["least_squares", "as_printed"], "rule");
  checkRowSums(row_sums);
  const maps = [realArray(probs_p, "probs_p", 3), realArray(probs_q, "probs_q", 3)];
  const outputs = [realArray(value_outputs_p, "value_outputs_p", 3), realArray(value_outputs_q, "value_outputs_q", 3)];
  const [B, L, S] = maps[0].shape;
  const D = outputs[0].shape[2];
  if (`${maps[1].shape}` !== `${[B, L, S]}` || outputs.some((x) => `${x.shape}` !== `${[B, S, D]}`)) {
    fail("argument-shape", "maps (B, L, S) and value outputs (B, S, D) that agree are needed"); // ALPHA-1
  }
  const mask = rowMask(query_mask, "query_mask", B, L);
  maps.forEach((map, i) => checkedProbs(map, i ? "probs_q" : "probs_p", 3, { rowSums: row_sums, mask }));
  const out = NdArray.zeros([B]);
  for (let b = 0; b < B; b++) {
    const [p, q] = [0, 1].map((k) => ({
      A: maps[k].data.subarray(b * L * S, (b + 1) * L * S),
      X: outputs[k].data.subarray(b * S * D, (b + 1) * S * D),
    }));
    const counted = (i) => !mask || mask.data[b * L + i] !== 0;
    out.data[b] = pairAlpha(p, q, { L, S, D, counted, rule }).alpha;
  }
  return out;
}

/** C from the alphas of one sample, `alphas[round][pair]` (MIX-13). */
function composeSample(alphas, plan, Ht) {
  let pool = Array.from({ length: Ht }, (_, t) => Array.from({ length: Ht }, (_, u) => Number(t === u)));
  plan.forEach((round, r) => {
    pool = poolAfter(pool, round, (p, q, pair) => p.map((c, t) => alphas[r][pair] * c + (1 - alphas[r][pair]) * q[t]));
  });
  return pool;
}

/** Merge weights lie in [0, 1] (MIX-13, GRAM-6). */
function checkWeights(arrays) {
  if (arrays.some((a) => a.data.some((x) => x < 0 || x > 1))) fail("mixing-invalid", "an alpha lies outside [0, 1]");
}

/** MIX-13. An empty plan has no alphas, and so no batch size: it is refused. */
export function compose_mixing({ alphas, plan, num_teacher_heads: Ht }) {
  if (!isInteger(Ht) || Ht < 1) fail("argument-value", "num_teacher_heads is an integer of at least 1");
  const Hs = checkRounds(plan, Ht);
  if (!Array.isArray(alphas) || alphas.length !== plan.length) fail("argument-shape", "alphas: one array a round");
  const arrays = alphas.map((a, r) => realArray(a, `alphas of round ${r}`, 2));
  if (!arrays.length) fail("argument-shape", "the empty plan has no alphas to tell the batch");
  checkWeights(arrays);
  const B = arrays[0].shape[0];
  arrays.forEach((a, r) => {
    if (`${a.shape}` !== `${[B, plan[r].length]}`) fail("argument-shape", `alphas of round ${r}: (${a.shape})`);
  });
  const out = NdArray.zeros([B, Hs, Ht]);
  for (let b = 0; b < B; b++) {
    const own = arrays.map((a, r) => plan[r].map((_, pair) => a.data[b * plan[r].length + pair]));
    composeSample(own, plan, Ht).forEach((head, h) => out.data.set(head, (b * Hs + h) * Ht));
  }
  return out;
}

/** `sum_t C[h,t] A_t` for arrays that were checked before (MIX-3). */
function mixed(probs, mixing) {
  const [B, Ht, L, S] = probs.shape;
  const Hs = mixing.shape[1];
  const out = NdArray.zeros([B, Hs, L, S]);
  for (let b = 0; b < B; b++) {
    for (let h = 0; h < Hs; h++) {
      for (let t = 0; t < Ht; t++) {
        const c = mixing.data[(b * Hs + h) * Ht + t];
        if (c === 0) continue;
        for (let i = 0; i < L; i++) {
          const from = ((b * Ht + t) * L + i) * S;
          const to = ((b * Hs + h) * L + i) * S;
          for (let j = 0; j < S; j++) out.data[to + j] += c * probs.data[from + j];
        }
      }
    }
  }
  return out;
}

/** MIX-3. It has no `row_sums`, so rows may sum to at most one here: sinks are read as they are. */
export function mix_heads({ teacher_probs, mixing }) {
  const probs = checkedProbs(teacher_probs, "teacher_probs", 4, { rowSums: "at_most_one" });
  const C = realArray(mixing, "mixing", 3);
  const [B, Ht] = probs.shape;
  const [Bc, Hs, Htc] = C.shape;
  if (Bc !== B || Htc !== Ht) fail("argument-shape", "mixing does not fit the maps");
  const tolerance = rowSumTolerance(C);
  for (let row = 0; row < B * Hs; row++) {
    let total = 0;
    for (let t = 0; t < Ht; t++) {
      const c = C.data[row * Ht + t];
      if (c < 0) fail("mixing-invalid", `mixing: ${c}`);
      total += c;
    }
    if (!(Math.abs(total - 1) <= tolerance)) fail("mixing-invalid", `mixing: a row sums to ${total}`);
  }
  return mixed(probs, C);
}

export const STRATEGIES = ["shd", "constant", "hard", "mean"];

/** Chapter MIX. */
export function squeeze_heads({
  teacher_probs,
  value_outputs: outputs,
  num_student_heads,
  plan = "progressive",
  strategy = "shd",
  query_mask = null,
  temperature = 1,
  alpha_rule = "least_squares",
  alpha_from = "teacher",
  row_sums = "one",
}) {
  oneOf(strategy, STRATEGIES, "strategy");
  oneOf(alpha_rule, ["least_squares", "as_printed"], "alpha_rule");
  oneOf(alpha_from, ["teacher", "softened"], "alpha_from");
  checkRowSums(row_sums);
  checkTemperature(temperature);
  const probs = realArray(teacher_probs, "teacher_probs", 4);
  const [B, Ht, L, S] = probs.shape;
  const X = realArray(outputs, "value_outputs", 4);
  const D = X.shape[3];
  if (`${X.shape}` !== `${[B, Ht, S, D]}`) fail("argument-shape", "value_outputs (B, H_t, S, D) do not fit the maps"); // MIX-1
  const mask = rowMask(query_mask, "query_mask", B, L);
  checkedProbs(probs, "teacher_probs", 4, { rowSums: row_sums, mask });
  const rounds = resolvePlan(plan, Ht, num_student_heads);
  const groups = plan_groups({ plan: rounds, num_teacher_heads: Ht });
  const Hs = groups.length;

  const soft = softened(probs, temperature, row_sums); // TEMP-3
  const source = alpha_from === "softened" ? soft : probs;
  const solves = strategy === "shd" || strategy === "hard";
  const hasAlphas = solves || strategy === "constant";
  const mixing = NdArray.zeros([B, Hs, Ht]);
  const alphas = hasAlphas ? rounds.map((round) => NdArray.zeros([B, round.length])) : []; // MIX-11
  let numClipped = 0;
  let numDegenerate = 0;

  for (let b = 0; b < B; b++) {
    const counted = (i) => !mask || mask.data[b * L + i] !== 0;
    let pool = Array.from({ length: Ht }, (_, t) => ({
      A: source.data.subarray((b * Ht + t) * L * S, (b * Ht + t + 1) * L * S),
      X: X.data.subarray((b * Ht + t) * S * D, (b * Ht + t + 1) * S * D),
    }));
    let weights; // [student head][teacher head]
    if (hasAlphas) {
      const own = rounds.map((round, r) => {
        const solved = round.map(([p, q], pair) => {
          let weight = 0.5;
          if (solves) {
            const { star, alpha, degenerate } = pairAlpha(pool[p], pool[q], { L, S, D, counted, rule: alpha_rule });
            if (degenerate) numDegenerate++;
            else if (strategy === "shd" && (star < 0 || star > 1)) numClipped++; // ALPHA-5, MIX-9
            weight = strategy === "hard" ? Number(star >= 0.5) : alpha; // MIX-5
          }
          alphas[r].data[b * round.length + pair] = weight;
          return weight;
        });
        pool = poolAfter(pool, round, (p, q, pair) => ({ A: p.A.map((x, i) => solved[pair] * x + (1 - solved[pair]) * q.A[i]), X: sum(p.X, q.X) })); // MIX-4
        return solved;
      });
      weights = composeSample(own, rounds, Ht);
    } else {
      weights = groups.map(() => new Array(Ht).fill(1 / Ht)); // MIX-6
    }
    weights.forEach((head, h) => mixing.data.set(head, (b * Hs + h) * Ht));
  }

  return {
    probs: mixed(soft, mixing),
    mixing,
    alphas,
    residual: residual(probs, X, mixing, groups, mask),
    num_clipped: numClipped,
    num_degenerate: numDegenerate,
    plan: rounds,
  };
}

/** MIX-8. */
function residual(probs, outputs, mixing, groups, mask) {
  const [B, Ht, L, S] = probs.shape;
  const D = outputs.shape[3];
  const merged = mixed(probs, mixing);
  const Hs = groups.length;
  const out = NdArray.zeros([B]);
  for (let b = 0; b < B; b++) {
    const X = (t) => outputs.data.subarray((b * Ht + t) * S * D, (b * Ht + t + 1) * S * D);
    const groupX = groups.map((group) => group.map(X).reduce(sum));
    let error = 0;
    let whole = 0;
    for (let i = 0; i < L; i++) {
      if (mask && !mask.data[b * L + i]) continue;
      let O = new Float64Array(D);
      for (let t = 0; t < Ht; t++) O = sum(O, readRow(probs.data, (b * Ht + t) * L + i, S, X(t), D));
      let got = new Float64Array(D);
      for (let h = 0; h < Hs; h++) got = sum(got, readRow(merged.data, (b * Hs + h) * L + i, S, groupX[h], D));
      const off = difference(got, O);
      error += inner(off, off);
      whole += inner(O, O);
    }
    out.data[b] = whole > 0 ? Math.sqrt(error) / Math.sqrt(whole) : error > 0 ? Infinity : 0;
  }
  return out;
}

/** GRAM-1, from the products `<A_i X_j, A_k X_l>`. */
export function gram_tensor({ teacher_probs, values, output_projection, query_mask = null, row_sums = "one" }) {
  checkRowSums(row_sums);
  const probs = realArray(teacher_probs, "teacher_probs", 4);
  const [B, H, L, S] = probs.shape;
  const v = realArray(values, "values", 4);
  if (v.shape[0] !== B || v.shape[2] !== S) fail("argument-shape", "values do not fit the maps"); // GRAM-6
  const X = value_outputs({ values, output_projection }, H);
  const D = X.shape[3];
  const mask = rowMask(query_mask, "query_mask", B, L);
  checkedProbs(probs, "teacher_probs", 4, { rowSums: row_sums, mask });
  const out = NdArray.zeros([B, H, H, H, H]);
  const n = H * H;
  for (let b = 0; b < B; b++) {
    for (let i = 0; i < L; i++) {
      if (mask && !mask.data[b * L + i]) continue;
      const reads = []; // A_i X_j at i * H + j
      for (let map = 0; map < H; map++) {
        for (let head = 0; head < H; head++) {
          const own = X.data.subarray((b * H + head) * S * D, (b * H + head + 1) * S * D);
          reads.push(readRow(probs.data, (b * H + map) * L + i, S, own, D));
        }
      }
      for (let x = 0; x < n; x++) {
        for (let y = x; y < n; y++) {
          const product = inner(reads[x], reads[y]);
          for (const at of x === y ? [x * n + y] : [x * n + y, y * n + x]) {
            out.data[b * n * n + at] += product;
          }
        }
      }
    }
  }
  return out;
}

function checkedGram(gram, p, q) {
  const G = realArray(gram, "gram", 5);
  const [, H, ...rest] = G.shape;
  if (rest.some((n) => n !== H)) fail("argument-shape", `gram: (${G.shape})`);
  const good = [p, q].every((x) => isInteger(x) && x >= 0 && x < H) && p !== q;
  if (!good) fail("argument-value", `p and q are two different positions from 0 to ${H - 1}`); // GRAM-6
  return G;
}

/** GRAM-2, GRAM-3, GRAM-7. */
export function solve_alpha_from_gram({ gram, p, q }) {
  const G = checkedGram(gram, p, q);
  const [B, H] = G.shape;
  const out = NdArray.zeros([B]);
  for (let b = 0; b < B; b++) {
    const at = (i, j, k, l) => G.data[(((b * H + i) * H + j) * H + k) * H + l];
    const g = (j, l) => at(p, j, p, l) - at(p, j, q, l) - at(q, j, p, l) + at(q, j, q, l);
    let scale = 0;
    for (const i of [p, q]) for (const j of [p, q]) for (const l of [p, q]) scale += at(i, j, i, l);
    const bottom = g(p, p) + 2 * g(p, q) + g(q, q);
    const degenerate = !(bottom > 0) || bottom <= DEGENERATE * scale;
    const alpha = degenerate ? 0.5 : (g(p, p) + g(p, q)) / bottom;
    out.data[b] = Math.min(1, Math.max(0, alpha));
  }
  return out;
}

/** GRAM-4. */
export function merge_gram({ gram, p, q, alpha }) {
  const G = checkedGram(gram, p, q);
  const [B, H] = G.shape;
  const weights = realArray(alpha, "alpha", 1);
  if (weights.shape[0] !== B) fail("argument-shape", `alpha: (${weights.shape}) does not fit the gram tensor`);
  checkWeights([weights]);
  const others = Array.from({ length: H }, (_, i) => i).filter((i) => i !== p && i !== q);
  const n = H - 1;
  const out = NdArray.zeros([B, n, n, n, n]);
  for (let b = 0; b < B; b++) {
    const a = weights.data[b];
    // The parts of each new position along an axis: [old position, weight]
    const asMap = [[[p, a], [q, 1 - a]], ...others.map((i) => [[i, 1]])];
    const asOutput = [[[p, 1], [q, 1]], ...others.map((i) => [[i, 1]])];
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        for (let k = 0; k < n; k++) {
          for (let l = 0; l < n; l++) {
            let total = 0;
            for (const [oi, wi] of asMap[i]) {
              for (const [oj] of asOutput[j]) {
                for (const [ok, wk] of asMap[k]) {
                  for (const [ol] of asOutput[l]) total += wi * wk * G.data[(((b * H + oi) * H + oj) * H + ok) * H + ol];
                }
              }
            }
            out.data[(((b * n + i) * n + j) * n + k) * n + l] = total;
          }
        }
      }
    }
  }
  return out;
}
