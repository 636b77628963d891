// What a prediction means under thresholds, as the service decides it.

import { limitOf, uncertainty } from "./kinds.js";

export const DECISIONS = {
  accept: "✓ Accept",
  abstain_ambiguous: "? Abstain: several classes fit",
  abstain_uncertain: "? Abstain: the interval is too wide",
  abstain_ood: "! Abstain: unlike the known images",
};

const GATES = { texture: "strange texture", kind: "unknown kind", confidence: "ambiguous" };

// p ≤ alpha, where p is one of 1/(n + 1), 2/(n + 1), …, so that rounding cannot matter.
export function isOod(p, alpha, calibrationImages) {
  const steps = calibrationImages + 1;
  return Math.round(p * steps) <= Math.floor(alpha * steps * (1 + 1e-12));
}

export function decide(said, policy, calibrationImages) {
  if (isOod(said.ood_p_value, policy.alpha, calibrationImages)) return "abstain_ood";
  if (uncertainty(said) <= limitOf(policy)) return "accept";
  return "mean" in said ? "abstain_uncertain" : "abstain_ambiguous";
}

// The decision in words; of an image out of distribution, the gate with the smallest p-value says why.
export function inWords(decision, said) {
  const gates = Object.entries(said.gates ?? {});
  if (decision !== "abstain_ood" || gates.length === 0) return DECISIONS[decision] ?? decision;
  const smallest = Math.min(...gates.map(([, p]) => p));
  const alarming = gates.filter(([, p]) => p === smallest).map(([name]) => GATES[name] ?? name);
  return `! Abstain: ${alarming.join(", ")}`;
}

export function gateList(said, number) {
  return Object.entries(said.gates ?? {}).map(([name, p]) => `${GATES[name] ?? name} ${number(p)}`).join(", ");
}
