// The page at "/": sends each image to the service, shows the answers, and decides again when thresholds change.

import { canBeSentAgain, getExample, getExamples, getModel, isPassing, patiently, predict, Problem, useKey } from "./api.js";
import { decide } from "./decide.js";
import { offerDrawing, startDrawing } from "./draw.js";
import { percent } from "./format.js";
import { arrange, newTile, reach, showFilters, showFolder, showState, showTile, sorted, step, visible } from "./grid.js";
import { showLive } from "./live.js";
import { showReview } from "./review.js";
import { openPanel, reveal, showPanel } from "./panel.js";
import { dropped, forget, hurry, titleOf } from "./pictures.js";
import { drawChart } from "./plots.js";
import { chosen, showPolicy } from "./policy.js";
import { save, toCsv, toJson } from "./save.js";
import { taskOf } from "./tasks.js";
import { offerViews, startViews } from "./views.js";

const PARALLEL = 4;
const RETRY_MILLISECONDS = 1000;
const RENEWALS = 3;

const element = (id) => document.getElementById(id);
const on = (id, event, act) => element(id).addEventListener(event, act);
const panel = element("panel");
const view = { model: null, rival: null, policy: null }; // the thresholds of this page; the model's until they are changed
let images = []; // {id, file, tile, state: "waiting", "asked", "locked", "failed" or "done", prediction, decision, other, drawn, problem}
let modelLoading = null;
let modelProblem = null; // why no model is there
let filter = "all";
let opened = null; // the image that the panel shows
let running = 0;
let added = 0; // the number of images ever added, for their ids
let drawing = false;
let isFirst = false; // the first of several images that needs a person is still to be opened, unless a person opens one

// A service that is loading or restarting is asked again; the images wait until then. One that came back with other
// models is asked for its default.
async function loadModel(name = null) {
  try {
    view.model = await getModel(name);
  } catch (problem) {
    if (problem.status === 404 && name !== null) return loadModel();
    modelProblem = problem;
    element("key-form").hidden = problem.status !== 401;
    element("model").textContent = problem.message;
    say(problem.message);
    if (!isPassing(problem)) {
      if (view.model !== null) element("models").value = view.model.name;
      return;
    }
    await new Promise((done) => setTimeout(done, RETRY_MILLISECONDS));
    return loadModel(name);
  }
  const { model } = view;
  say("");
  view.policy = { ...model.policy };
  element("model").textContent = `${model.name} · version ${model.version.slice(0, 12)} · ${taskOf(model).summary(model)} · layer ${model.layer} · α = ${model.policy.alpha}`;
  element("recognises").textContent = taskOf(model).recognises(model);
  element("expects").textContent = expects(model.input);
  fill("models", model.models, model.name);
  fill("rivals", model.models.filter((each) => each !== model.name), view.rival?.name, "nothing");
  if (view.rival?.name === model.name || !model.models.includes(view.rival?.name)) view.rival = null;
  element("models-field").hidden = model.models.length < 2;
  offerDrawing(model.input);
  offerViews(model);
  redraw();
  showExamples(model.name);
}

function fill(id, names, selected, none = null) {
  const options = names.map((name) => new Option(name, name, false, name === selected));
  element(id).replaceChildren(...(none === null ? [] : [new Option(none, "")]), ...options);
}

function expects({ mode, height, width, resize }) {
  const colour = mode === "L" ? "grey" : "colour";
  const cut = resize ? `, cut from the centre of ${resize} pixels` : "";
  return `The network sees ${colour} images of ${width} × ${height} pixels${cut}; others are converted.`;
}

