// The page at "/": sends each image to the service, shows what it says, and decides again when thresholds change.

import { getExample, getExamples, getLive, getModel, predict, Problem, useKey } from "./api.js";
import { mark, newCard, show } from "./cards.js";
import { decide } from "./decide.js";
import { percent } from "./format.js";
import { summary, thresholdName, thresholdOf, thresholdText } from "./kinds.js";
import { drawMap } from "./plots.js";

const PARALLEL = 4;
const LIVE_MILLISECONDS = 2000;

const element = (id) => document.getElementById(id);
const results = element("results");
let images = []; // {id, file, card, state: "waiting", "locked", "failed" or "done", said, decision}
let model = null;
let modelLoading = null;
let policy = null; // the thresholds of this page; the model's until they are changed
let running = 0;
let added = 0; // ever, for the ids

async function loadModel(name = null) {
  try {
    model = await getModel(name);
  } catch (problem) {
    element("key-form").hidden = problem.status !== 401;
    element("model").textContent = problem.message;
    return;
  }
  const version = model.version ? ` · version ${model.version.slice(0, 12)}` : "";
  element("model").textContent =
    `${model.name}${version} · ${summary(model)} · layer ${model.layer} · α = ${model.policy.alpha}`;
  element("expects").textContent = expects(model.input);
  element("models").replaceChildren(...model.models.map((each) => new Option(each, each, false, each === model.name)));
  element("models-field").hidden = model.models.length < 2;
  resetPolicy();
  showLive();
  showExamples(await getExamples(model.name).catch(() => []));
}

function expects({ mode, height, width, resize }) {
  const colour = mode === "L" ? "grey" : "colour";
  const cut = resize ? `, cut from the centre of ${resize} pixels` : "";
  return `The network sees ${colour} images of ${width} × ${height} pixels${cut}; others are converted.`;
}

function resetPolicy() {
  policy = { ...model.policy };
  element("alpha").min = 1 / (model.calibration.images + 1);
  element("alpha").value = policy.alpha;
  element("threshold-name").textContent = thresholdName(model);
  element("threshold").value = thresholdText(policy, model);
  decideAgain();
}

function changePolicy() {
  const [alpha, threshold] = [element("alpha"), element("threshold")];
  if (alpha.checkValidity() && alpha.value !== "") policy.alpha = alpha.valueAsNumber;
  if (threshold.checkValidity() && threshold.value !== "") policy[thresholdOf(model)] = threshold.valueAsNumber;
  if (model.target && threshold.validity.valid && threshold.value === "") policy.max_width = null;
  decideAgain();
}

function decideAgain() {
  const done = images.filter(({ state }) => state === "done");
  for (const image of done) {
    image.decision = decide(image.said, policy, model.calibration.images);
    show(image.card, image, policy, model);
  }
  const isOwn = Object.keys(policy).every((name) => policy[name] === model.policy[name]);
  element("policy-note").textContent = isOwn ? "" : "These thresholds are this page's; the service keeps its own.";
  element("map-section").hidden = done.length === 0;
  const dots = done.map(({ said, decision, file, id }) => ({ said, decision, name: file.name, id }));
  drawMap(element("map"), dots, policy, model);
}

async function showLive() {
  if (model === null || document.visibilityState !== "visible") return;
  try {
    const live = await getLive(model.name);
    const seen = `${percent(live.ood_fraction)} of the last ${live.images} images out of distribution (α = ${percent(live.alpha)})`;
    const alarms = live.drift_alarms === 1 ? "1 drift alarm" : `${live.drift_alarms || "no"} drift alarms`;
    element("live").textContent =
      `${live.images === 0 ? "No image yet" : seen} · ${alarms} · queue ${live.queued_images} of ${live.queue_limit}`;
  } catch {
    element("live").textContent = "";
  }
}

function showExamples(files) {
  const buttons = files.map((file) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: file.replace(/\.\w+$/, "") });
    button.addEventListener("click", async () => {
      try {
        add([await getExample(model.name, file)]);
      } catch (problem) {
        say(problem.message);
      }
    });
    return button;
  });
  element("examples").replaceChildren("Try: ", ...buttons);
  element("examples").hidden = files.length === 0;
}

function add(files) {
  const entries = [...files].map((file) => {
    added += 1;
    const id = `image-${added}`;
    return { id, file, card: newCard(file, id), state: "waiting" };
  });
  results.prepend(...entries.map(({ card }) => card));
  images.push(...entries);
  for (const image of entries.filter(({ file }) => file.type !== "" && !file.type.startsWith("image/"))) {
    fail(image, new Problem(0, `Not an image (${image.file.type}); it was not sent.`));
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
}

async function ask(image) {
  mark(image.card, "waiting", "Classifying…");
  try {
    await modelLoading;
    if (model === null) throw new Problem(401, element("model").textContent);
    const name = model.name;
    const answer = await predict(name, image.file);
    if (name !== model.name) return; // Another model was chosen meanwhile; the image waits for it.
    if (answer.model.version !== model.version) await (modelLoading = loadModel(name)); // It was reloaded.
    [image.said] = answer.predictions;
    image.state = "done";
    decideAgain();
  } catch (problem) {
    fail(image, problem);
  }
  progress();
}

function fail(image, problem) {
  const wantsKey = problem.status === 401;
  element("key-form").hidden &&= !wantsKey;
  image.state = wantsKey ? "locked" : "failed";
  mark(image.card, "error", problem.message);
}

function again(state) {
  for (const image of images) {
    if (state.includes(image.state)) image.state = "waiting";
  }
  progress();
  work();
}

function progress() {
  const [done, failed] = ["done", "failed"].map((state) => images.filter((image) => image.state === state).length);
  const said = `${done} of ${images.length} ${images.length === 1 ? "image" : "images"} classified`;
  element("clear").hidden = images.length === 0;
  say(images.length === 0 ? "" : failed === 0 ? `${said}.` : `${said}, ${failed} failed.`);
}

function say(text) {
  element("status").textContent = text;
}

function clear() {
  for (const picture of results.querySelectorAll("img")) URL.revokeObjectURL(picture.src);
  results.replaceChildren();
  images = [];
  if (model !== null) decideAgain();
  progress();
  element("files").focus();
}

const drop = element("upload");
element("files").addEventListener("change", (event) => {
  add(event.target.files);
  event.target.value = "";
});
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
document.addEventListener("drop", (event) => add(event.dataTransfer.files));
document.addEventListener("paste", (event) => add(event.clipboardData.files));
document.addEventListener("visibilitychange", showLive);
setInterval(showLive, LIVE_MILLISECONDS);
element("clear").addEventListener("click", clear);
element("alpha").addEventListener("input", changePolicy);
element("threshold").addEventListener("input", changePolicy);
element("reset").addEventListener("click", resetPolicy);
element("models").addEventListener("change", (event) => {
  modelLoading = loadModel(event.target.value).then(() => again(["done", "failed"]));
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  element("key").value = "";
  element("key-form").hidden = true;
  modelLoading = loadModel();
  again(["locked"]);
});
modelLoading = loadModel();
