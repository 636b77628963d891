// The page at "/": sends each dropped image to POST /predict and shows what the service says of it.
// Paths are relative, so the page also works below a path prefix.

const PARALLEL = 4;
const ATTEMPTS = 4;
const SHOWN_CLASSES = 5;
const SMALL_PIXELS = 96;
const DECISIONS = {
  accept: "✓ Accept",
  abstain_ambiguous: "? Abstain: several classes fit",
  abstain_ood: "! Abstain: unlike the known images",
};
const GATES = { texture: "strange texture", kind: "unknown kind", confidence: "ambiguous" };

const element = (id) => document.getElementById(id);
const results = element("results");
const queue = [];
const locked = []; // Refused for want of a key; tried again with the next one.
let model = null;
let modelLoading = null;
let running = 0;
let added = 0;
let classified = 0;

class Problem extends Error {
  constructor(status, detail, retryAfter) {
    super(detail);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("psc-api-key");
  const headers = key ? { "X-API-Key": key } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Problem(0, "The service cannot be reached.", null);
  }
  if (response.ok) return response.json();
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  let detail = `The service answered ${response.status}.`;
  try {
    const problem = await response.json();
    detail = problem.detail ?? problem.title ?? detail;
  } catch {
    // Not a problem document: the status has to do.
  }
  throw new Problem(response.status, detail, Number.isFinite(retryAfter) ? retryAfter : null);
}

async function predict(file) {
  for (let attempt = 1; ; attempt += 1) {
    const form = new FormData();
    form.append("images", file, file.name);
    try {
      return await ask("predict", { method: "POST", body: form });
    } catch (problem) {
      const again = problem.status === 429 || problem.status === 503;
      if (!again || attempt === ATTEMPTS) throw problem;
      const seconds = Math.min(problem.retryAfter ?? attempt, 30);
      await new Promise((done) => setTimeout(done, seconds * 1000));
    }
  }
}

async function loadModel() {
  try {
    model = await ask("model");
  } catch (problem) {
    element("key-form").hidden = problem.status !== 401;
    element("model").textContent = problem.message;
    return;
  }
  const version = model.version ? ` · version ${model.version.slice(0, 12)}` : "";
  element("model").textContent =
    `${model.name}${version} · ${model.classes.length} classes · layer ${model.layer} · α = ${model.policy.alpha}`;
}

function add(files) {
  const images = [...files].filter((file) => file.type === "" || file.type.startsWith("image/"));
  const entries = images.map((file) => ({ file, card: newCard(file) }));
  results.prepend(...entries.map(({ card }) => card));
  queue.push(...entries);
  added += entries.length;
  element("clear").hidden = added === 0;
  if (images.length < files.length) {
    say(`${files.length - images.length} of ${files.length} files are not images and were left out.`);
  } else {
    progress();
  }
  work();
}

function newCard(file) {
  const card = element("card").content.firstElementChild.cloneNode(true);
  const picture = card.querySelector("img");
  card.querySelector("figcaption").textContent = file.name;
  picture.alt = file.name;
  picture.addEventListener("load", () => {
    picture.classList.toggle("small", picture.naturalWidth < SMALL_PIXELS);
  });
  picture.addEventListener("error", () => {
    picture.replaceWith("No preview");
  });
  picture.src = URL.createObjectURL(file);
  return card;
}

function work() {
  while (running < PARALLEL && queue.length > 0) {
    running += 1;
    classify(queue.shift()).finally(() => {
      running -= 1;
      work();
    });
  }
}

async function classify({ file, card }) {
  mark(card, "waiting", "Judging…");
  try {
    await modelLoading;
    const answer = await predict(file);
    show(card, answer);
  } catch (problem) {
    if (problem.status === 401) {
      element("key-form").hidden = false;
      locked.push({ file, card });
    }
    mark(card, "error", problem.message);
  }
  if (card.isConnected) {
    classified += 1;
    progress();
  }
}