// At most once per frame, however many answers or slider moves there are.
function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  const { model, policy, rival } = view;
  element("work").hidden = element("actions").hidden = images.length === 0;
  element("again").hidden = !images.some(({ state, isWorthATry }) => state === "failed" && isWorthATry);
  document.body.classList.toggle("busy", images.length > 0);
  if (model === null) return;
  const done = decided();
  for (const image of done) {
    const { decision, prediction, other, drawn } = image;
    if (drawn?.decision === decision && drawn.prediction === prediction && drawn.other === other) continue;
    image.drawn = { decision, prediction, other };
    showTile(image, model, rival);
  }
  showFilters(images, filter);
  showFolder(images, filter);
  showPolicy(policy, model, done);
  drawChart(element("chart"), done, policy, model, opened?.id);
  if (!panel.open || !opened) return;
  const shown = visible(images);
  showPanel(opened, view, opened.tile.hidden ? "" : `${shown.indexOf(opened) + 1} of ${shown.length}`);
  if (!opened.tile.hidden) reach(opened.id, true);
}

// Return the images that have an answer, each with its decision under the thresholds of this page.
function decided() {
  const done = images.filter(({ state }) => state === "done");
  for (const image of done) image.decision = decide(image.prediction, view.policy, view.model);
  return done;
}

function resort() {
  decided();
  images = sorted(images, element("sort").value, view.model);
  arrange(images);
  redraw();
}

async function showExamples(name) {
  const names = await getExamples(name).catch(() => []);
  const files = (await Promise.all(names.map((file) => getExample(name, file).catch(() => null)))).filter(Boolean);
  const titles = new Map(await Promise.all(files.map(async (file) => [file, await titleOf(file)])));
  if (name !== view.model?.name) return;
  files.sort((a, b) => titles.get(a).localeCompare(titles.get(b), undefined, { numeric: true }));
  const buttons = files.map((file) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "example" });
    button.append(Object.assign(new Image(), { src: URL.createObjectURL(file), alt: "" }), titles.get(file) || "What does the model say?");
    button.addEventListener("click", () => {
      const asked = images.find((image) => image.file === file);
      if (asked) open(asked, false);
      else add([file]);
    });
    return button;
  });
  element("examples").replaceChildren(...buttons);
  element("examples").hidden = files.length === 0;
}

// A single image is opened at once; of several that come first, one that needs a person.
function add(files, isDrawn = false) {
  const entries = [...files].map((file) => {
    added += 1;
    const id = `image-${added}`;
    return { id, file, tile: newTile(id, file), state: "waiting" };
  });
  if (entries.length === 0) return;
  element("draw").open &&= isDrawn;
  isFirst = entries.length > 1 && images.length === 0;
  images.unshift(...entries);
  arrange(images);
  if (entries.length === 1) open(entries[0], false);
  for (const image of entries.filter(({ file }) => file.type !== "" && !file.type.startsWith("image/"))) {
    fail(image, new Problem(415, `Not an image (${image.file.type}), so it was not sent; choose a JPEG or PNG file.`));
  }
  progress();
  work();
}

function work() {
  for (const image of images.filter(({ state }) => state === "waiting")) {
    if (running >= PARALLEL) return;
    image.state = "asked";
    running += 1;
    ask(image).finally(() => {
      running -= 1;
      work();
    });
  }
  if (running > 0) return;
  resort();
  if (isFirst) open(images[0], false);
  isFirst = false;
}

async function ask(image) {
  showState(image.tile, "waiting", "Classifying…");
  let sent;
  try {
    await modelLoading;
    sent = { ...view };
    const { model, rival } = sent;
    if (model === null) throw modelProblem;
    const [answer, second] = await Promise.all([model, rival].map((each) => each && predict(each.name, image.file)));
    image.version = answer.model.version;
    if (!areOthers(sent) && image.version !== view.model.version) await renew(model); // The model was reloaded.
    if (!areOthers(sent) && second && second.model.version !== view.rival.version) view.rival = await getModel(rival.name).catch(() => view.rival);
    if (!images.includes(image)) return; // It was cleared before the answer came.
    if (areOthers(sent)) return wait(image);
    [image.prediction] = answer.predictions;
    image.other = second ? { prediction: second.predictions[0], decision: second.predictions[0].decision } : null;
    image.state = "done";
    if (isFirst && image.prediction.decision !== "accept") open(image, false);
    isFirst &&= image !== opened;
    if (image === opened) explain();
  } catch (problem) {
    if (!images.includes(image)) return;
    if (problem.status === 404 && sent.model !== null && (await areGone(sent))) return wait(image);
    fail(image, problem);
  }
  progress();
}

