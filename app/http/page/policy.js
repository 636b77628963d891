// The two sliders: the thresholds that they stand for, and what these cost on ordinary images.

import { number, percent } from "./format.js";
import { axisOf, limitOf, limitText, thresholdName, thresholdOf } from "./kinds.js";

const LARGEST_ALPHA = 0.5;
const element = (id) => document.getElementById(id);
const sliders = { alpha: element("alpha"), limit: element("limit") };
const STEPS = Number(sliders.alpha.max);
const rounded = (value) => Number(value.toPrecision(2));

// Alpha runs logarithmically from the smallest that the calibration images can keep.
export function chosen(policy, model, images, slider) {
  const position = slider.valueAsNumber / STEPS;
  if (slider === sliders.alpha) {
    const smallest = 1 / (model.calibration.images + 1);
    return { ...policy, alpha: Math.max(smallest, rounded(smallest * (LARGEST_ALPHA / smallest) ** position)) };
  }
  const { highest } = axisOf(model, images);
  const off = model.target ? null : 2 * highest;
  const lowest = model.target ? highest / STEPS : 0; // A width of 0 is none.
  return { ...policy, [thresholdOf(model)]: position === 1 ? off : rounded(Math.max(lowest, position * highest)) };
}

export function showPolicy(policy, model, images) {
  const { highest } = axisOf(model, images);
  const smallest = 1 / (model.calibration.images + 1);
  const limit = limitOf(policy);
  element("limit-name").textContent = thresholdName(model);
  showSlider("alpha", Math.log(policy.alpha / smallest) / Math.log(LARGEST_ALPHA / smallest), `α = ${number(policy.alpha)}`);
  showSlider("limit", limit / highest, limit < highest || (model.target && limit < Infinity) ? limitText(limit, model) : "off");
  element("handed").textContent = handed(policy, model);
  element("own").hidden = Object.keys(policy).every((name) => policy[name] === model.policy[name]);
}

function showSlider(name, position, text) {
  if (document.activeElement !== sliders[name]) sliders[name].value = Math.round(STEPS * Math.min(1, position));
  sliders[name].setAttribute("aria-valuetext", text);
  element(`${name}-text`).textContent = text;
}

// Of each kind at most so many: of an image that is both, only the first is said.
function handed(policy, model) {
  const of = 10 ** Math.max(2, Math.ceil(-Math.log10(policy.alpha) - 1e-9));
  const quantiles = model.calibration.entropy_quantiles;
  const strange = Math.round(of * policy.alpha);
  const unsure = quantiles ? (of * quantiles.filter((value) => value > limitOf(policy)).length) / quantiles.length : 0;
  const ambiguous = Math.min(Math.round(unsure), of - strange);
  const images = `Of ${of.toLocaleString("en")} ordinary images`;
  if (ambiguous > 0) {
    return `${images}, up to ${strange + ambiguous} are handed to a person: ${strange} as strange, ${ambiguous} as ambiguous.`;
  }
  const rest = model.target && policy.max_width !== null ? " as strange, and those with too wide an interval" : "";
  return `${images}, ${strange} ${strange === 1 ? "is" : "are"} handed to a person${rest}.`;
}
