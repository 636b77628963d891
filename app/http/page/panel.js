// The panel beside the pictures: one image with its decision, the reasons, and the numbers behind them.

import { DECISIONS } from "./decide.js";
import { breakable, make, nats, number, percent } from "./format.js";
import { SMALL_PIXELS } from "./grid.js";
import { drawHistogram } from "./plots.js";
import { taskOf } from "./tasks.js";
import { reason, showWhy } from "./why.js";

const SHOWN_CLASSES = 5;
const element = (id) => document.getElementById(id);
const panel = element("panel");

// Beside the pictures if there is room, else above them. What opens by itself leaves the keyboard where it is.
export function openPanel(takesFocus) {
  panel.open = true;
  if (takesFocus && !panel.contains(document.activeElement)) element("panel-name").focus({ preventScroll: true });
}

// After the panel was drawn: bring it up if little of it can be seen.
export function reveal() {
  const { top } = panel.getBoundingClientRect();
  if (top < 0 || top > 0.6 * innerHeight) panel.scrollIntoView();
}

export function showPanel(image, { model, policy, rival }, place) {
  const { file, prediction, decision, tile } = image;
  const picture = element("picture");
  const source = tile.querySelector("img").src;
  if (element("panel-name").ariaLabel !== file.name) element("panel-name").replaceChildren(...breakable(file.name));
  element("panel-name").ariaLabel = file.name; // Without the breaks, which are read as spaces.
  element("panel-place").textContent = place;
  if (!source) picture.removeAttribute("src"); // The smaller picture is not ready yet.
  else if (picture.src !== source) Object.assign(picture, { src: source, alt: file.name });
  const { naturalWidth: width, naturalHeight: height } = picture; // Both are 0 until the picture has loaded, which draws again.
  picture.classList.toggle("loading", width === 0);
  element("frame").style.setProperty("--ratio", width / height || 1);
  element("frame").classList.toggle("pixels", width > 0 && width < SMALL_PIXELS);
  element("frame").classList.toggle("none", source !== "" && picture.complete && width === 0);
  const badge = tile.querySelector(".badge");
  const sign = prediction ? DECISIONS[decision] : badge.textContent;
  const answer = prediction ? taskOf(model).answer(prediction, decision, model) : "";
  element("badge").dataset.decision = badge.dataset.decision;
  element("badge").textContent = sign;
  element("answered").hidden = !prediction;
  element("answer").textContent = answer;
  announce(`${image.id} ${sign} ${answer}`, [file.name, place, sign, answer]);
  const text = prediction ? reason(prediction, decision, policy, model) : (image.problem ?? "");
  if (element("reason").textContent !== text) element("reason").textContent = text;
  showWhy(prediction ?? {}, decision, model, element("why").open);
  if (!prediction) return;
  element("classes").replaceChildren(...classBars(taskOf(model).bars(prediction, model)));
  showNumbers(image, model, policy, rival);
  drawHistogram(element("histogram"), model, policy.alpha, prediction.ood_score);
}

// The heading is read when it gets the focus; this is read when another image or answer comes under a button.
function announce(key, words) {
  const said = element("panel-said");
  if (said.dataset.key === key) return;
  said.dataset.key = key;
  said.textContent = words.filter(Boolean).join(", ");
}

function classBars(classes) {
  const order = classes.sort((a, b) => b.probability - a.probability);
  return order.slice(0, SHOWN_CLASSES).map(({ probability, name }) => {
    const fill = make("span", "fill");
    fill.style.width = `${100 * probability}%`;
    const track = make("span", "track", fill);
    track.setAttribute("aria-hidden", "true");
    const text = Object.assign(make("span", "name", name), { title: name });
    return make("li", "", text, track, make("span", "share", percent(probability)));
  });
}

// Return rows of [name, value, what the value is compared with].
function rows(prediction, policy, model) {
  return [
    ...taskOf(model).rows(prediction, policy, model),
    ["p-value", number(prediction.ood_p_value), `out of distribution up to ${number(policy.alpha)}`],
    ["OOD score", nats(prediction.ood_score), ""],
    ...Object.entries(prediction.checks ?? {}).map(([check, p]) => [`Check ${check}`, number(p), ""]),
  ];
}

// The numbers of a second model stand beside those of the first.
function showNumbers({ prediction, other }, model, policy, rival) {
  const both = rival && other;
  const theirs = new Map(both ? rows(other.prediction, rival.policy, rival).map(([name, value]) => [name, value]) : []);
  const body = rows(prediction, policy, model).map(([name, value, limit]) => {
    const head = make("th", "", name, make("small", "", limit));
    head.scope = "row";
    return make("tr", "", head, make("td", "", value), ...(both ? [make("td", "", theirs.get(name) ?? "–")] : []));
  });
  const names = both ? [make("tr", "", make("td", ""), ...[model, rival].map(({ name }) => make("th", "", name)))] : [];
  element("numbers").replaceChildren(...names, ...body);
}
