// The review queue: logged images, one at a time, which a person with a key for feedback labels by a key or a tap.

import { getLoggedImage, getUnreviewed, hasFeedbackKey, sendLabel, useFeedbackKey } from "./api.js";
import { DECISIONS } from "./decide.js";
import { SMALL_PIXELS } from "./grid.js";
import { keysOf, taskOf } from "./tasks.js";
import { reason } from "./why.js";

const AHEAD = 4; // the images that are loaded before their turn
const CLOSEST = 8; // the largest zoom
const LIKELY = 0.1; // the probability from which a class is said to fit
const GLANCE_MILLISECONDS = 150; // Nobody has judged an image so soon: the answer was meant for the one before.
const GONE = [404, 409]; // the errors of an image that was erased, or is no longer in the log
const REASONS = { ...DECISIONS, accept: "✓ Spot check" };
const SPOT_CHECK = "The model is sure. A random sample shows how often it is right.";
const element = (id) => document.getElementById(id);
const on = (id, event, act) => element(id).addEventListener(event, act);
const view = element("review");
const stage = element("stage");
const field = element("label");

let queue = []; // {image, model, answer: null or {words, isSaved}, picture: a promise, shown: when}
let current = null; // the one in front
let backTo = null; // the day back to which the service looked for images, if it had no time for all
let answered = []; // the images with an answer, the last one last
let sending = Promise.resolve(); // One label after the other, because the last one on an image counts.
let unsaved = 0; // labels
let isCounting = false; // the status shows how many are done
let latest = null; // the last search of the log
let zoom = 1;
let proposed = ""; // a text that is no class, until it is saved again
const names = new Set(); // that were given here to what is none of the classes

export function showReview({ models }) {
  const choice = element("review-model");
  for (const name of models.slice(choice.length - 1)) choice.add(new Option(name, name));
  choice.hidden = models.length < 2;
  if (current === null) look();
  else stage.focus({ preventScroll: true });
}

async function look() {
  const own = {};
  latest = own;
  say("Looking…");
  try {
    await sending;
    const decision = element("review-reason").value || Object.keys(DECISIONS);
    const { images, models, back_to: day } = await getUnreviewed(decision, element("review-model").value);
    if (latest !== own) return; // Another choice was made meanwhile.
    element("review-key-form").hidden = true;
    backTo = day;
    queue = images.map((image) => ({ image, model: models[image.bundle_version], answer: null }));
    turnTo(queue[0]);
    if (current === null) element("review-again").focus();
  } catch ({ status, message }) {
    turnTo(null);
    element("review-key-form").hidden = status !== 401;
    say(status === 401 && !hasFeedbackKey() ? "Enter the key that your administrator gave you." : message);
  }
}

function turnTo(item) {
  current = item ?? null;
  element("case").hidden = current === null;
  element("review-again").hidden = current !== null;
  element("undo").disabled = answered.length === 0;
  progress();
  if (current === null) return;
  const { image, model } = current;
  const { decision, scores, checks, likely, policy } = image;
  const task = taskOf(model);
  const fitting = Object.keys(likely).filter((name) => likely[name] >= LIKELY);
  const why = decision === "accept" ? SPOT_CHECK : reason({ ...scores, checks, prediction_set: fitting }, decision, policy, model);
  const choices = task.choices(image, model);
  const keys = keysOf(choices, model.classes);
  element("case-badge").dataset.decision = decision;
  element("case-badge").textContent = REASONS[decision];
  element("case-guess").textContent = `guess: ${task.guess(image, model)}`;
  element("case-reason").textContent = why;
  element("case-time").textContent = `${new Date(image.time).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })} · ${image.model}`;
  element("answers").replaceChildren(...choices.map((name, index) => newAnswer(name, keys[index])));
  element("answers").classList.toggle("short", choices.every((name) => name.length < 4));
  const placeholder = choices.length === model.classes.length ? "something else: its name" : "another class, or a name";
  Object.assign(field, { value: "", type: task.field, step: "any", placeholder: task.hint?.(model) ?? placeholder });
  element("label-names").replaceChildren(...(task.field === "text" ? [...model.classes, ...names] : []).map((name) => new Option(name)));
  show(current);
  (task.field === "text" ? stage : field).focus({ preventScroll: true });
}

function newAnswer(name, key = "") {
  const button = Object.assign(document.createElement("button"), { type: "button" });
  button.append(...([name, ""].includes(key) ? [] : [Object.assign(document.createElement("kbd"), { textContent: key }), " "]), name);
  button.dataset.key = key;
  button.classList.toggle("guessed", name === current.image.label);
  button.style.setProperty("--done", current.image.likely[name] ?? 0);
  button.addEventListener("click", () => answer({ kind: "label", label: name }, name));
  return button;
}

// The images behind this one are loaded too; those before it are let go.
async function show(item) {
  zoomTo(1);
  stage.replaceChildren();
  const from = queue.indexOf(item);
  for (const each of queue.slice(0, from)) each.picture = null;
  const picture = await load(item);
  if (item !== current) return;
  stage.classList.toggle("none", picture === null);
  if (picture) stage.replaceChildren(picture);
  item.shown = performance.now();
  for (const next of queue.slice(from + 1, from + AHEAD)) await load(next);
}

async function load(item) {
  item.picture ??= getLoggedImage(item.image.file).then(async (file) => {
    const picture = Object.assign(new Image(), { src: URL.createObjectURL(file), alt: "The image to review" });
    await picture.decode().finally(() => URL.revokeObjectURL(picture.src));
    picture.classList.toggle("pixels", picture.naturalWidth < SMALL_PIXELS);
    return picture;
  });
  return item.picture.catch(() => null); // It was erased before it was shown, or this browser cannot show it.
}

