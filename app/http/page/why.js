// Why an image was decided so: in one sentence, on the picture, and by the nearest training images.

import { alarming } from "./decide.js";
import { make, number } from "./format.js";
import { SMALL_PIXELS } from "./grid.js";
import { taskOf } from "./tasks.js";

const NEAREST = 3;
const ORDINARY = 144; // the level of a map that one in 180 positions of ordinary images reaches: below it, nothing is drawn
const FAR = 1.25; // times the usual distance to stored images: 95 in 100 ordinary images are nearer
const WIDE = 0.6; // of the image's area; a larger region is called no place
const UNUSUAL = {
  texture: "texture that no training image has",
  content: "content unlike that of the training images",
  confidence: "fits the classes worse than the training images do",
};
const NONE = "none_of_the_classes"; // reviewed images to which nobody gave a name
const element = (id) => document.getElementById(id);

export function reason(prediction, decision, policy, model) {
  if (decision === "abstain_ood") {
    const words = { ...UNUSUAL, reviewed: likeReviewed(prediction.explanation?.reviewed) };
    const unusual = alarming(prediction).map((check) => words[check] ?? check).join(", and ") || "unlike the training images";
    const where = place(prediction.explanation?.map);
    return sentence(`${unusual}${where && `, ${where}`}`);
  }
  if (decision === "accept") return "Looks like the training images, and the model is confident enough.";
  return sentence(taskOf(model).reason(prediction, policy, model));
}

function likeReviewed({ name = NONE, images, day } = {}) {
  const which = name === NONE ? "none of the classes" : `“${name}”`;
  const when = day ? `, most of them on ${new Date(day).toLocaleDateString("en", { dateStyle: "medium", timeZone: "UTC" })}` : "";
  return `like ${images ? `${images} ` : ""}images that people reviewed as ${which}${when}`;
}

export const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}.`;

// Return "mainly in the upper left" and the like for a map's box, in fractions of the image.
function place(map) {
  if (!(map?.peak >= ORDINARY)) return "";
  const [left, top, right, bottom] = map.box;
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

// What is accepted has no map.
export function showWhy({ explanation, label }, decision, model, isOpen) {
  const { map, reviewed } = explanation ?? {};
  const nearest = reviewed?.nearest ?? explanation?.nearest;
  const isDrawn = isOpen && decision !== "accept" && map?.peak >= ORDINARY;
  element("seen").hidden = !isDrawn;
  element("where").replaceChildren(...(isDrawn ? ["Where it is: unusual ", legend(), " extreme"] : []));
  if (isDrawn) {
    const [width, height] = seenOf(element("picture"), model.input);
    const [left, top, right, bottom] = map.box;
    cover(element("seen"), (1 - width) / 2, (1 - height) / 2, width, height);
    cover(element("box"), left, top, right - left, bottom - top);
    draw(map.png);
  }
  element("nearest").hidden = !nearest?.length;
  element("nearest").querySelector("h3").textContent = `Most similar ${nearest === reviewed?.nearest ? "reviewed" : "training"} images`;
  element("nearest").querySelector("ul").replaceChildren(...(nearest ?? []).map((each) => kept(each, model)));
  element("evidence").replaceChildren(...evidence(explanation, label, model).map((text) => make("li", "", text)));
}

// Light to dark in one hue, so that it can be read in any colours; opaque enough on black and on white.
const shade = (part) => `oklch(${0.92 - 0.37 * part} ${0.08 + 0.11 * part} 45 / 0.8)`;

function legend() {
  const ramp = make("span", "ramp");
  ramp.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(shade).join(", ")})`;
  return ramp;
}

// Draw a map from the level that ordinary images seldom reach; the browser smooths it.
async function draw(png) {
  if (element("heat").dataset.png === png) return;
  element("heat").dataset.png = png;
  const grey = Object.assign(new Image(), { src: `data:image/png;base64,${png}` });
  await grey.decode();
  const [width, height] = [grey.naturalWidth, grey.naturalHeight];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(grey, 0, 0);
  const levels = context.getImageData(0, 0, width, height).data.filter((_, index) => index % 4 === 0);
  context.clearRect(0, 0, width, height);
  levels.forEach((level, at) => {
    if (level < ORDINARY) return;
    context.fillStyle = shade((level - ORDINARY) / (255 - ORDINARY));
    context.fillRect(at % width, Math.floor(at / width), 1, 1);
  });
  if (element("heat").dataset.png === png) element("heat").replaceChildren(canvas); // Another image may be open by now.
}

function kept(example, model) {
  const { distance, relative_distance: times, png } = example;
  const far = times === undefined ? `${number(distance)}\u00a0σ` : times < FAR ? "as near as usual" : `${Number(times.toPrecision(2))}\u00a0× as far as usual`;
  const picture = Object.assign(document.createElement("img"), { src: `data:image/png;base64,${png}`, alt: "" });
  picture.addEventListener("load", () => picture.classList.toggle("pixels", picture.naturalWidth < SMALL_PIXELS / 2));
  return make("li", "", picture, taskOf(model).kept(example, model), make("span", "muted", far));
}

function evidence(explanation, label, model) {
  if (!explanation) return [];
  const nearest = closest(explanation, model).slice(0, NEAREST);
  const task = taskOf(model);
  const isOther = label !== undefined && label !== nearest[0].name;
  return [
    `${task.nearest}: ${nearest.map(({ name, distance }) => `${name} (${number(distance)})`).join(", ")}${isOther ? `, by the features that find unusual images; others say ${label}` : ""}`,
    `Most unusual components: ${explanation.unusual_components
      .map(({ component, deviation }) => `${component} (${number(deviation)} σ)`)
      .join(", ")}`,
    ...task.evidence(explanation, model),
  ];
}