// Load the reloaded model, and ask again about the images that an older version has answered: its thresholds and classes
// may be others. While workers are replaced one by one, both versions answer, so an image is asked again only so often.
async function renew(model) {
  await (modelLoading = loadModel(model.name));
  for (const image of images) {
    const isOld = image.state === "done" && image.version !== view.model.version;
    if (!isOld || (image.renewed ?? 0) >= RENEWALS) continue;
    image.renewed = (image.renewed ?? 0) + 1;
    wait(image);
  }
}

// Return whether other models were chosen since an image was sent to these.
const areOthers = ({ model, rival }) => model.name !== view.model?.name || rival?.name !== view.rival?.name;

// Return whether the service no longer has a model that an image was sent to; all images then go to one that it has.
async function areGone(sent) {
  if (areOthers(sent)) return true;
  await (modelLoading = loadModel(sent.model.name));
  if (areOthers(sent)) again("done", "failed");
  return areOthers(sent);
}

// The answer of another model must neither be decided, drawn nor saved as this one's.
function wait(image) {
  Object.assign(image, { state: "waiting", prediction: null, other: null, problem: null });
  showState(image.tile, "waiting", "Waiting…");
}

function fail(image, problem) {
  const wantsKey = problem.status === 401;
  element("key-form").hidden &&= !wantsKey;
  const message = problem.message.replace(/^image 0 \('.*?'\): /, ""); // The page says which by its name.
  Object.assign(image, { state: wantsKey ? "locked" : "failed", prediction: null, problem: message, isWorthATry: problem === modelProblem || canBeSentAgain(problem) });
  showState(image.tile, "error", "✕ Failed", message);
}

function again(...states) {
  for (const image of images) {
    if (states.includes(image.state)) wait(image);
  }
  progress();
  work();
}

function progress() {
  const [done, failed] = ["done", "failed"].map((state) => images.filter((image) => image.state === state).length);
  const text = `${done} of ${images.length} ${images.length === 1 ? "image" : "images"} classified`;
  say(images.length === 0 ? "" : failed === 0 ? `${text}.` : `${text}, ${failed} failed.`);
  redraw();
}

function say(text) {
  element("status").textContent = text;
}

function open(image, takesFocus = true) {
  if (image.tile.hidden || image.state === "waiting") filter = "all";
  opened = image;
  isFirst &&= !takesFocus;
  hurry(image.file);
  openPanel(takesFocus);
  redraw();
  if (takesFocus) image.tile.scrollIntoView({ block: "nearest" });
  if (!isFirst) requestAnimationFrame(reveal);
  explain();
}

// The map is requested when "Why?" is opened, once per image.
async function explain() {
  const [image, { model }] = [opened, view];
  const wanted = element("why").open && image?.prediction && image.mapped !== image.prediction && !model.isWithoutMap;
  if (!wanted) return redraw();
  image.mapped = image.prediction;
  try {
    const answer = await predict(model.name, image.file, { map: true });
    if (image.mapped === image.prediction) image.prediction.explanation = answer.predictions[0].explanation;
  } catch ({ status }) {
    image.mapped = null; // The error is shown, and the map is requested again the next time.
    model.isWithoutMap = status === 422; // The model was fitted without a map.
  }
  redraw();
}

function move(key, fromPanel) {
  const from = fromPanel ? opened?.id : document.activeElement.id;
  const next = step(images, from, key);
  if (!next) return;
  if (panel.open) open(next);
  if (fromPanel) return;
  reach(next.id, panel.open);
  element(next.id).focus();
}

