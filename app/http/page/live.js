// The live service: what it decided in the last hour, whether images drift, and how many checked answers were right.

import { getChecked, getLive } from "./api.js";
import { DECISIONS } from "./decide.js";
import { atMost, make, percent } from "./format.js";
import { shape } from "./plots.js";

const MILLISECONDS = 5000;
const WATCH = 0.01; // the probability of so many unusual images below which they are worth a look
const FEW = 50; // images, which show no drift but a strong one
const element = (id) => document.getElementById(id);
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
let served = null;
let heard = ""; // the time of the last answer

export async function showLive(model) {
  served = model;
  look();
  const text = await checked(model);
  if (served === model) element("checked").textContent = text;
}

async function look() {
  if (served === null || element("live").hidden || document.visibilityState !== "visible") return;
  try {
    const live = await getLive(served.name);
    const [state, word, sentence] = drift(live);
    element("drift").dataset.decision = state;
    element("drift-word").textContent = word;
    element("drift-sentence").textContent = sentence;
    drawHour(live.hour);
    element("live-note").textContent = note(live);
    heard = new Date().toLocaleTimeString("en");
  } catch ({ message }) {
    element("drift").dataset.decision = "";
    element("drift-word").textContent = "Unknown";
    element("drift-sentence").textContent = `${heard && `Since ${heard}: `}${message}`;
    element("live-note").textContent = "";
  }
}

function drift({ images, ood_fraction: unusual, alpha, drift_active: isActive, drift_alarms: alarms, tail_probability: chance }) {
  const share = `${percent(unusual)} of the last ${counted(images, "image")} are unusual, about ${percent(alpha)} are expected.`;
  const before = alarms > isActive ? ` ${counted(alarms - isActive, "alarm")} before.` : "";
  if (isActive) return ["abstain_ood", "✕ Act", `Images no longer resemble those that the model was calibrated on. Look at the latest ones and find what changed. ${share}${before}`];
  if (images < FEW) return ["", "Too few images", `${counted(images, "image")} do not tell whether anything changed.${before}`];
  if (chance < WATCH) return ["abstain_ambiguous", "! Watch", `More images than usual are unusual: look at some of them. ${share}${before}`];
  return ["accept", "✓ Ordinary", `Images look like those that the model was calibrated on. ${share}${before}`];
}

// A bar for each step: accepted below, unusual on top.
function drawHour(hour) {
  const kinds = Object.keys(DECISIONS).reverse().filter((decision) => decision in hour);
  const totals = hour.accept.map((_, step) => kinds.reduce((sum, decision) => sum + hour[decision][step], 0));
  const all = totals.reduce((sum, each) => sum + each, 0);
  const most = Math.max(...totals, 1);
  const tops = totals.map(() => 100);
  const bars = kinds.flatMap((decision) =>
    hour[decision].map((count, step) => {
      const height = (100 * count) / most;
      tops[step] -= height;
      const bar = shape("rect", "area", { x: step * 10 + 1, y: tops[step], width: 8, height });
      bar.dataset.decision = decision;
      return bar;
    }),
  );
  const parts = kinds.map((decision) => {
    const count = hour[decision].reduce((sum, each) => sum + each, 0);
    const part = make("li", "badge", `${DECISIONS[decision]} ${count.toLocaleString("en")}${all ? `, ${percent(count / all)}` : ""}`);
    part.dataset.decision = decision;
    return part;
  });
  element("hour-parts").replaceChildren(...parts);
  element("hour-most").textContent = `at most ${Math.max(...totals).toLocaleString("en")} in 5 minutes`;
  element("hour").setAttribute("aria-label", `${counted(all, "image")} in the last hour, by their decisions`);
  element("hour").replaceChildren(...bars);
}

function note({ queued_images: queued, queue_limit: limit }) {
  return `Images tried out on this page, and repeated ones, do not count. ${counted(queued, "image")} of at most ${limit.toLocaleString("en")} in the queue.`;
}

async function checked({ name, feedback, task, policy }) {
  if (!feedback) return "Nobody can check answers, because the service keeps no log. Start it with --log.";
  if (task !== "classification") return "Not counted for a model that predicts a number.";
  try {
    const { checked, right, back_to: day } = await getChecked(name);
    const promise = policy.risk ? ` At most ${atMost(policy.risk).join(" in ")} accepted answers should be wrong.` : "";
    if (checked === 0) return `No accepted answer was checked ${day ? `since ${day}` : "in the last seven days"}. Label spot checks in the review queue.${promise}`;
    return `${right} of ${checked} checked answers were right.${promise} Checked are accepted images ${day ? `since ${day}` : "of the last seven days"}, drawn at random.`;
  } catch ({ status, message }) {
    return status === 401 ? "Enter your reviewer key in the review queue to see it." : message;
  }
}

document.addEventListener("visibilitychange", look);
setInterval(look, MILLISECONDS);
