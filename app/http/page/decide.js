// Decide on a prediction under the thresholds of this page, by the rules of `Calibration.decide` in `psc_core.tasks`.
// A moving slider decides hundreds of images at once, for which the service would be too slow.

import { TASKS, taskOf } from "./tasks.js";

// Each decision is a word and a sign, never a colour alone; the order is that in which they need a person.
export const DECISIONS = {
  abstain_ood: "! Unusual",
  ...Object.fromEntries(Object.values(TASKS).map(({ abstention }) => [abstention, "? Unclear"])),
  accept: "✓ Accept",
};

// As in psc_core/conformal.py.
const RANK_ROUNDING = 1e-9;

// p ≤ alpha, where p is one of 1/(n + 1), 2/(n + 1), …, so that rounding cannot matter.
export function isOod(p, alpha, { calibration }) {
  const steps = calibration.images + 1;
  return Math.round(p * steps) <= Math.floor(alpha * steps + RANK_ROUNDING);
}

// The service compares float32 numbers, of which JSON has the shortest decimals.
export function decide(prediction, policy, model) {
  const task = taskOf(model);
  if (isOod(prediction.ood_p_value, policy.alpha, model)) return "abstain_ood";
  return Math.fround(task.uncertainty(prediction)) <= Math.fround(task.limit(policy)) ? "accept" : task.abstention;
}

// Return the names of the checks with the smallest p-value.
export function alarming(prediction) {
  const checks = Object.entries(prediction.checks ?? {});
  const smallest = Math.min(...checks.map(([, p]) => p));
  return checks.filter(([, p]) => p === smallest).map(([name]) => name);
}
