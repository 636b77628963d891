// The latest images of the prediction log that were not accepted: a person with a key for feedback labels them.

import { getLoggedImage, getUnreviewed, sendLabel, useFeedbackKey } from "./api.js";
import { DECISIONS } from "./decide.js";
import { SMALL_PIXELS } from "./grid.js";
import { taskOf } from "./tasks.js";
import { reason } from "./why.js";

const WORDS = { none_of_the_classes: "None of the classes", cannot_tell: "Cannot tell" };
const element = (id) => document.getElementById(id);
const review = element("review");
const cases = element("cases");

export function offerReview({ feedback }) {
  review.hidden = !feedback;
}

export function startReview() {
  review.addEventListener("toggle", () => {
    if (review.open) look();
  });
  element("review-again").addEventListener("click", look);
  element("review-key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useFeedbackKey(element("review-key").value);
    element("review-key").value = "";
    look();
  });
}

async function look() {
  say("Looking…");
  try {
    const { images, models } = await getUnreviewed();
    element("review-key-form").hidden = true;
    for (const picture of cases.querySelectorAll("img")) URL.revokeObjectURL(picture.src);
    cases.replaceChildren(...images.map((image, index) => newCase(image, models[image.bundle_version], index + 1)));
    if (images.length > 0) progress();
    else say("No logged image waits for a label.");
  } catch ({ status, message }) {
    element("review-key-form").hidden = status !== 401;
    say(message);
  }
}

function newCase(image, model, position) {
  const item = element("case").content.firstElementChild.cloneNode(true);
  const form = item.querySelector("form");
  const task = taskOf(model);
  const part = (selector) => item.querySelector(selector);
  const prediction = { ...image.scores, checks: image.checks, prediction_set: [] };
  part(".badge").dataset.decision = image.decision;
  part(".badge").textContent = DECISIONS[image.decision];
  part(".guess").textContent = `guess: ${task.guess(image, model)}`;
  part(".reason").textContent = reason(prediction, image.decision, image.policy, model);
  part("time").dateTime = image.time;
  part("time").textContent = `${new Date(image.time).toLocaleString("en")} · ${image.model}`;
  form.setAttribute("aria-label", `Image ${position}`);
  part("img").alt = `Image ${position}`;
  showPicture(part("img"), image.file);
  for (const field of form.querySelectorAll("select, input")) {
    if (!field.matches(task.field)) field.remove();
  }
  part("select")?.append(...options(task.choices(image, model)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { value } = form.elements.label;
    save(item, image, { kind: "label", label: task.label(value) }, value);
  });
  for (const [kind, words] of Object.entries(WORDS)) {
    form.elements[kind].addEventListener("click", () => save(item, image, { kind }, words));
  }
  return item;
}

async function showPicture(picture, file) {
  picture.addEventListener("load", () => picture.classList.toggle("pixels", picture.naturalWidth < SMALL_PIXELS));
  picture.addEventListener("error", () => picture.parentElement.classList.add("none"));
  try {
    picture.src = URL.createObjectURL(await getLoggedImage(file));
  } catch {
    picture.parentElement.classList.add("none"); // The image was erased before it was shown.
  }
}

const options = (names) => [new Option("choose a class", ""), ...names.map((name) => new Option(name, name))];

async function save(item, { request_id, image_index, image_sha256 }, label, words) {
  const note = item.querySelector(".saved");
  const isFirst = !item.dataset.reviewed;
  try {
    await sendLabel({ request_id, image_index, image_sha256, ...label, source: "page" });
    item.dataset.reviewed = "true";
    delete note.dataset.decision;
    note.textContent = `✓ ${words}`;
    progress();
    if (isFirst) next(item)?.focus();
  } catch ({ message, status }) {
    note.dataset.decision = "error";
    note.textContent = `✕ ${message}`;
    element("review-key-form").hidden = status !== 401;
  }
}

// Return where the keyboard goes next: the next image without a label, from here on and then from the first.
function next(item) {
  const open = [...cases.children].filter((each) => !each.dataset.reviewed);
  const after = open.find((each) => item.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING);
  return (after ?? open[0])?.querySelector("select, input") ?? element("review-again");
}

function progress() {
  const reviewed = cases.querySelectorAll("[data-reviewed]").length;
  say(`${reviewed} of ${cases.children.length} reviewed.`);
}

function say(text) {
  element("review-status").textContent = text;
}
