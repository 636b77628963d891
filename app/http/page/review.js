// The review queue: logged images, one at a time, which a person with a key for feedback labels by a key or a tap.

import { FEEDBACK_KEY, getLoggedImage, getUnreviewed, hasFeedbackKey, sendLabel, useKey } from "./api.js";
import { DECISIONS } from "./decide.js";
import { SMALL_PIXELS } from "./grid.js";
import { pictureOf } from "./pictures.js";
import { keysOf, taskOf } from "./tasks.js";
import { reason } from "./why.js";

const AHEAD = 3; // the images that are loaded before their turn
const BESIDE = 12; // the most small pictures of images that look alike
const CLOSEST = 8; // the largest zoom
const LIKELY = 0.1; // the probability from which a class is said to fit
const GLANCE_MILLISECONDS = 150; // Nobody has judged an image so soon: the answer was meant for the one before.
const GONE = [404, 409]; // the errors of an image that was erased, or is no longer in the log
const REASONS = { ...DECISIONS, accept: "✓ Spot check" };
const CLUSTER = /^cluster [1-9]\d*$/; // what counts as no name
const TOGETHER = "One name for all. Choose a small image to take it out: it comes by itself.";
const element = (id) => document.getElementById(id);
const on = (id, event, act) => element(id).addEventListener(event, act);
const view = element("review");
const stage = element("stage");
const field = element("label");

let queue = []; // {image, model, cluster: its name, null by itself, answer: null or {words}, saved: an answer, picture: a promise, shown: when it was, in front or beside it}
let current = null; // the one in front
let alike = []; // it, and the others of its cluster that are shown beside it
let backTo = null; // the day back to which the service looked for images, if it had no time for all
let answered = []; // the images with an answer, the last one last
let sending = Promise.resolve(); // One label after the other, because the last one on an image counts.
let unsaved = 0; // labels
let failure = ""; // why a label was not saved since the log was searched
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
  failure = "";
  say("Looking…");
  try {
    await sending;
    const { value } = element("review-reason");
    const which = value === "to_name" ? { to_name: true } : { decision: value || Object.keys(DECISIONS) };
    const { images, models, back_to: day } = await getUnreviewed(which, element("review-model").value);
    if (latest !== own) return; // Another choice was made meanwhile.
    element("review-key-form").hidden = true;
    backTo = day;
    queue = images.map((image) => ({ image, model: models[image.bundle_version], cluster: image.name, answer: null }));
    turnTo(queue[0]);
    if (failure) say(failure);
    if (current === null) element("review-again").focus();
  } catch ({ status, message }) {
    turnTo(null);
    element("review-key-form").hidden = status !== 401;
    say(failure || (status === 401 && !hasFeedbackKey() ? "Enter the key that your administrator gave you." : message));
  }
}

function turnTo(item) {
  current = item ?? null;
  alike = current ? [item, ...queue.filter((each) => each !== item && item.cluster && looksAlike(each, item)).slice(0, BESIDE)] : [];
  for (const each of alike) each.shown = undefined;
  element("case").hidden = current === null;
  element("review-again").hidden = current !== null;
  progress();
  if (current === null) return;
  const { image, model } = current;
  const { decision, name: cluster, scores, checks, likely, policy } = image;
  const task = taskOf(model);
  const fitting = Object.keys(likely).filter((name) => likely[name] >= LIKELY);
  const why = decision === "accept" ? `The model is sure. ${task.checked}` : reason({ ...scores, checks, prediction_set: fitting }, decision, policy, model);
  const choices = cluster ? [] : task.choices(image, model);
  const type = cluster ? "text" : task.field;
  const keys = keysOf(choices, model.classes);
  element("case-badge").dataset.decision = cluster ? "" : decision;
  element("case-badge").textContent = cluster ?? REASONS[decision];
  const guess = task.guess(image);
  element("case-guess").textContent = cluster ? counted() : guess && `guess: ${guess}`;
  element("case-reason").textContent = cluster ? (alike.length > 1 ? TOGETHER : "") : why;
  element("alike").replaceChildren(...alike.slice(1).map(newSmall));
  element("case-time").textContent = `${new Date(image.time).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })} · ${image.model}`;
  element("answers").replaceChildren(...choices.map((name, index) => newAnswer(name, keys[index])));
  element("answers").classList.toggle("short", choices.every((name) => name.length < 4));
  const placeholder = cluster ? "a name, or a class" : choices.length === model.classes.length ? "something else: its name" : "another class, or a name";
  Object.assign(field, { value: "", type, step: "any", placeholder: (!cluster && task.hint?.(model)) || placeholder });
  element("label-names").replaceChildren(...(type === "text" ? [...(task.field === type ? model.classes : []), ...names] : []).map((name) => new Option(name)));
  show(current);
  (type === "text" ? stage : field).focus({ preventScroll: true });
}

const looksAlike = (a, b) => a.answer === null && a.cluster && a.cluster === b.image.name && a.image.model === b.image.model;
const together = () => alike.filter((item) => item === current || (item.cluster && item.shown));
const counted = () => (together().length > 1 ? `${together().length} images look alike` : "by itself");