function clear() {
  for (const { tile } of images) URL.revokeObjectURL(tile.querySelector("img").src);
  forget();
  images = [];
  isFirst = false;
  filter = "all";
  panel.close();
  arrange(images);
  progress();
  element("files").focus();
}

const drop = element("upload");
for (const id of ["files", "photo"]) {
  on(id, "change", (event) => {
    add(event.target.files);
    event.target.value = "";
  });
}
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    if (name === "drop" || event.relatedTarget === null) drop.classList.remove("over");
  });
}
document.addEventListener("drop", (event) => dropped(event.dataTransfer).then((files) => add(files), ({ message }) => say(message)));
document.addEventListener("paste", (event) => add(event.clipboardData.files));

for (const id of ["alpha", "limit"]) {
  on(id, "input", (event) => {
    if (view.model === null) return;
    const done = images.filter(({ state }) => state === "done");
    view.policy = chosen(view.policy, view.model, done, event.target);
    redraw();
  });
  on(id, "change", resort);
}
on("reset", "click", () => {
  view.policy = { ...view.model.policy };
  resort();
});
on("sort", "change", resort);
for (const id of ["filters", "folder"]) {
  on(id, "click", ({ target }) => {
    filter = target.closest("button")?.dataset.filter ?? filter;
    redraw();
  });
}
element("grid").addEventListener("load", redraw, true); // The picture that has loaded may be the one in the panel.
for (const id of ["grid", "chart"]) {
  on(id, "click", ({ target }) => {
    const chosenId = target.closest(".tile")?.id ?? target.closest(".mark")?.dataset.id;
    const image = images.find(({ id: each }) => each === chosenId);
    if (image) open(image);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return; // The browser's own, as Alt + ← is.
  const inPanel = panel.contains(event.target);
  if (event.key === "Escape" && panel.open) panel.close();
  else if (inPanel ? ["ArrowLeft", "ArrowRight"].includes(event.key) : event.target.closest(".tile")) move(event.key, inPanel);
  else return;
  if (event.key.startsWith("Arrow")) event.preventDefault();
});
on("previous", "click", () => move("ArrowLeft", true));
on("next", "click", () => move("ArrowRight", true));
on("close", "click", () => panel.close());
on("panel", "close", () => {
  const last = opened;
  opened = null;
  isFirst = false;
  if (last && images.includes(last)) {
    if (!last.tile.hidden) reach(last.id);
    element("grid").querySelector("[tabindex='0']")?.focus();
  }
  redraw();
});
on("why", "toggle", explain);
on("picture", "load", redraw);
on("picture", "error", redraw);
on("again", "click", () => {
  if (view.model === null) modelLoading = loadModel();
  again("failed");
});
on("csv", "click", () => save("psc.csv", "text/csv", toCsv(visible(images), view)));
on("json", "click", () => save("psc.json", "application/json", toJson(visible(images), view)));
on("clear", "click", clear);
on("models", "change", (event) => {
  modelLoading = loadModel(event.target.value).then(() => again("done", "failed"));
});
on("rivals", "change", async (event) => {
  try {
    const name = event.target.value;
    view.rival = name ? await patiently(() => getModel(name)) : null;
  } catch (problem) {
    event.target.value = view.rival?.name ?? ""; // Compared as before.
    return say(problem.message);
  }
  again("done", "failed");
});
on("key-form", "submit", (event) => {
  event.preventDefault();
  const fault = useKey(element("key").value);
  if (fault) return say(fault);
  element("key").value = "";
  element("key-form").hidden = true;
  const before = view.model;
  modelLoading = loadModel(before?.name).then(() => {
    const isOther = before && (before.name !== view.model.name || before.version !== view.model.version);
    again("locked", ...(isOther ? ["done", "failed"] : []));
  });
});
element("policy").open = matchMedia("(min-width: 48rem)").matches;
modelLoading = loadModel();
startDrawing((file) => add([file], true));
startViews({ "#review": showReview, "#live": showLive });
