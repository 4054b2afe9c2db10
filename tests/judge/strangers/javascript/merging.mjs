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
 * The alphas of one pair in one sample: one number, or one a row.
 * `star` is a* before the clip; a degenerate entry has a* = 1/2 (ALPHA-6, ALPHA-7, ALPHA-9, MIX-14).
 */
function pairAlphas(p, q, { L, S, D, counted, rule, per }) {
  const X = sum(p.X, q.X);
  const delta = difference(p.A, q.A);
  const entries = per === "row" ? L : 1;
  const totals = Array.from({ length: entries }, () => ({ nm: 0, mm: 0, scale: 0 }));
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
    const total = totals[per === "row" ? i : 0];
    total.nm += inner(minusN, M);
    total.mm += inner(M, M);
    total.scale += inner(readP, readP) + inner(readQ, readQ);
  }
  return totals.map(({ nm, mm, scale }) => {
    if (mm <= DEGENERATE * scale) return { star: 0.5, alpha: 0.5, degenerate: true };
    const star = nm / mm;
    return { star, alpha: Math.min(1, Math.max(0, star)), degenerate: false };
  });
}

/** Chapter ALPHA. */
export function solve_alpha({
  probs_p,
  probs_q,
  value_outputs_p,
  value_outputs_q,
  query_mask = null,
  rule = "least_squares",
  alpha_per = "map",
  row_sums = "one",
}) {
  oneOf(rule, ["least_squares", "as_printed"], "rule");
  oneOf(alpha_per, ["map", "row"], "alpha_per");
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
  const out = NdArray.zeros(alpha_per === "row" ? [B, L] : [B]);
  const entries = out.data.length / B;
  for (let b = 0; b < B; b++) {
    const [p, q] = [0, 1].map((k) => ({
      A: maps[k].data.subarray(b * L * S, (b + 1) * L * S),
      X: outputs[k].data.subarray(b * S * D, (b + 1) * S * D),
    }));
    const counted = (i) => !mask || mask.data[b * L + i] !== 0;
    const solved = pairAlphas(p, q, { L, S, D, counted, rule, per: alpha_per });
    solved.forEach(({ alpha }, i) => (out.data[b * entries + i] = alpha));
  }
  return out;
}

