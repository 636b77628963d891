// Why an image was decided so: in one sentence, on the picture, and by the nearest training images.

import { alarming } from "./decide.js";
import { number } from "./format.js";
import { SMALL_PIXELS } from "./grid.js";
import { taskOf } from "./tasks.js";

const NEAREST = 3;
const WIDE = 0.6; // of the image's area; a larger region is called no place
const UNUSUAL = {
  texture: "texture that no training image has",
  content: "content unlike that of the training images",
  confidence: "fits the classes worse than the training images do",
};
const element = (id) => document.getElementById(id);

export function reason(prediction, decision, policy, model) {
  const near = nearTo(closest(prediction.explanation, model)[0]?.name, prediction.label);
  if (decision === "abstain_ood") {
    const unusual = alarming(prediction).map((check) => UNUSUAL[check] ?? check).join(", and ") || "unlike the training images";
    const where = place(prediction.explanation?.map?.box);
    return sentence(`${unusual}${where && `, ${where}`}${near}`);
  }
  if (decision === "accept") return `Looks like the training images, and the model is confident enough${near}.`;
  return sentence(taskOf(model).reason(prediction, policy, model, near));
}

// The most probable class and the one with the nearest training images are two things, so a difference is explained.
function nearTo(nearest, label) {
  if (nearest === undefined) return "";
  if (label === undefined || label === nearest) return `. Closest class: ${nearest}`;
  return `. The classifier says ${label}, but the closest training images show ${nearest}`;
}

export const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}.`;

// Return "mainly in the upper left" and the like for a box in fractions of the image: [left, top, right, bottom].
function place(box) {
  if (!box) return "";
  const [left, top, right, bottom] = box;
  if ((right - left) * (bottom - top) > WIDE) return "all over the image";
  const third = (low, high, names) => names[Math.min(2, Math.floor((3 * (low + high)) / 2))];
  const words = [third(top, bottom, ["upper", "", "lower"]), third(left, right, ["left", "", "right"])].filter(Boolean);
  return `mainly in the ${words.join(" ") || "middle"}${words.length === 1 ? " part" : ""}`;
}

function closest(explanation, model) {
  const distances = explanation?.class_distances ?? explanation?.bin_distances ?? [];
  return distances.map((distance, index) => ({ distance, name: model.classes[index] })).sort((a, b) => a.distance - b.distance);
}

// Return the part of an image that the network sees: all of it, or the centre after its shorter side was resized.
function seenOf({ naturalWidth, naturalHeight }, { width, height, resize }) {
  const scale = resize ? resize / Math.min(naturalWidth, naturalHeight) : 0;
  return scale ? [width / (scale * naturalWidth), height / (scale * naturalHeight)] : [1, 1];
}

const cover = (node, left, top, width, height) =>
  Object.entries({ left, top, width, height }).forEach(([name, fraction]) => (node.style[name] = `${100 * fraction}%`));

// The map is a mask of one colour, which the browser smooths.
export function showWhy({ explanation }, model, isOpen) {
  const { map, nearest } = explanation ?? {};
  element("seen").hidden = !(map && isOpen);
  element("where").textContent = map ? "Red: where the image is unusual to the network; the frame holds the most unusual part." : "";
  if (map && isOpen) {
    const [width, height] = seenOf(element("picture"), model.input);
    const [left, top, right, bottom] = map.box;
    cover(element("seen"), (1 - width) / 2, (1 - height) / 2, width, height);
    cover(element("box"), left, top, right - left, bottom - top);
    element("heat").style.maskImage = `url("data:image/png;base64,${map.png}")`;
  }
  element("nearest").hidden = !nearest?.length;
  element("nearest").querySelector("ul").replaceChildren(...(nearest ?? []).map((each) => kept(each, model)));
  element("evidence").replaceChildren(...evidence(explanation, model).map((text) => item(text)));
}

function kept(example, model) {
  const { distance, png } = example;
  const picture = Object.assign(document.createElement("img"), { src: `data:image/png;base64,${png}`, alt: "" });
  picture.addEventListener("load", () => picture.classList.toggle("pixels", picture.naturalWidth < SMALL_PIXELS / 2));
  const away = Object.assign(document.createElement("span"), { className: "muted", textContent: `${number(distance)}\u00a0σ` });
  return item(picture, taskOf(model).kept(example, model), away);
}

function item(...content) {
  const node = document.createElement("li");
  node.append(...content);
  return node;
}

function evidence(explanation, model) {
  if (!explanation) return [];
  const nearest = closest(explanation, model).slice(0, NEAREST);
  const task = taskOf(model);
  return [
    `${task.nearest}: ${nearest.map(({ name, distance }) => `${name} (${number(distance)})`).join(", ")}`,
    `Most unusual components: ${explanation.unusual_components
      .map(({ component, deviation }) => `${component} (${number(deviation)} σ)`)
      .join(", ")}`,
    ...task.evidence(explanation, model),
  ];
}
