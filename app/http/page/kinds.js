// What differs between a classifier and a regression: its words, its second threshold, and how unsure an image is.

import { number } from "./format.js";

export const thresholdOf = (model) => (model.target ? "max_width" : "ambiguity_threshold");

// Width of the interval in the target's unit, or entropy in nats.
export const uncertainty = (said) => ("mean" in said ? said.upper - said.lower : said.predictive_entropy);

export const measured = (value, model) => `${number(value)}\u00a0${model.target.unit}`.trim();

export function summary(model) {
  return model.target ? `predicts ${model.target.name}` : `${model.classes.length} classes`;
}

export function thresholdName(model) {
  if (!model.target) return "Ambiguous above, nats";
  return `Uncertain where wider than${model.target.unit ? `, ${model.target.unit}` : ""}`;
}

export function thresholdText(policy, model) {
  if (model.target) return policy.max_width ?? "";
  return Number(Math.min(policy.ambiguity_threshold, Math.log(model.classes.length)).toPrecision(4));
}

// The end of the map's vertical axis, and its title.
export function axisOf(model, policy, images) {
  if (!model.target) return { highest: Math.log(model.classes.length), title: "↑ more ambiguous (nats)" };
  const widths = images.map(({ said }) => uncertainty(said));
  const unit = model.target.unit ? ` (${model.target.unit})` : "";
  return { highest: 1.05 * Math.max(...widths, policy.max_width ?? 0) || 1, title: `↑ wider interval${unit}` };
}

export function limitOf(policy) {
  return "max_width" in policy ? (policy.max_width ?? Infinity) : policy.ambiguity_threshold;
}
