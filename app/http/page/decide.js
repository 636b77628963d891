// What a prediction means under thresholds, as the service decides it.

import { limitOf, uncertainty } from "./kinds.js";

// Of one word and a sign each, never told by the colour alone; in the order in which they want a person.
export const DECISIONS = {
  abstain_ood: "! Out of distribution",
  abstain_ambiguous: "? Ambiguous",
  abstain_uncertain: "? Uncertain",
  accept: "✓ Accept",
};

// p ≤ alpha, where p is one of 1/(n + 1), 2/(n + 1), …, so that rounding cannot matter.
export function isOod(p, alpha, calibrationImages) {
  const steps = calibrationImages + 1;
  return Math.round(p * steps) <= Math.floor(alpha * steps * (1 + 1e-12));
}

// The service compares float32 numbers, of which JSON has the shortest decimals.
export function decide(said, policy, calibrationImages) {
  if (isOod(said.ood_p_value, policy.alpha, calibrationImages)) return "abstain_ood";
  if (Math.fround(uncertainty(said)) <= Math.fround(limitOf(policy))) return "accept";
  return "mean" in said ? "abstain_uncertain" : "abstain_ambiguous";
}

// The names of the gates with the smallest p-value.
export function alarming(said) {
  const gates = Object.entries(said.gates ?? {});
  const smallest = Math.min(...gates.map(([, p]) => p));
  return gates.filter(([, p]) => p === smallest).map(([name]) => name);
}
