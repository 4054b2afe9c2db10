/** Chapters LOSS and GRAD. */
import { NdArray, checkRowSums, checkTemperature, checkedProbs, fail, oneOf, realArray, rowMask, spreadMask } from "./arrays.mjs";
import { softmaxRow } from "./maps.mjs";

/** Supervision and logits as two equally long lists of layers (LOSS-3). */
function layersOf(supervision, logits) {
  const isList = Array.isArray(supervision);
  if (isList !== Array.isArray(logits)) fail("argument-shape", "supervision and logits: two arrays or two lists of layers");
  if (!isList) return [[supervision, logits]];
  if (supervision.length === 0 || supervision.length !== logits.length) {
    fail("argument-shape", "supervision and logits: lists of the same length are needed");
  }
  return supervision.map((layer, i) => [layer, logits[i]]);
}

/** The arrays of one layer, checked; all later steps read these. */
function checkedLayer([supervision, logits], index, { loss_mask, attn_mask, row_sums }) {
  const where = `layer ${index}`;
  const a = realArray(supervision, "supervision", 4, { where });
  const z = realArray(logits, "student_logits", 4, { logits: true, where });
  if (`${a.shape}` !== `${z.shape}`) fail("argument-shape", `${where}: supervision (${a.shape}) and logits (${z.shape})`);
  const [B, , L] = a.shape;
  const mask = rowMask(loss_mask, "loss_mask", B, L);
  checkedProbs(a, "supervision", 4, { rowSums: row_sums, mask, where });
  const allowed = spreadMask(attn_mask, z.shape);
  return { a, z, mask, allowed, index };
}

/** LOSS-15 for one checked layer. */
function intersected({ a, z, allowed }) {
  const [B, H, L, S] = a.shape;
  const out = new NdArray(a.shape, Float64Array.from(a.data));
  const dropped = NdArray.zeros([B, H, L]);
  for (let row = 0; row < B * H * L; row++) {
    let kept = 0;
    let lost = 0;
    const open = (j) => z.data[j] !== -Infinity && (!allowed || allowed[j]);
    for (let j = row * S; j < (row + 1) * S; j++) {
      if (open(j)) kept += a.data[j];
      else lost += a.data[j];
    }
    dropped.data[row] = lost;
    if (lost === 0) continue;
    for (let j = row * S; j < (row + 1) * S; j++) {
      out.data[j] = open(j) && a.data[j] > 0 ? (a.data[j] / kept) * (kept + lost) : 0;
    }
  }
  return { supervision: out, dropped };
}

/** LOSS-15. */
export function intersect_support({ supervision, student_logits, loss_mask = null, attn_mask = null, row_sums = "one" }) {
  checkRowSums(row_sums);
  return intersected(checkedLayer([supervision, student_logits], 0, { loss_mask, attn_mask, row_sums }));
}

const DIVERGENCES = ["kl", "reverse_kl", "js", "mse"];

/**
 * Goes through the rows that count, layer by layer. `visit` gets P, Q and log Q of the row (arrays of length S),
 * its mass `rho`, its number of rows in the map `n`, and where it lies (LOSS-4, LOSS-6, LOSS-10, LOSS-13, LOSS-16).
 */
function countedRows(layers, options, visit) {
  const { temperature, divergence, support, row_sums } = options;
  for (const layer of layers) {
    if (support === "intersect") layer.a = intersected(layer).supervision; // LOSS-14
    const { a, z, mask, allowed, index } = layer;
    const [B, H, L, S] = a.shape;
    const isCounted = (b, h, i) => {
      if (mask && !mask.data[b * L + i]) return false;
      const start = ((b * H + h) * L + i) * S;
      for (let j = start; j < start + S; j++) if (a.data[j] !== 0) return true;
      return false;
    };
    const probs = new Float64Array(z.data.length);
    const logs = new Float64Array(z.data.length);
    for (let h = 0; h < H; h++) {
      const rows = [];
      for (let b = 0; b < B; b++) for (let i = 0; i < L; i++) if (isCounted(b, h, i)) rows.push([b, i]);
      for (const [b, i] of rows) {
        const start = ((b * H + h) * L + i) * S;
        for (let j = start; j < start + S; j++) {
          const open = z.data[j] !== -Infinity && (!allowed || allowed[j]);
          const mass = a.data[j] > 0;
          if ((mass && !open) || (divergence === "reverse_kl" && !mass && open)) {
            const place = `layer ${index}, sample ${b}, head ${h}, row ${i}, key ${j - start}`;
            fail("support-mismatch", `${mass ? "teacher mass off the student's support" : "no teacher mass"} at ${place}`);
          }
        }
        softmaxRow(z.data, allowed, start, S, temperature, probs, logs);
        const row = a.data.subarray(start, start + S);
        const rho = row_sums === "one" ? 1 : row.reduce((total, x) => total + x, 0);
        const P = row_sums === "one" ? row : row.map((x) => x / rho);
        const Q = probs.subarray(start, start + S);
        visit({ P, Q, logQ: logs.subarray(start, start + S), rho, n: rows.length, layer, head: h, start });
      }
    }
  }
}

