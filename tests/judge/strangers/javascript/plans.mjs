/** Chapter PLAN: which heads merge. */
import { fail, isInteger } from "./arrays.mjs";

function checkCounts(Ht, Hs) {
  if (!isInteger(Ht) || !isInteger(Hs) || Ht < 1 || Hs < 1) fail("argument-value", "head counts are integers of at least 1");
  if (Hs > Ht) fail("heads-exceed", `${Hs} student heads and ${Ht} teacher heads`); // PLAN-2
}

function progressive(Ht, Hs) {
  const plan = [];
  for (let H = Ht; H > Hs; ) {
    const m = Math.min(Math.floor(H / 2), H - Hs);
    plan.push(Array.from({ length: m }, (_, i) => [2 * i, 2 * i + 1]));
    H -= m;
  }
  return plan;
}

function balanced(Ht, Hs) {
  let pool = []; // the student head of each part
  for (let g = 0; g < Hs; g++) {
    const members = Math.floor(Ht / Hs) + (g < Ht % Hs ? 1 : 0);
    for (let i = 0; i < members; i++) pool.push(g);
  }
  const plan = [];
  while (pool.length > Hs) {
    const round = [];
    for (let g = 0; g < Hs; g++) {
      const parts = pool.flatMap((owner, position) => (owner === g ? [position] : []));
      for (let i = 0; i + 1 < parts.length; i += 2) round.push([parts[i], parts[i + 1]]);
    }
    plan.push(round);
    pool = poolAfter(pool, round, (p) => p);
  }
  return plan;
}

/** The pool after a round: the merged heads as listed, then the unused ones (PLAN-4). */
export function poolAfter(pool, round, merge) {
  const used = new Set(round.flat());
  return [...round.map(([p, q], i) => merge(pool[p], pool[q], i)), ...pool.filter((_, position) => !used.has(position))];
}

/** PLAN-7. Returns the number of heads that are left. */
export function checkRounds(plan, Ht) {
  if (!Array.isArray(plan)) fail("plan-invalid", "a plan is a list of rounds");
  let H = Ht;
  plan.forEach((round, r) => {
    if (!Array.isArray(round) || round.length === 0) fail("plan-invalid", `round ${r}: at least one pair is needed`);
    const used = new Set();
    for (const pair of round) {
      if (!Array.isArray(pair) || pair.length !== 2) fail("plan-invalid", `round ${r}: a pair has two positions`);
      for (const position of pair) {
        if (!isInteger(position) || position < 0 || position >= H) fail("plan-invalid", `round ${r}: position ${position} of ${H}`);
        if (used.has(position)) fail("plan-invalid", `round ${r}: position ${position} twice`);
        used.add(position);
      }
    }
    H -= round.length;
  });
  return H;
}

/** PLAN-1 to PLAN-5, PLAN-8. */
export function merge_plan({ num_teacher_heads, num_student_heads, kind = "progressive" }) {
  if (Array.isArray(kind)) return resolvePlan(kind, num_teacher_heads, num_student_heads);
  if (kind !== "progressive" && kind !== "balanced") fail("argument-value", `kind: ${kind}`);
  checkCounts(num_teacher_heads, num_student_heads);
  return (kind === "balanced" ? balanced : progressive)(num_teacher_heads, num_student_heads);
}

/** The rounds that `squeeze_heads` runs: a kind, or explicit rounds (MIX-16). */
export function resolvePlan(plan, Ht, Hs) {
  checkCounts(Ht, Hs);
  if (typeof plan === "string") return merge_plan({ num_teacher_heads: Ht, num_student_heads: Hs, kind: plan });
  const left = checkRounds(plan, Ht);
  if (left !== Hs) fail("plan-invalid", `the plan leaves ${left} heads, not ${Hs}`);
  return plan.map((round) => round.map(([p, q]) => [p, q]));
}

/** PLAN-6. */
export function plan_groups({ plan, num_teacher_heads: Ht }) {
  if (!isInteger(Ht) || Ht < 1) fail("argument-value", "num_teacher_heads is an integer of at least 1");
  checkRounds(plan, Ht);
  let pool = Array.from({ length: Ht }, (_, t) => [t]);
  for (const round of plan) pool = poolAfter(pool, round, (p, q) => [...p, ...q]);
  return pool;
}