function show(card, answer) {
  const said = answer.predictions[0];
  mark(card, said.decision, DECISIONS[said.decision] ?? said.decision);
  const find = (name) => card.querySelector(`.${name}`);
  find("label").textContent = said.label;
  find("confidence").textContent = percent(said.confidence);
  find("answer").hidden = false;
  find("classes").replaceChildren(...classBars(said));
  find("entropy").textContent = `${number(said.predictive_entropy)} of ${number(Math.log(said.probabilities.length))} nats`;
  find("p-value").textContent = `${number(said.ood_p_value)} (α = ${answer.policy.alpha})`;
  const gates = Object.entries(said.gates ?? {});
  find("gates").textContent = gates.map(([name, p]) => `${GATES[name] ?? name} ${number(p)}`).join(", ");
  find("gates").parentElement.hidden = gates.length === 0;
  if (said.is_ood && gates.length > 0) {
    const smallest = Math.min(...gates.map(([, p]) => p));
    const alarming = gates.filter(([, p]) => p === smallest).map(([name]) => GATES[name] ?? name);
    mark(card, said.decision, `! Abstain: ${alarming.join(", ")}`);
  }
  find("ood-score").textContent = `${number(said.ood_score)} nats`;
  find("set").textContent = said.prediction_set.join(", ") || "none of the classes";
  find("details").hidden = false;
  if (model !== null && model.version === answer.model.version) {
    histogram(find("histogram"), model.calibration, said.ood_score);
    find("histogram").removeAttribute("hidden");
  }
}

function classBars(said) {
  const order = said.probabilities.map((probability, index) => ({ probability, index }));
  order.sort((a, b) => b.probability - a.probability);
  return order.slice(0, SHOWN_CLASSES).map(({ probability, index }) => {
    const row = document.createElement("li");
    const name = span("name", nameOf(said, index));
    name.title = name.textContent;
    const track = span("track", "");
    track.setAttribute("aria-hidden", "true");
    const fill = span("fill", "");
    fill.style.display = "block";
    track.append(fill);
    row.append(name, track, span("share", percent(probability)));
    requestAnimationFrame(() => {
      fill.style.width = `${100 * probability}%`;
    });
    return row;
  });
}

function nameOf(said, index) {
  if (index === said.class_index) return said.label;
  return model?.classes[index] ?? `class ${index}`;
}

function histogram(svg, calibration, here) {
  const { edges, counts } = calibration.ood_score;
  const low = Math.min(edges[0], here);
  const high = Math.max(edges[edges.length - 1], here);
  const margin = 0.02 * (high - low || 1);
  const x = (value) => (240 * (value - low + margin)) / (high - low + 2 * margin);
  const most = Math.max(...counts, 1);
  const parts = counts.map((count, index) => {
    const height = (50 * count) / most;
    return shape("rect", "bin", {
      x: x(edges[index]),
      y: 56 - height,
      width: Math.max(0.5, x(edges[index + 1]) - x(edges[index])),
      height,
    });
  });
  const line = (name, value) => shape("line", name, { x1: x(value), x2: x(value), y1: 0, y2: 56 });
  parts.push(line("threshold", calibration.ood_score_threshold), line("here", here));
  svg.setAttribute(
    "aria-label",
    `OOD score of this image, ${number(here)}, among those of ${calibration.images} calibration images; ` +
      `above ${number(calibration.ood_score_threshold)} counts as out of distribution.`,
  );
  svg.replaceChildren(...parts);
}

function shape(kind, name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  node.setAttribute("class", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value.toFixed(2));
  return node;
}

function span(name, text) {
  const node = document.createElement("span");
  node.className = name;
  node.textContent = text;
  return node;
}

function mark(card, decision, text) {
  const badge = card.querySelector(".decision");
  badge.dataset.decision = decision;
  badge.textContent = text;
}

function progress() {
  const noun = added === 1 ? "image" : "images";
  say(added === 0 ? "" : `${classified} of ${added} ${noun} classified.`);
}

function say(text) {
  element("status").textContent = text;
}

function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1\u00a0%";
  return `${value.toFixed(1)}\u00a0%`;
}

function number(value) {
  const tiny = value !== 0 && Math.abs(value) < 0.0005;
  const text = tiny ? value.toExponential(1) : Number(value.toPrecision(3)).toString();
  return text.replaceAll("-", "\u2212");
}

function clear() {
  for (const picture of results.querySelectorAll("img")) URL.revokeObjectURL(picture.src);
  results.replaceChildren();
  queue.length = 0;
  locked.length = 0;
  added = 0;
  classified = 0;
  element("clear").hidden = true;
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
element("clear").addEventListener("click", clear);
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("psc-api-key", element("key").value);
  element("key").value = "";
  element("key-form").hidden = true;
  modelLoading = loadModel();
  classified -= locked.length;
  queue.push(...locked.splice(0));
  work();
});
modelLoading = loadModel();
