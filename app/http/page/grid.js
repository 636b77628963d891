// The pictures, each with its decision: their order, which of them are shown, and which one has the keyboard.

import { DECISIONS } from "./decide.js";
import { breakable } from "./format.js";
import { pictureOf } from "./pictures.js";
import { taskOf } from "./tasks.js";

export const SMALL_PIXELS = 96;
const FILTERS = { all: "All", ...DECISIONS, error: "✕ Failed", differ: "≠ Models differ" };
const grid = document.getElementById("grid");
let current = null;

export function newTile(id, file) {
  const item = document.getElementById("tile").content.firstElementChild.cloneNode(true);
  const picture = item.querySelector("img");
  item.firstElementChild.id = id;
  picture.alt = file.name;
  const name = item.querySelector(".file");
  name.title = file.name;
  name.append(...breakable(file.name));
  picture.addEventListener("load", () => (picture.className = picture.naturalWidth < SMALL_PIXELS ? "pixels" : ""));
  picture.addEventListener("error", () => picture.parentElement.classList.add("none"));
  pictureOf(file).then((url) => {
    if (item.isConnected) picture.src = url;
    else URL.revokeObjectURL(url); // The page was cleared before the picture was ready.
  });
  return item;
}

// Show a tile without an answer, also of a second model.
export function showState(tile, decision, badge, label) {
  mark(tile, decision, badge, label);
  tile.querySelector(".rival").hidden = true;
}

function mark(line, decision, badge, label = "") {
  const text = line.querySelector(".badge");
  text.dataset.decision = decision;
  text.textContent = badge;
  line.querySelector(".label").replaceChildren(...breakable(String(label)));
}

export function showTile({ tile, prediction, decision, other }, model, rival) {
  const [own, second] = tile.querySelectorAll(".says");
  own.dataset.model = rival ? model.name : "";
  mark(own, decision, DECISIONS[decision], taskOf(model).answer(prediction, decision, model));
  second.hidden = !(rival && other);
  if (second.hidden) return;
  second.dataset.model = rival.name;
  mark(second, other.decision, DECISIONS[other.decision], taskOf(rival).answer(other.prediction, other.decision, rival));
}

const differs = ({ decision, other, prediction }) => other && (other.decision !== decision || other.prediction.label !== prediction.label);

const BELONGS = {
  all: () => true,
  error: ({ state }) => state === "failed",
  differ: (image) => image.state === "done" && differs(image),
  person: ({ state, decision }) => state === "done" && decision !== "accept",
};
const belongs = (image, filter) => (BELONGS[filter] ?? (({ state, decision }) => state === "done" && decision === filter))(image);
const LINE = {
  accept: (count, all) => `${count} of ${all} can be automated`,
  person: (count) => `${count} ${count === 1 ? "needs" : "need"} you`,
  error: (count) => `${count} failed`,
};

const mostUnusual = (a, b) => a.prediction.ood_p_value - b.prediction.ood_p_value || b.prediction.ood_score - a.prediction.ood_score;
const ranks = Object.keys(DECISIONS);
const ORDERS = {
  added: () => 0,
  unusual: mostUnusual,
  unclear: (a, b, { uncertainty }) => uncertainty(b.prediction) - uncertainty(a.prediction),
  decision: (a, b) => ranks.indexOf(a.decision) - ranks.indexOf(b.decision) || mostUnusual(a, b),
};

// Images that wait for an answer stay in front, where they were added; those that failed come last.
export function sorted(images, order, model) {
  const rank = ({ state, prediction }) => (prediction ? 1 : state === "failed" ? 2 : 0);
  return images.toSorted((a, b) => rank(a) - rank(b) || (rank(a) === 1 ? ORDERS[order](a, b, taskOf(model)) : 0));
}

export function arrange(images) {
  const focused = document.activeElement;
  const items = images.map(({ tile }) => tile);
  if (items.length === grid.children.length && items.every((item, index) => item === grid.children[index])) return;
  grid.replaceChildren(...items);
  if (grid.contains(focused)) focused.focus({ preventScroll: true });
}

// Say above several images how many need no person; each part filters to its own.
export function showFolder(images, filter) {
  const folder = document.getElementById("folder");
  folder.hidden = images.length < 2 || images.some(({ state }) => !["done", "failed"].includes(state));
  for (const button of folder.children) {
    const { filter: name } = button.dataset;
    const count = images.filter((image) => belongs(image, name)).length;
    button.textContent = LINE[name](count, images.length);
    button.hidden = count === 0 && name !== "accept";
    button.setAttribute("aria-pressed", name === filter);
  }
}

// Hide the images that do not match the filter, and show for each filter how many do.
export function showFilters(images, filter) {
  const buttons = Object.entries(FILTERS).flatMap(([name, text]) => {
    const count = images.filter((image) => belongs(image, name)).length;
    if (count === 0 && name !== filter) return [];
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: `${text} ${count}` });
    Object.assign(button.dataset, { filter: name, decision: name });
    button.setAttribute("aria-pressed", name === filter);
    return [button];
  });
  const filters = document.getElementById("filters");
  if (filters.textContent !== buttons.map((button) => button.textContent).join("") || !filters.querySelector(`[data-filter=${filter}][aria-pressed=true]`)) {
    const focused = filters.contains(document.activeElement) && document.activeElement.dataset.filter;
    filters.replaceChildren(...buttons);
    if (focused) filters.querySelector(`[data-filter=${focused}]`)?.focus();
  }
  for (const image of images) image.tile.hidden = !belongs(image, filter);
  const shown = visible(images);
  reach((shown.find(({ id }) => id === document.activeElement.id) ?? shown[0])?.id);
}

export const visible = (images) => images.filter(({ tile }) => !tile.hidden);

// The Tab key reaches one image; the arrow keys lead to the others.
export function reach(id, isOpen = false) {
  const tile = (name) => document.getElementById(name);
  if (current && tile(current)) tile(current).tabIndex = -1;
  grid.querySelector("[aria-current]")?.removeAttribute("aria-current");
  current = id ?? null;
  if (!current) return;
  tile(current).tabIndex = 0;
  if (isOpen) tile(current).setAttribute("aria-current", "true");
}

export function step(images, from, key) {
  const shown = visible(images);
  const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
  const here = shown.findIndex(({ id }) => id === from);
  const to = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowUp: here - columns, ArrowDown: here + columns, Home: 0, End: shown.length - 1 };
  return shown[to[key]];
}