/** C from the alphas of one sample, each `alphas[round][pair]` a list with one entry, or one a row (MIX-13). */
function composeSample(alphas, plan, Ht, entries) {
  let pool = Array.from({ length: Ht }, (_, t) =>
    Array.from({ length: Ht }, (_, u) => new Float64Array(entries).fill(t === u ? 1 : 0)),
  );
  plan.forEach((round, r) => {
    pool = poolAfter(pool, round, (p, q, pair) =>
      p.map((list, t) => list.map((c, i) => alphas[r][pair][i] * c + (1 - alphas[r][pair][i]) * q[t][i])),
    );
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
  const arrays = alphas.map((a, r) => realArray(a, `alphas of round ${r}`, (axes) => axes === 2 || axes === 3));
  if (!arrays.length) fail("argument-shape", "the empty plan has no alphas to tell the batch");
  checkWeights(arrays);
  const B = arrays[0].shape[0];
  const tail = arrays[0].shape.slice(2);
  arrays.forEach((a, r) => {
    if (`${a.shape}` !== `${[B, plan[r].length, ...tail]}`) fail("argument-shape", `alphas of round ${r}: (${a.shape})`);
  });
  const entries = tail[0] ?? 1;
  const out = NdArray.zeros([B, Hs, Ht, ...tail]);
  for (let b = 0; b < B; b++) {
    const own = arrays.map((a, r) =>
      plan[r].map((_, pair) => {
        const start = (b * plan[r].length + pair) * entries;
        return a.data.subarray(start, start + entries);
      }),
    );
    composeSample(own, plan, Ht, entries).forEach((head, h) =>
      head.forEach((list, t) => out.data.set(list, ((b * Hs + h) * Ht + t) * entries)),
    );
  }
  return out;
}

/** `sum_t C[h,t] A_t` for arrays that were checked before (MIX-3). */
function mixed(probs, mixing) {
  const [B, Ht, L, S] = probs.shape;
  const Hs = mixing.shape[1];
  const perRow = mixing.ndim === 4;
  const out = NdArray.zeros([B, Hs, L, S]);
  for (let b = 0; b < B; b++) {
    for (let h = 0; h < Hs; h++) {
      for (let t = 0; t < Ht; t++) {
        const at = (b * Hs + h) * Ht + t;
        for (let i = 0; i < L; i++) {
          const c = mixing.data[perRow ? at * L + i : at];
          if (c === 0) continue;
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
  const C = realArray(mixing, "mixing", (axes) => axes === 3 || axes === 4);
  const [B, Ht, L] = probs.shape;
  const [Bc, Hs, Htc, ...tail] = C.shape;
  if (Bc !== B || Htc !== Ht || (tail.length && tail[0] !== L)) fail("argument-shape", "mixing does not fit the maps");
  const entries = tail[0] ?? 1;
  const tolerance = rowSumTolerance(C);
  for (let row = 0; row < B * Hs; row++) {
    for (let i = 0; i < entries; i++) {
      let total = 0;
      for (let t = 0; t < Ht; t++) {
        const c = C.data[(row * Ht + t) * entries + i];
        if (c < 0) fail("mixing-invalid", `mixing: ${c}`);
        total += c;
      }
      if (!(Math.abs(total - 1) <= tolerance)) fail("mixing-invalid", `mixing: a row sums to ${total}`);
    }
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
  alpha_per = "map",
  alpha_from = "teacher",
  row_sums = "one",
}) {
  oneOf(strategy, STRATEGIES, "strategy");
  oneOf(alpha_rule, ["least_squares", "as_printed"], "alpha_rule");
  oneOf(alpha_per, ["map", "row"], "alpha_per");
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
  const perRow = alpha_per === "row";
  const entries = perRow ? L : 1;
  const tail = perRow ? [L] : [];
  const solves = strategy === "shd" || strategy === "hard";
  const hasAlphas = solves || strategy === "constant";
  const mixing = NdArray.zeros([B, Hs, Ht, ...tail]);
  const alphas = hasAlphas ? rounds.map((round) => NdArray.zeros([B, round.length, ...tail])) : []; // MIX-11
  let numClipped = 0;
  let numDegenerate = 0;

  for (let b = 0; b < B; b++) {
    const counted = (i) => !mask || mask.data[b * L + i] !== 0;
    let pool = Array.from({ length: Ht }, (_, t) => ({
      A: source.data.subarray((b * Ht + t) * L * S, (b * Ht + t + 1) * L * S),
      X: X.data.subarray((b * Ht + t) * S * D, (b * Ht + t + 1) * S * D),
    }));
    let weights; // [student head][teacher head] = a list with one weight, or one a row
    if (hasAlphas) {
      const own = rounds.map((round, r) => {
        const solved = round.map(([p, q], pair) => {
          let list = new Array(entries).fill(0.5);
          if (solves) {
            const results = pairAlphas(pool[p], pool[q], { L, S, D, counted, rule: alpha_rule, per: alpha_per });
            results.forEach(({ star, degenerate }, i) => {
              if (perRow && !counted(i)) return; // ALPHA-9: enters no count
              if (degenerate) numDegenerate++;
              else if (strategy === "shd" && (star < 0 || star > 1)) numClipped++; // ALPHA-5, MIX-9
            });
            list = results.map(({ star, alpha }) => (strategy === "hard" ? Number(star >= 0.5) : alpha)); // MIX-5
          }
          alphas[r].data.set(list, (b * round.length + pair) * entries);
          return list;
        });
        pool = poolAfter(pool, round, (p, q, pair) => ({ A: mergedMap(p.A, q.A, solved[pair], L, S), X: sum(p.X, q.X) })); // MIX-4
        return solved;
      });
      weights = composeSample(own, rounds, Ht, entries);
    } else {
      weights = groups.map(() => Array.from({ length: Ht }, () => new Float64Array(entries).fill(1 / Ht))); // MIX-6
    }
    weights.forEach((head, h) => head.forEach((list, t) => mixing.data.set(list, ((b * Hs + h) * Ht + t) * entries)));
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

function mergedMap(Ap, Aq, list, L, S) {
  const out = new Float64Array(L * S);
  for (let i = 0; i < L; i++) {
    const a = list.length === 1 ? list[0] : list[i];
    for (let j = i * S; j < (i + 1) * S; j++) out[j] = a * Ap[j] + (1 - a) * Aq[j];
  }
  return out;
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
export function gram_tensor({
  teacher_probs,
  values,
  output_projection,
  query_mask = null,
  alpha_per = "map",
  row_sums = "one",
}) {
  oneOf(alpha_per, ["map", "row"], "alpha_per");
  checkRowSums(row_sums);
  const probs = realArray(teacher_probs, "teacher_probs", 4);
  const [B, H, L, S] = probs.shape;
  const v = realArray(values, "values", 4);
  if (v.shape[0] !== B || v.shape[2] !== S) fail("argument-shape", "values do not fit the maps"); // GRAM-6
  const X = value_outputs({ values, output_projection }, H);
  const D = X.shape[3];
  const mask = rowMask(query_mask, "query_mask", B, L);
  checkedProbs(probs, "teacher_probs", 4, { rowSums: row_sums, mask });
  const perRow = alpha_per === "row";
  const out = NdArray.zeros(perRow ? [B, H, H, H, H, L] : [B, H, H, H, H]);
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
            if (perRow) out.data[(b * n * n + at) * L + i] = product;
            else out.data[b * n * n + at] += product;
          }
        }
      }
    }
  }
  return out;
}

function checkedGram(gram, p, q) {
  const G = realArray(gram, "gram", (axes) => axes === 5 || axes === 6);
  const [, H, ...rest] = G.shape;
  if (rest.slice(0, 3).some((n) => n !== H)) fail("argument-shape", `gram: (${G.shape})`);
  const good = [p, q].every((x) => isInteger(x) && x >= 0 && x < H) && p !== q;
  if (!good) fail("argument-value", `p and q are two different positions from 0 to ${H - 1}`); // GRAM-6
  return G;
}

/** GRAM-2, GRAM-3, GRAM-7. */
export function solve_alpha_from_gram({ gram, p, q }) {
  const G = checkedGram(gram, p, q);
  const [B, H] = G.shape;
  const tail = G.shape.slice(5);
  const entries = tail[0] ?? 1;
  const out = NdArray.zeros([B, ...tail]);
  for (let b = 0; b < B; b++) {
    for (let e = 0; e < entries; e++) {
      const at = (i, j, k, l) => G.data[((((b * H + i) * H + j) * H + k) * H + l) * entries + e];
      const g = (j, l) => at(p, j, p, l) - at(p, j, q, l) - at(q, j, p, l) + at(q, j, q, l);
      let scale = 0;
      for (const i of [p, q]) for (const j of [p, q]) for (const l of [p, q]) scale += at(i, j, i, l);
      const bottom = g(p, p) + 2 * g(p, q) + g(q, q);
      const degenerate = !(bottom > 0) || bottom <= DEGENERATE * scale;
      const alpha = degenerate ? 0.5 : (g(p, p) + g(p, q)) / bottom;
      out.data[b * entries + e] = Math.min(1, Math.max(0, alpha));
    }
  }
  return out;
}

/** GRAM-4. */
export function merge_gram({ gram, p, q, alpha }) {
  const G = checkedGram(gram, p, q);
  const [B, H] = G.shape;
  const tail = G.shape.slice(5);
  const entries = tail[0] ?? 1;
  const weights = realArray(alpha, "alpha", () => true);
  if (`${weights.shape}` !== `${[B, ...tail]}` || weights.ndim !== 1 + tail.length) {
    fail("argument-shape", `alpha: (${weights.shape}) does not fit the gram tensor`);
  }
  checkWeights([weights]);
  const others = Array.from({ length: H }, (_, i) => i).filter((i) => i !== p && i !== q);
  const n = H - 1;
  const out = NdArray.zeros([B, n, n, n, n, ...tail]);
  for (let b = 0; b < B; b++) {
    for (let e = 0; e < entries; e++) {
      const a = weights.data[b * entries + e];
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
                    for (const [ol] of asOutput[l]) {
                      total += wi * wk * G.data[((((b * H + oi) * H + oj) * H + ok) * H + ol) * entries + e];
                    }
                  }
                }
              }
              out.data[((((b * n + i) * n + j) * n + k) * n + l) * entries + e] = total;
            }
          }
        }
      }
    }
  }
  return out;
}
