// The two drawings: every image by how strange and how ambiguous it is, and one image among the calibration images.

import { isOod } from "./decide.js";
import { number } from "./format.js";
import { axisOf, limitOf, uncertainty } from "./kinds.js";

const MAP = { width: 480, height: 250, left: 40, right: 12, top: 26, bottom: 38 };
const SVG = "http://www.w3.org/2000/svg";

function shape(kind, name, attributes, text = null) {
  const node = document.createElementNS(SVG, kind);
  if (name) node.setAttribute("class", name);
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, typeof value === "number" ? value.toFixed(2) : value);
  }
  if (text !== null) node.textContent = text;
  return node;
}

const line = (name, x1, y1, x2, y2) => shape("line", name, { x1, y1, x2, y2 });

// To the right the p-value falls (logarithmic), upwards the entropy grows; an image is a dot that leads to its card.
export function drawMap(svg, images, policy, model) {
  const { width, height, left, right, top, bottom } = MAP;
  const smallest = 1 / (model.calibration.images + 1);
  const { highest, title } = axisOf(model, policy, images);
  const x = (p) => left + ((width - left - right) * Math.log(Math.max(p, smallest))) / Math.log(smallest);
  const y = (entropy) => height - bottom - ((height - top - bottom) * entropy) / highest;
  const parts = [line("axis", left, height - bottom, width - right, height - bottom), line("axis", left, top, left, height - bottom)];
  for (let p = 1; p >= smallest; p /= 10) {
    parts.push(shape("text", "tick middle", { x: x(p), y: height - bottom + 13 }, String(Number(p.toPrecision(1)))));
  }
  for (const entropy of [0, highest / 2, highest]) {
    parts.push(shape("text", "tick end", { x: left - 5, y: y(entropy) + 4 }, number(entropy)));
  }
  parts.push(shape("text", "title middle", { x: (left + width) / 2, y: height - 6 }, "stranger (p-value) →"));
  parts.push(shape("text", "title", { x: 0, y: 13 }, title));
  const limit = x(policy.alpha);
  const [anchor, gap] = limit > width - 100 ? ["tick end", -4] : ["tick", 4];
  parts.push(line("threshold", limit, top, limit, height - bottom));
  parts.push(shape("text", anchor, { x: limit + gap, y: top + 8 }, `α = ${number(policy.alpha)}`));
  if (limitOf(policy) < highest) {
    const level = y(limitOf(policy));
    parts.push(line("threshold", left, level, limit, level));
    parts.push(shape("text", "tick", { x: left + 4, y: level - 4 }, model.target ? "uncertain above" : "ambiguous above"));
  }
  for (const { said, decision, name, id } of images) {
    const link = shape("a", "", { href: `#${id}`, "aria-label": `${name}: ${decision}` });
    const dot = shape("circle", "dot", { cx: x(said.ood_p_value), cy: y(uncertainty(said)), r: 5 });
    dot.dataset.decision = decision;
    dot.append(shape("title", "", {}, name));
    link.append(dot);
    parts.push(link);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

// The OOD score from which on p ≤ alpha: exact for the model's own alpha, else within a bar of the histogram.
function scoreThreshold(calibration, alpha, ownAlpha) {
  if (alpha === ownAlpha) return calibration.ood_score_threshold;
  const { edges, counts } = calibration.ood_score;
  let above = 0;
  for (let bar = counts.length - 1; bar >= 0; bar -= 1) {
    above += counts[bar];
    if (!isOod((1 + above) / (calibration.images + 1), alpha, calibration.images)) return edges[bar + 1];
  }
  return edges[0];
}

export function drawHistogram(svg, model, alpha, here) {
  const { edges, counts } = model.calibration.ood_score;
  const limit = scoreThreshold(model.calibration, alpha, model.policy.alpha);
  const low = Math.min(edges[0], here);
  const high = Math.max(edges.at(-1), here);
  const margin = 0.02 * (high - low || 1);
  const x = (value) => (240 * (value - low + margin)) / (high - low + 2 * margin);
  const most = Math.max(...counts, 1);
  const parts = counts.map((count, bar) => {
    const height = (44 * count) / most;
    const width = Math.max(0.5, x(edges[bar + 1]) - x(edges[bar]));
    return shape("rect", "bin", { x: x(edges[bar]), y: 50 - height, width, height });
  });
  parts.push(line("axis", 0, 50, 240, 50));
  parts.push(line("threshold", x(limit), 0, x(limit), 50), line("here", x(here), 0, x(here), 50));
  const anchor = (value) => (x(value) < 40 ? "start" : x(value) > 200 ? "end" : "middle");
  const tick = (value) => shape("text", "tick", { x: x(value), y: 61, "text-anchor": anchor(value) }, number(value));
  const apart = Math.abs(x(here) - x(limit)) > 45;
  parts.push(tick(limit), ...(apart ? [tick(here)] : []));
  svg.setAttribute(
    "aria-label",
    `OOD score of this image, ${number(here)} nats, among those of ${model.calibration.images} calibration images; ` +
      `right of the dashed line, above ${number(limit)}, an image counts as out of distribution.`,
  );
  svg.replaceChildren(...parts);
}