/** The divergences of LOSS-11; a term whose leading factor is 0 is 0 (LOSS-12). */
function divergenceOf(name, P, Q, logQ) {
  let total = 0;
  for (let j = 0; j < P.length; j++) {
    const [p, q] = [P[j], Q[j]];
    if (name === "kl") {
      if (p > 0) total += p * (Math.log(p) - logQ[j]);
    } else if (name === "reverse_kl") {
      if (q > 0) total += q * (logQ[j] - Math.log(p));
    } else if (name === "js") {
      const logR = Math.log(p + q) - Math.LN2; // half of the smallest number is 0
      if (p > 0) total += 0.5 * p * (Math.log(p) - logR);
      if (q > 0) total += 0.5 * q * (logQ[j] - logR);
    } else {
      total += (p - q) * (p - q);
    }
  }
  return total;
}

/** The gradient of a row's divergence with respect to z / T (GRAD-1). */
function rowGradient(name, P, Q, logQ) {
  if (name === "kl") {
    const s = P.reduce((total, p) => total + p, 0);
    return Q.map((q, j) => s * q - P[j]);
  }
  const factor = { reverse_kl: 1, js: 0.5, mse: 2 }[name];
  const r = Q.map((q, j) => {
    if (q === 0) return 0; // a product with Q_j = 0 is 0
    if (name === "reverse_kl") return logQ[j] - Math.log(P[j]);
    if (name === "js") return logQ[j] - Math.log(P[j] + q) + Math.LN2;
    return q - P[j];
  });
  const mean = Q.reduce((total, q, j) => total + q * r[j], 0);
  return Q.map((q, j) => (q === 0 ? 0 : factor * q * (r[j] - mean)));
}

function checkedOptions({
  beta = 1,
  loss_mask = null,
  attn_mask = null,
  temperature = 1,
  reduction = "sum",
  divergence = "kl",
  support = "error",
  row_sums = "one",
}) {
  if (typeof beta !== "number" || !Number.isFinite(beta) || beta < 0) fail("argument-value", `beta: ${beta}`); // LOSS-2
  checkTemperature(temperature);
  oneOf(reduction, ["sum", "mean"], "reduction");
  oneOf(divergence, DIVERGENCES, "divergence");
  oneOf(support, ["error", "intersect"], "support");
  checkRowSums(row_sums);
  return { beta, loss_mask, attn_mask, temperature, reduction, divergence, support, row_sums };
}

/** LOSS-5, LOSS-18. */
function numberOfMaps(layers, reduction) {
  return reduction === "sum" ? 1 : layers.reduce((total, { a }) => total + a.shape[1], 0);
}

/** Chapter LOSS. */
export function shd_loss({ supervision, student_logits, ...keywords }) {
  const options = checkedOptions(keywords);
  const layers = layersOf(supervision, student_logits).map((pair, i) => checkedLayer(pair, i, options));
  let total = 0;
  countedRows(layers, options, ({ P, Q, logQ, rho, n }) => {
    total += (rho * divergenceOf(options.divergence, P, Q, logQ)) / n;
  });
  return (options.beta * total) / numberOfMaps(layers, options.reduction);
}