function answer(label, words) {
  const item = current;
  if (!(performance.now() - item?.shown > GLANCE_MILLISECONDS)) return;
  const given = { words, isSaved: false };
  item.answer = given;
  answered.push(item);
  unsaved += 1;
  sending = sending.then(() => send(item, label, given));
  next();
}

async function send(item, label, given) {
  const { request_id, image_index, image_sha256 } = item.image;
  try {
    await sendLabel({ request_id, image_index, image_sha256, ...label, source: "page" }).finally(() => (unsaved -= 1));
    given.isSaved = true;
    if (isCounting) progress();
  } catch ({ message, status }) {
    if (item.answer !== given) return; // It was taken back.
    item.answer = null; // The image comes again.
    answered = answered.filter((each) => each !== item);
    if (GONE.includes(status)) queue = queue.filter((each) => each !== item);
    element("review-key-form").hidden &&= status !== 401;
    progress();
    say(`✕ “${given.words}” was not saved: ${message}`);
  }
}

// Turn to the next image without an answer, from here on and then from the first; after the last, look for more.
function next() {
  const from = queue.indexOf(current) + 1;
  const open = [...queue.slice(from), ...queue.slice(0, from)].find((item) => item.answer === null);
  turnTo(open);
  if (!open) look();
}

// A label in the log is not withdrawn: the next one on the image overrides it.
function undo() {
  const item = answered.pop();
  const { words } = item.answer;
  item.answer = null;
  if (!queue.includes(item)) queue.unshift(item);
  turnTo(item);
  say(`Answer again: until you do, “${words}” counts.`);
}

function submit(text) {
  const { image, model } = current;
  const task = taskOf(model);
  if (text === "" && task.hint) return say(`Nothing is saved: ${task.hint(model)}.`);
  const label = text === "" ? task.guessed(image) : task.label(text, model);
  if (label === undefined && (names.has(text) || text === proposed)) {
    names.add(text);
    answer({ kind: "none_of_the_classes", label: text }, text);
  } else if (label === undefined) {
    proposed = text;
    const name = task.completed(text, model);
    if (name) {
      field.value = name;
      field.setSelectionRange(text.length, name.length); // One key deletes what was not typed.
      say(`Save again for “${name}”, or save “${text}” once more to call it that: none of the classes.`);
    } else say(`No class is “${text}”. Save again to call it that: none of the classes.`);
  } else answer({ kind: "label", label }, String(text === "" ? task.guess(image, model) : label));
}

function zoomTo(factor, x = 0.5, y = 0.5) {
  zoom = Math.min(CLOSEST, Math.max(1, factor));
  stage.style.setProperty("--zoom", zoom);
  stage.scrollTo(x * stage.scrollWidth - stage.clientWidth / 2, y * stage.scrollHeight - stage.clientHeight / 2);
}

// A key presses the button that shows it; a field takes the keys of what is typed.
function press(event) {
  const { target, ctrlKey, metaKey, altKey, repeat } = event;
  const key = event.key.toLowerCase().replace("=", "+");
  const isTyping = target.matches("select, input") && !(target.type === "number" && target.value === "" && /^[a-z]$/.test(key));
  if ((isTyping && key !== "escape") || repeat || altKey || ((ctrlKey || metaKey) && key !== "z")) return;
  if (key === "escape") stage.focus();
  else if (key === "enter" && !target.closest("button") && current) submit("");
  else if (key === "/") field.focus();
  else if (key.length === 1) view.querySelector(`[data-key="${CSS.escape(key)}"]`)?.click();
  else return;
  event.preventDefault();
}

function progress() {
  const done = queue.filter((item) => item.answer?.isSaved).length;
  const last = answered.at(-1)?.answer.words;
  element("review-status").parentElement.style.setProperty("--done", done / queue.length || 0);
  const none = backTo ? `No image since ${backTo} waits for a label. Older images are found by psc-log review.` : "No logged image waits for a label.";
  if (queue.length === 0) say(`${answered.length > 0 ? `${answered.length} done. ` : ""}${none}`);
  else say(`${done} of ${queue.length} done${unsaved ? `, saving ${unsaved}` : ""}${last ? `, last: ${last}` : ""}`);
  isCounting = true;
}

function say(text) {
  isCounting = false;
  element("review-status").textContent = text;
}

addEventListener("beforeunload", (event) => unsaved > 0 && event.preventDefault()); // The browser then asks.
view.addEventListener("keydown", press);
stage.addEventListener("click", ({ clientX, clientY }) => {
  const { left, top, width, height } = (stage.firstElementChild ?? stage).getBoundingClientRect();
  zoomTo(zoom === CLOSEST ? 1 : 2 * zoom, (clientX - left) / width, (clientY - top) / height);
});
on("closer", "click", () => zoomTo(2 * zoom));
on("farther", "click", () => zoomTo(zoom / 2));
on("none", "click", () => answer({ kind: "none_of_the_classes" }, "none of these"));
on("unknown", "click", () => answer({ kind: "cannot_tell" }, "cannot tell"));
on("skip", "click", next);
on("undo", "click", undo);
on("review-again", "click", look);
for (const id of ["review-reason", "review-model"]) on(id, "change", look);
on("label-form", "submit", (event) => {
  event.preventDefault();
  submit(field.value.trim());
});
on("review-key-form", "submit", (event) => {
  event.preventDefault();
  const fault = useFeedbackKey(element("review-key").value);
  if (fault) return say(fault);
  element("review-key").value = "";
  look();
});
