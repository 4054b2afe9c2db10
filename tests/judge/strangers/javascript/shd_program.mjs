/**
 * Squeezing-Heads Distillation as a program that answers JSON lines (specs/conformance.md, "The protocol of programs").
 * Written from specs/shd.md alone. Run: node shd_program.mjs
 */
import { createInterface } from "node:readline";
import { NdArray, ShdError, size } from "./arrays.mjs";
import { intersect_support, shd_loss, shd_loss_gradient, shd_loss_gradient_qk } from "./loss.mjs";
import { align_tokens, layer_map, soften, softmax, value_outputs } from "./maps.mjs";
import {
  compose_mixing,
  gram_tensor,
  merge_gram,
  mix_heads,
  solve_alpha,
  solve_alpha_from_gram,
  squeeze_heads,
} from "./merging.mjs";
import { diagnose } from "./oracle.mjs";
import { merge_plan, plan_groups } from "./plans.mjs";

const LOSS_KEYWORDS = ["beta", "loss_mask", "attn_mask", "temperature", "reduction", "divergence", "support", "row_sums"];

/** For each operation: the function, its arguments (those it cannot do without first), and the name of its only output. */
const OPERATIONS = {
  softmax: [softmax, ["attn_logits"], ["attn_mask", "temperature"], "attn_probs"],
  soften: [soften, ["attn_probs", "temperature"], ["row_sums"], "attn_probs"],
  value_outputs: [value_outputs, ["values", "output_projection"], [], "value_outputs"],
  merge_plan: [merge_plan, ["num_teacher_heads", "num_student_heads"], ["kind"], "plan"],
  plan_groups: [plan_groups, ["plan", "num_teacher_heads"], [], "groups"],
  solve_alpha: [
    solve_alpha,
    ["probs_p", "probs_q", "value_outputs_p", "value_outputs_q"],
    ["query_mask", "rule", "row_sums"],
    "alpha",
  ],
  compose_mixing: [compose_mixing, ["alphas", "plan", "num_teacher_heads"], [], "mixing"],
  mix_heads: [mix_heads, ["teacher_probs", "mixing"], [], "probs"],
  squeeze_heads: [
    squeeze_heads,
    ["teacher_probs", "value_outputs", "num_student_heads"],
    ["plan", "strategy", "query_mask", "temperature", "alpha_rule", "alpha_from", "row_sums"],
  ],
  shd_loss: [shd_loss, ["supervision", "student_logits"], LOSS_KEYWORDS, "loss"],
  shd_loss_gradient: [shd_loss_gradient, ["supervision", "student_logits"], LOSS_KEYWORDS, "dz"],
  shd_loss_gradient_qk: [shd_loss_gradient_qk, ["supervision", "queries", "keys", "scale"], LOSS_KEYWORDS],
  intersect_support: [intersect_support, ["supervision", "student_logits"], ["loss_mask", "attn_mask", "row_sums"]],
  layer_map: [layer_map, ["num_teacher_layers", "num_student_layers"], ["pairs"], "pairs"],
  align_tokens: [align_tokens, ["attn_probs"], ["rows", "columns", "query_mask", "row_sums"]],
  gram_tensor: [
    gram_tensor,
    ["teacher_probs", "values", "output_projection"],
    ["query_mask", "row_sums"],
    "gram",
  ],
  solve_alpha_from_gram: [solve_alpha_from_gram, ["gram", "p", "q"], [], "alpha"],
  merge_gram: [merge_gram, ["gram", "p", "q", "alpha"], [], "gram"],
  diagnose: [
    diagnose,
    ["teacher_probs", "value_outputs", "num_student_heads"],
    ["plan", "strategies", "query_mask", "row_sums"],
  ],
};

const SPECIAL = { "-inf": -Infinity, inf: Infinity, nan: NaN };

/** An argument: arrays become NdArray, a special scalar a number, lists item by item. */
function decode(x, dtype) {
  if (Array.isArray(x)) return x.map((item) => decode(item, dtype));
  if (x === null || typeof x !== "object") return x;
  if ("number" in x) return SPECIAL[x.number] ?? x.number;
  const own = x.dtype === undefined || x.dtype === "float" ? dtype : x.dtype;
  const data = new Float64Array(size(x.shape));
  if (data.length !== x.data.length) throw new ShdError("argument-shape", "an array whose data does not fill its shape");
  x.data.forEach((entry, i) => (data[i] = SPECIAL[entry] ?? Number(entry)));
  return new NdArray(x.shape, data, own);
}

function encodeNumber(x) {
  if (Number.isNaN(x)) return "nan";
  if (x === Infinity) return "inf";
  return x === -Infinity ? "-inf" : x;
}

function encode(x) {
  if (x instanceof NdArray) return { shape: x.shape, data: Array.from(x.data, encodeNumber) };
  if (Array.isArray(x)) return x.map(encode);
  if (x !== null && typeof x === "object") return Object.fromEntries(Object.entries(x).map(([name, y]) => [name, encode(y)]));
  return typeof x === "number" ? encodeNumber(x) : x;
}

function call({ operation, dtype, inputs }) {
  if (!Object.hasOwn(OPERATIONS, operation)) throw new ShdError("not-implemented", `operation ${operation}`);
  const [run, required, optional, only] = OPERATIONS[operation];
  for (const name of Object.keys(inputs)) {
    if (!required.includes(name) && !optional.includes(name)) throw new ShdError("not-implemented", `argument ${name}`);
  }
  for (const name of required) {
    if (!Object.hasOwn(inputs, name)) throw new ShdError("argument-value", `argument ${name} is missing`);
  }
  const decoded = Object.fromEntries(Object.entries(inputs).map(([name, x]) => [name, decode(x, dtype)]));
  const result = run(decoded);
  const outputs = only ? { [only]: result } : result;
  return Object.fromEntries(Object.entries(outputs).map(([name, x]) => [name, encode(x)]));
}

function answer(ask) {
  if (ask.type === "hello") {
    return {
      type: "hello",
      protocol: "1",
      name: "javascript stranger 1.0",
      operations: Object.keys(OPERATIONS),
      dtypes: ["float64", "float32", "float16", "bfloat16"],
    };
  }
  try {
    return { id: ask.id, outputs: call(ask) };
  } catch (error) {
    if (!(error instanceof ShdError)) console.error(error);
    return { id: ask.id, error: { code: error instanceof ShdError ? error.code : "internal-error", message: String(error.message) } };
  }
}

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  if (line.trim() !== "") process.stdout.write(`${JSON.stringify(answer(JSON.parse(line)))}\n`);
}
