// The differences between the tasks of models: their words, their second threshold, and the uncertainty of an image.

import { nats, number, percent, exact } from "./format.js";

const measured = (value, { target }, width) => `${number(value, width)}\u00a0${target.unit}`.trim();
const known = (value, { target }) => `${exact(value)}\u00a0${target.unit}`.trim();
const mean = (prediction, model) => measured(prediction.mean, model, regression.uncertainty(prediction));
const interval = ({ lower, upper }, model) => `${number(lower, upper - lower)} to ${measured(upper, model, upper - lower)}`;
const list = (names) => (names.length > 4 ? `${names.length} classes` : new Intl.ListFormat("en").format(names));

const above = (limit, values) => values.filter((each) => each > limit).length / values.length;

const SHOWN_CLASSES = 20; // with more, their number is said
const KEYS = [..."1234567890"];

const classification = {
  threshold: "ambiguity_threshold",
  thresholdName: "Called unclear",
  unshown: { risk: null }, // Of another threshold only the service knows the errors.
  abstention: "abstain_ambiguous",
  uncertainty: ({ predictive_entropy: entropy }) => entropy, // nats
  limit: (policy) => policy.ambiguity_threshold,
  isOff: (limit, highest) => limit >= highest,
  lowest: 0,
  off: (highest) => 2 * highest,
  limitText: nats,
  limitShare: (limit, { calibration: { entropy_quantiles: entropies } }) => `${Math.round(100 * above(limit, entropies))}\u00a0%`,
  value: ({ label }) => label,
  summary: ({ classes }) => `${classes.length} classes`,
  axis: ({ classes }) => ({ highest: Math.log(classes.length), title: "↑ less clear" }),

  // The answer as far as a person may rely on it: one class, several that fit, or a guess.
  answer({ label, prediction_set: set }, decision) {
    if (decision === "abstain_ood") return `guess: ${label}`;
    if (decision === "accept") return label;
    return set.length > 1 && set.length < 4 ? set.join(" or ") : `${label}?`;
  },
  rows(prediction, policy, { classes }) {
    const limit = policy.ambiguity_threshold;
    return [
      ["Most probable", `${prediction.label}, ${percent(prediction.confidence)}`, ""],
      ["Could be", prediction.prediction_set.join(", ") || "none of the classes", ""],
      ["Entropy", nats(prediction.predictive_entropy), limit < 0 ? "nothing is accepted" : limit < Math.log(classes.length) ? `unclear above ${number(limit)}` : "none is unclear"],
    ];
  },
  bars: ({ probabilities }, { classes }) => probabilities.map((probability, index) => ({ probability, name: classes[index] })),
  reason: ({ prediction_set: set }, { ambiguity_threshold: limit }) =>
    limit < 0 ? "Nothing is accepted: no error rate could be shown for this model" : `${set.length > 1 ? list(set) : "several classes"} fit, a person should choose`,
  evidence({ aleatoric, epistemic }) {
    if (typeof aleatoric !== "number" || !(aleatoric + epistemic > 0)) return [];
    const image = aleatoric / (aleatoric + epistemic);
    return [`Why it is unclear: ${percent(image)} the image itself, ${percent(1 - image)} too little training data`];
  },
  recognises: ({ classes }) =>
    classes.length > SHOWN_CLASSES ? `This model tells ${classes.length} classes apart.` : `This model tells apart: ${classes.join(", ")}.`,
  nearest: "Nearest classes",
  kept: ({ label }) => label,

  handed: (policy, entropies) => ({ fraction: above(policy.ambiguity_threshold, entropies), rest: "" }),

  // What a reviewer may answer. Few classes stay in their own order, which a hand learns; of many, the likely come first.
  field: "text",
  checked: "A random sample shows how often it is right.",
  guess: ({ label }) => label,
  guessed: ({ label }) => label,
  choices({ label, likely }, { classes }) {
    if (classes.length <= KEYS.length) return classes;
    return [...new Set([label, ...Object.keys(likely).sort((a, b) => likely[b] - likely[a])])].slice(0, KEYS.length);
  },
  label(text, { classes }) {
    const alike = classes.filter((name) => name.toLowerCase() === text.toLowerCase());
    return alike.find((name) => name === text) ?? alike[0];
  },
  // The only class that begins so.
  completed(text, { classes }) {
    const begins = classes.filter((name) => name.toLowerCase().startsWith(text.toLowerCase()));
    return begins.length === 1 ? begins[0] : undefined;
  },
};

const regression = {
  threshold: "max_width",
  thresholdName: "Unclear where wider than",
  unshown: {},
  abstention: "abstain_uncertain",
  uncertainty: ({ lower, upper }) => Math.fround(upper) - Math.fround(lower), // in the target's unit
  limit: (policy) => policy.max_width ?? Infinity,
  isOff: (limit) => limit === Infinity,
  lowest: 1, // the step of the slider; a width of 0 means no threshold
  off: () => null,
  limitText: measured,
  limitShare: measured,
  value: ({ mean }) => mean,
  summary: ({ target }) => `predicts ${target.name}`,
  axis({ target, policy }, predictions) {
    const unit = target.unit ? ` (${target.unit})` : "";
    const widest = Math.max(...predictions.map(regression.uncertainty), 1.5 * (policy.max_width ?? 0));
    return { highest: 1.05 * widest || 1, title: `↑ wider interval${unit}` };
  },

  answer(prediction, decision, model) {
    if (decision === "abstain_ood") return `guess: ${mean(prediction, model)}`;
    return decision === "accept" ? mean(prediction, model) : interval(prediction, model);
  },
  rows(prediction, policy, model) {
    const limit = regression.limit(policy);
    return [
      ["Mean", mean(prediction, model), ""],
      ["Interval", interval(prediction, model), limit < Infinity ? `unclear where wider than ${measured(limit, model)}` : "none is unclear"],
      ["Deviation", `noise ${number(prediction.aleatoric)}, model ${number(prediction.epistemic)}`, ""],
    ];
  },
  bars: () => [],
  recognises: ({ target }) => `This model predicts ${target.name}.`,
  reason: (prediction, policy, model) => `The interval is wider than ${measured(policy.max_width, model)}`,
  evidence: ({ nearest_examples: layers = [] }, model) =>
    layers.map(({ layer, weight, examples }) => {
      const shown = examples.map(({ image, value }) => `${known(value, model)} (image ${image})`).join(", ");
      return `Nearest training images after ${layer}, which counts for ${percent(weight)}: ${shown}`;
    }),
  nearest: "Nearest bins",
  kept: ({ value }, model) => known(value, model),

  handed: ({ max_width: width }) => ({ fraction: 0, rest: width === null ? "" : ", and those with too wide an interval" }),

  field: "number",
  checked: "From a random sample new intervals are calibrated.",
  guess: () => null, // One that is seen draws the measurement towards it.
  hint: ({ target }) => `type the number${target.unit && `, ${target.unit}`}`, // The model's own would be no measurement.
  choices: () => [],
  label: (text) => (Number.isNaN(Number(text)) ? undefined : Number(text)),
  completed: () => undefined,
};

export const TASKS = { classification, regression };

// The keys of the names that a reviewer may answer: a class that is a digit has its own for all images.
export function keysOf(names, classes) {
  const others = KEYS.filter((key) => !classes.includes(key));
  return names.map((name) => (KEYS.includes(name) ? name : others.shift()));
}

export const taskOf = (model) => TASKS[model.task];
