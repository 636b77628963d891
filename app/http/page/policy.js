// The two sliders, both stricter to the right: their thresholds, and the cost of these on in-distribution images.

import { atMost, number, outOf } from "./format.js";
import { taskOf } from "./tasks.js";
import { sentence } from "./why.js";

const LARGEST_ALPHA = 0.5;
const element = (id) => document.getElementById(id);
const sliders = { alpha: element("alpha"), limit: element("limit") };
const STEPS = Number(sliders.alpha.max);
const rounded = (value) => Number(value.toPrecision(2));

const axisOf = (model, images) => taskOf(model).axis(model, images.map(({ prediction }) => prediction));

// Alpha runs logarithmically from the smallest that the calibration images allow.
export function chosen(policy, model, images, slider) {
  const position = slider.valueAsNumber / STEPS;
  if (slider === sliders.alpha) {
    const smallest = 1 / (model.calibration.images + 1);
    return { ...policy, alpha: Math.max(smallest, rounded(smallest * (LARGEST_ALPHA / smallest) ** position)) };
  }
  const task = taskOf(model);
  const { highest } = axisOf(model, images);
  const lowest = (task.lowest * highest) / STEPS;
  const limit = position === 0 ? task.off(highest) : rounded(Math.max(lowest, (1 - position) * highest));
  return { ...policy, ...task.unshown, [task.threshold]: limit };
}

export function showPolicy(policy, model, images) {
  const { highest } = axisOf(model, images);
  const smallest = 1 / (model.calibration.images + 1);
  const task = taskOf(model);
  const limit = task.limit(policy);
  element("limit-name").textContent = task.thresholdName;
  showSlider("alpha", Math.log(policy.alpha / smallest) / Math.log(LARGEST_ALPHA / smallest), `${number(100 * policy.alpha)}\u00a0%`);
  const isOff = task.isOff(limit, highest);
  showSlider("limit", 1 - limit / highest, isOff ? "off" : limit < 0 ? "all" : task.limitShare(limit, model));
  sliders.limit.title = isOff || limit < 0 ? "" : task.limitText(limit, model);
  element("handed").textContent = handed(policy, model);
  const own = Object.keys(policy).every((name) => policy[name] === model.policy[name]);
  element("own").hidden = own;
  const note = model.notes[0] ?? "";
  element("headline").textContent = sentence(own ? note : `by the model's own limits, ${note}`);
}

function showSlider(name, position, text) {
  if (document.activeElement !== sliders[name]) sliders[name].value = Math.round(STEPS * Math.max(0, Math.min(1, position)));
  sliders[name].setAttribute("aria-valuetext", text);
  element(`${name}-text`).textContent = text;
}

// What the answers are worth, and what that costs. Upper bounds: an image that is both unusual and unclear is reported as
// unusual alone.
function handed(policy, model) {
  const [wrong, answers] = atMost(policy.risk ?? 1);
  const promise = `At most ${wrong} in ${answers.toLocaleString("en")} accepted answers ${wrong === 1 ? "is" : "are"} wrong. For that, about`;
  const { fraction, rest } = taskOf(model).handed(policy, model.calibration.entropy_quantiles);
  const [unusual, of] = (fraction > 0 ? atMost : outOf)(policy.alpha);
  const unclear = Math.min(Math.round(of * fraction), of - unusual);
  const images = (count) => `${policy.risk ? promise : "About"} ${count} in ${of.toLocaleString("en")} ordinary images go to a person`;
  const unshown = model.policy.risk && !policy.risk ? " How many answers are wrong is known at the model's own limits alone." : "";
  if (unclear > 0) return `${images(unusual + unclear)}: ${unclear} unclear, up to ${unusual} unusual by mistake.${unshown}`;
  return `${images(unusual)}, unusual by mistake${rest}.${unshown}`;
}