/** Chapter GRAD: dz of checked layers, one array a layer. */
function gradients(layers, options) {
  const { beta, temperature, divergence } = options;
  const maps = numberOfMaps(layers, options.reduction);
  for (const layer of layers) layer.dz = NdArray.zeros(layer.z.shape);
  countedRows(layers, options, ({ P, Q, logQ, rho, n, layer, start }) => {
    const { z, allowed, dz } = layer;
    const w = beta / (n * temperature * maps);
    rowGradient(divergence, P, Q, logQ).forEach((g, j) => {
      const open = z.data[start + j] !== -Infinity && (!allowed || allowed[start + j]);
      if (open) dz.data[start + j] = w * rho * g; // GRAD-3
    });
  });
  return layers.map(({ dz }) => dz);
}

/** GRAD-1 to GRAD-3, GRAD-9. */
export function shd_loss_gradient({ supervision, student_logits, ...keywords }) {
  const options = checkedOptions(keywords);
  const layers = layersOf(supervision, student_logits).map((pair, i) => checkedLayer(pair, i, options));
  const dz = gradients(layers, options);
  return Array.isArray(supervision) ? dz : dz[0];
}

/** z = scale * q k^T, head by head (GRAD-4, GRAD-5). */
function logitsOf(q, k, scale) {
  const [B, H, L, d] = q.shape;
  const S = k.shape[2];
  const z = NdArray.zeros([B, H, L, S]);
  eachScore(q, k, (at, row, key) => {
    let dot = 0;
    for (let e = 0; e < d; e++) dot += q.data[row + e] * k.data[key + e];
    z.data[at] = scale * dot;
  });
  return z;
}

/** Calls `visit` with the flat places of a score, of its query and of its key. */
function eachScore(q, k, visit) {
  const [B, H, L, d] = q.shape;
  const [, Hkv, S] = k.shape;
  for (let b = 0; b < B; b++) {
    for (let h = 0; h < H; h++) {
      const source = b * Hkv + Math.floor(h / (H / Hkv));
      for (let i = 0; i < L; i++) {
        for (let j = 0; j < S; j++) {
          visit(((b * H + h) * L + i) * S + j, ((b * H + h) * L + i) * d, (source * S + j) * d);
        }
      }
    }
  }
}

/** GRAD-4 to GRAD-9. */
export function shd_loss_gradient_qk({ supervision, queries, keys, scale, ...keywords }) {
  const options = checkedOptions(keywords);
  if (typeof scale !== "number" || !Number.isFinite(scale)) fail("argument-value", `scale: ${scale}`); // GRAD-8
  const isList = Array.isArray(queries);
  if (isList !== Array.isArray(keys)) fail("argument-shape", "queries and keys: two arrays or two lists of layers");
  const pairs = isList ? queries.map((q, i) => [q, keys[i]]) : [[queries, keys]];
  if (isList && queries.length !== keys.length) fail("argument-shape", "queries and keys: lists of the same length are needed");
  const logits = pairs.map(([queriesOfLayer, keysOfLayer], i) => {
    const q = realArray(queriesOfLayer, "queries", 4, { where: `layer ${i}` });
    const k = realArray(keysOfLayer, "keys", 4, { where: `layer ${i}` });
    if (q.shape[0] !== k.shape[0] || q.shape[3] !== k.shape[3] || q.shape[1] % k.shape[1] !== 0) {
      fail("argument-shape", `layer ${i}: queries (${q.shape}) and keys (${k.shape})`);
    }
    return logitsOf(q, k, scale);
  });
  const layers = layersOf(supervision, isList ? logits : logits[0]).map((pair, i) => checkedLayer(pair, i, options));
  const results = gradients(layers, options).map((dz, layer) => {
    const [q, k] = pairs[layer];
    const d = q.shape[3];
    const dq = NdArray.zeros(q.shape);
    const dk = NdArray.zeros(k.shape);
    eachScore(q, k, (at, row, key) => {
      const g = scale * dz.data[at];
      if (g === 0) return;
      for (let e = 0; e < d; e++) {
        dq.data[row + e] += g * k.data[key + e];
        dk.data[key + e] += g * q.data[row + e];
      }
    });
    return { dq, dk };
  });
  const dq = results.map((result) => result.dq);
  const dk = results.map((result) => result.dk);
  return isList ? { dq, dk } : { dq: dq[0], dk: dk[0] };
}