// A click takes the image out of its cluster, or puts it back.
function newSmall(item, index) {
  const says = { type: "button", ariaLabel: `Take out image ${index + 2}`, ariaPressed: false };
  const button = Object.assign(document.createElement("button"), says);
  button.addEventListener("click", () => {
    item.cluster = item.cluster ? null : item.image.name;
    button.ariaPressed = !item.cluster;
    element("case-guess").textContent = counted();
  });
  return button;
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
  const own = alike;
  zoomTo(1);
  stage.replaceChildren();
  const from = queue.indexOf(item);
  for (const each of queue.slice(0, from)) each.picture = null;
  const picture = await load(item);
  if (alike !== own) return; // Another turn was taken meanwhile.
  stage.classList.toggle("none", picture === null);
  if (picture) stage.replaceChildren(picture);
  item.shown = performance.now();
  const beside = [...element("alike").children];
  for (const [index, each] of own.slice(1).entries()) {
    const small = await fetched(each, pictureOf).catch(() => null);
    if (alike !== own) return;
    if (small === null) continue;
    beside[index].append(small);
    each.shown = performance.now();
    element("case-guess").textContent = counted();
  }
  for (const next of queue.slice(from + 1).filter((each) => !alike.includes(each)).slice(0, AHEAD)) await load(next);
}

async function fetched({ image }, urlOf) {
  const picture = Object.assign(new Image(), { src: await urlOf(await getLoggedImage(image.file)), alt: "The image to review" });
  await picture.decode().finally(() => URL.revokeObjectURL(picture.src));
  picture.classList.toggle("pixels", picture.naturalWidth < SMALL_PIXELS);
  return picture;
}

async function load(item) {
  item.picture ??= fetched(item, URL.createObjectURL);
  return item.picture.catch(() => null); // It was erased before it was shown, or this browser cannot show it.
}

function answer(label, words) {
  if (!(performance.now() - current?.shown > GLANCE_MILLISECONDS)) return;
  const given = { words };
  for (const item of together()) {
    item.answer = given;
    answered.push(item);
    unsaved += 1;
    sending = sending.then(() => send(item, label, given));
  }
  next();
}

async function send(item, label, given) {
  const { request_id, image_index, image_sha256 } = item.image;
  try {
    await sendLabel({ request_id, image_index, image_sha256, ...label, source: "page" }).finally(() => (unsaved -= 1));
    item.saved = given;
    if (isCounting) progress();
  } catch ({ message, status }) {
    if (item.answer !== given) return; // It was taken back.
    item.answer = null; // The image comes again.
    answered = answered.filter((each) => each !== item);
    if (GONE.includes(status)) queue = queue.filter((each) => each !== item);
    element("review-key-form").hidden &&= status !== 401;
    progress();
    failure = `✕ “${given.words}” was not saved: ${message}`;
    say(failure);
  }
}

// Turn to the next image without an answer, of this cluster, from here on or from the first; after the last, look for more.
function next() {
  const from = queue.indexOf(current) + 1;
  const open = [...queue.slice(from), ...queue.slice(0, from)].filter((item) => item.answer === null);
  turnTo(open.find((item) => current && looksAlike(item, current)) ?? open[0]);
  if (open.length === 0) look();
}

// A label in the log is not withdrawn: the next one on the image overrides it.
function undo() {
  const { answer: given } = answered.at(-1);
  const again = answered.filter((item) => item.answer === given);
  answered = answered.filter((item) => item.answer !== given);
  for (const item of again) item.answer = null;
  queue.unshift(...again.filter((item) => !queue.includes(item)));
  turnTo(again[0]);
  say(`Answer again: until you do, “${given.words}” counts.`);
}

function submit(text) {
  const { image, model } = current;
  const task = taskOf(model);
  if (text === "" && image.name) return say("Nothing is saved: type a name.");
  if (text === "" && task.hint) return say(`Nothing is saved: ${task.hint(model)}.`);
  const label = text === "" ? task.guessed(image) : task.label(text, model);
  if (label === undefined && CLUSTER.test(text)) return say(`Nothing is saved: “${text}” counts as no name. Type another.`);
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
  else if (key.length === 1 && !(key === " " && target.closest("button"))) view.querySelector(`[data-key="${CSS.escape(key)}"]`)?.click();
  else return;
  event.preventDefault();
}

function progress() {
  const done = queue.filter((item) => item.answer !== null && item.saved === item.answer).length;
  const last = answered.at(-1)?.answer.words;
  element("undo").disabled = answered.length === 0;
  element("review-status").parentElement.style.setProperty("--done", done / queue.length || 0);
  const what = element("review-reason").value === "to_name" ? "a name, see psc-log review --clusters" : "a label";
  const none = backTo ? `No image since ${backTo} waits for ${what}. Older images are found by psc-log review.` : `No logged image waits for ${what}.`;
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
on("skip", "click", () => {
  if (current) current.cluster = null; // Where it is the odd one, the others come next, without it.
  next();
});
on("undo", "click", undo);
on("review-again", "click", look);
for (const id of ["review-reason", "review-model"]) on(id, "change", look);
on("label-form", "submit", (event) => {
  event.preventDefault();
  submit(field.value.trim());
});
on("review-key-form", "submit", (event) => {
  event.preventDefault();
  const fault = useKey(element("review-key").value, FEEDBACK_KEY);
  if (fault) return say(fault);
  element("review-key").value = "";
  look();
});
