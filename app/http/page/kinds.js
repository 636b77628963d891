// What differs between a classifier and a regression: its words, its second threshold, and how unsure an image is.

import { nats, number, percent } from "./format.js";

export const thresholdOf = (model) => (model.target ? "max_width" : "ambiguity_threshold");

// Width of the interval in the target's unit, or entropy in nats.
export const uncertainty = (said) => ("mean" in said ? said.upper - said.lower : said.predictive_entropy);

export const measured = (value, model) => `${number(value)}\u00a0${model.target.unit}`.trim();

export const summary = (model) => (model.target ? `predicts ${model.target.name}` : `${model.classes.length} classes`);

export const thresholdName = (model) => (model.target ? "Uncertain where wider than" : "Ambiguous above");

export const limitText = (value, model) => (model.target ? measured(value, model) : nats(value));

export function limitOf(policy) {
  return "max_width" in policy ? (policy.max_width ?? Infinity) : policy.ambiguity_threshold;
}

// The end of the map's vertical axis, and its title.
export function axisOf(model, images) {
  if (!model.target) return { highest: Math.log(model.classes.length), title: "↑ more ambiguous (nats)" };
  const widths = images.map(({ said }) => uncertainty(said));
  const unit = model.target.unit ? ` (${model.target.unit})` : "";
  return { highest: 1.05 * Math.max(...widths, 1.5 * (model.policy.max_width ?? 0)) || 1, title: `↑ wider interval${unit}` };
}

// The answer as a person may rely on it: one, several that fit, or a guess.
export function answerText(said, decision, model) {
  const known = decision !== "abstain_ood";
  if (model.target) {
    const best = known && decision !== "accept" ? interval(said, model) : measured(said.mean, model);
    return known ? best : `guess: ${best}`;
  }
  if (!known) return `guess: ${said.label}`;
  if (decision === "accept") return said.label;
  const set = said.prediction_set;
  return set.length > 1 && set.length < 4 ? set.join(" or ") : `${said.label}?`;
}

export const interval = (said, model) => `${number(said.lower)} to ${measured(said.upper, model)}`;

// Rows of [name, value, what it is held against].
export function rows(said, policy, model) {
  const strange = [
    ["p-value", number(said.ood_p_value), `out of distribution up to ${number(policy.alpha)}`],
    ["OOD score", nats(said.ood_score), ""],
    ...Object.entries(said.gates ?? {}).map(([gate, p]) => [`Gate ${gate}`, number(p), ""]),
  ];
  const limit = limitOf(policy);
  if (model.target) {
    const width = limit < Infinity ? `uncertain where wider than ${measured(limit, model)}` : "none is uncertain";
    const deviation = `noise ${number(said.aleatoric)}, model ${number(said.epistemic)}`;
    return [["Mean", measured(said.mean, model), ""], ["Interval", interval(said, model), width], ["Deviation", deviation, ""], ...strange];
  }
  const above = limit < Math.log(model.classes.length) ? `ambiguous above ${number(limit)}` : "none is ambiguous";
  const set = said.prediction_set.join(", ") || "none of the classes";
  const best = ["Most probable", `${said.label}, ${percent(said.confidence)}`, ""];
  return [best, ["Could be", set, ""], ["Entropy", nats(said.predictive_entropy), above], ...strange];
}
