// A card for each image: the picture, the decision, the numbers behind it, and on request an explanation.

import { gateList, inWords } from "./decide.js";
import { nats, number, percent } from "./format.js";
import { measured } from "./kinds.js";
import { drawHistogram } from "./plots.js";

const SHOWN_CLASSES = 5;
const NEAREST = 3;
const SMALL_PIXELS = 96;

export function newCard(file, id) {
  const card = document.getElementById("card").content.firstElementChild.cloneNode(true);
  const picture = card.querySelector("img");
  card.id = id;
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

export function mark(card, decision, text) {
  const badge = card.querySelector(".decision");
  badge.dataset.decision = decision;
  badge.textContent = text;
}

export function show(card, { said, decision }, policy, model) {
  const find = (name) => card.querySelector(`.${name}`);
  mark(card, decision, inWords(decision, said));
  const isKnown = decision !== "abstain_ood";
  find("answer").classList.toggle("unsure", !isKnown);
  if (model.target) showNumber(find, said, policy, model, isKnown);
  else showClass(find, said, policy, model, isKnown);
  find("answer").hidden = false;
  find("p-value").textContent = number(said.ood_p_value);
  find("p-limit").textContent = `out of distribution up to ${number(policy.alpha)}`;
  find("gates").textContent = gateList(said, number);
  find("gates").parentElement.hidden = !said.gates;
  find("ood-score").textContent = nats(said.ood_score);
  find("details").hidden = false;
  find("why").querySelector("ul").replaceChildren(...reasons(said.explanation, model));
  drawHistogram(find("histogram"), model, policy.alpha, said.ood_score);
}

function showClass(find, said, policy, model, isKnown) {
  find("hint").textContent = isKnown ? "" : "if it were one of the classes: ";
  find("label").textContent = said.label;
  find("confidence").textContent = percent(said.confidence);
  find("classes").replaceChildren(...classBars(said, model));
  find("unsure-name").textContent = "Entropy";
  find("entropy").textContent = nats(said.predictive_entropy);
  const highest = Math.log(model.classes.length);
  find("entropy-limit").textContent =
    policy.ambiguity_threshold < highest ? `ambiguous above ${number(policy.ambiguity_threshold)}` : "none is ambiguous";
  find("set").textContent = said.prediction_set.join(", ") || "none of the classes";
}

function showNumber(find, said, policy, model, isKnown) {
  find("hint").textContent = isKnown ? "" : "if it were like the known images: ";
  find("label").textContent = measured(said.mean, model);
  find("confidence").textContent = `± ${number(Math.hypot(said.aleatoric, said.epistemic))}`;
  find("classes").replaceChildren();
  find("unsure-name").textContent = "Deviation";
  find("entropy").textContent = `noise ${number(said.aleatoric)}, model ${number(said.epistemic)}`;
  find("entropy-limit").textContent =
    policy.max_width === null ? "none is uncertain" : `uncertain where wider than ${measured(policy.max_width, model)}`;
  find("set").textContent = `${number(said.lower)} to ${measured(said.upper, model)}`;
}

function reasons(explanation, model) {
  const nearest = (explanation.class_distances ?? explanation.bin_distances)
    .map((distance, index) => ({ distance, name: model.classes[index] }))
    .sort((a, b) => a.distance - b.distance)
    .slice(0, NEAREST);
  const lines = [
    `${model.target ? "Nearest bins" : "Nearest classes"}: ${nearest.map(({ name, distance }) => `${name} (${number(distance)})`).join(", ")}`,
    `Most unusual components: ${explanation.unusual_components
      .map(({ component, deviation }) => `${component} (${number(deviation)} σ)`)
      .join(", ")}`,
  ];
  for (const { layer, weight, examples } of explanation.nearest_examples ?? []) {
    const shown = examples.map(({ image, value }) => `${measured(value, model)} (image ${image})`).join(", ");
    lines.push(`Nearest training images after ${layer}, which counts for ${percent(weight)}: ${shown}`);
  }
  if (typeof explanation.aleatoric === "number") {
    lines.push(`Of the entropy, ${nats(explanation.aleatoric)} are the image's, ${nats(explanation.epistemic)} the model's`);
  }
  return lines.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
}

function classBars(said, model) {
  const order = said.probabilities.map((probability, index) => ({ probability, index }));
  order.sort((a, b) => b.probability - a.probability);
  return order.slice(0, SHOWN_CLASSES).map(({ probability, index }) => {
    const row = document.createElement("li");
    const name = span("name", index === said.class_index ? said.label : model.classes[index]);
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

function span(name, text) {
  const node = document.createElement("span");
  node.className = name;
  node.textContent = text;
  return node;
}
