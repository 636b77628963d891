// The two drawings: all images by how unusual and how unclear they are, and one image among the calibration images.

import { isOod } from "./decide.js";
import { number } from "./format.js";
import { taskOf } from "./tasks.js";

const CHART = { width: 320, height: 300, left: 0, right: 0, top: 20, bottom: 20, pad: 8 };
const SVG = "http://www.w3.org/2000/svg";
const MARKS = { accept: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", abstain_ood: "M-4.5-4.5h9v9h-9z" };
const TRIANGLE = "M0-6L5.5 4.5h-11z";

export function shape(tag, name, attributes, text = null) {
  const node = document.createElementNS(SVG, tag);
  if (name) node.setAttribute("class", name);
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, typeof value === "number" ? value.toFixed(2) : value);
  }
  if (text !== null) node.textContent = text;
  return node;
}

const line = (name, x1, y1, x2, y2) => shape("line", name, { x1, y1, x2, y2 });

// To the right the p-value falls (logarithmically), upwards the uncertainty grows; a mark has the id of its image.
export function drawChart(svg, images, policy, model, current) {
  const { width, height, left, right, top, bottom, pad } = CHART;
  const floor = height - bottom;
  const end = width - right;
  const smallest = 1 / (model.calibration.images + 1);
  const task = taskOf(model);
  const { highest, title } = task.axis(model, images.map(({ prediction }) => prediction));
  const x = (p) => left + pad + ((end - left - 2 * pad) * Math.log(Math.max(p, smallest))) / Math.log(smallest);
  const y = (doubt) => floor - pad - ((floor - top - 2 * pad) * Math.min(doubt, highest)) / highest;
  const limit = x(policy.alpha);
  const level = task.limit(policy) < highest ? y(Math.max(0, task.limit(policy))) : top;
  const area = (decision, x1, y1, x2, y2) => {
    const rect = shape("rect", "area", { x: x1, y: y1, width: Math.max(0, x2 - x1), height: Math.max(0, y2 - y1) });
    rect.dataset.decision = decision;
    return rect;
  };
  const parts = [
    area("accept", left, level, limit, floor),
    area(task.abstention, left, top, limit, level),
    area("abstain_ood", limit, top, end, floor),
    line("threshold", limit, top, limit, floor),
    ...(level > top ? [line("threshold", left, level, limit, level)] : []),
  ];
  const name = (text, place, across, room) => room > 15 && parts.push(shape("text", "tick", { x: across, y: place }, text));
  name("accept", level + 14, left + 5, Math.min(floor - level - 8, limit - left - 35));
  name("unclear", top + 14, left + 5, Math.min(level - top, limit - left - 55));
  name("unusual", top + 14, limit + 5, end - limit - 100);
  parts.push(shape("text", "title middle", { x: (left + end) / 2, y: height - 6 }, "more unusual →"));
  parts.push(shape("text", "title", { x: 0, y: 12 }, title));
  for (const { prediction, decision, file, id } of images) {
    const place = `translate(${x(prediction.ood_p_value).toFixed(1)} ${y(task.uncertainty(prediction)).toFixed(1)})`;
    const mark = shape("path", "mark", { d: MARKS[decision] ?? TRIANGLE, transform: place });
    Object.assign(mark.dataset, { decision, id });
    mark.append(shape("title", "", {}, file.name));
    if (id === current) mark.classList.add("current");
    parts.push(mark);
  }
  parts.push(...parts.filter((part) => part.classList.contains("current"))); // Drawn last, so that no other mark covers it.
  svg.setAttribute("aria-label", `Chart of ${images.length} images, more unusual to the right, less clear upwards; the list has the same.`);
  svg.replaceChildren(...parts);
}

// Return the OOD score from which p ≤ alpha: exact for the model's own alpha, else within a bar of the histogram.
function scoreThreshold(model, alpha) {
  const { calibration, policy } = model;
  if (alpha === policy.alpha) return calibration.ood_score_threshold;
  const { edges, counts } = calibration.ood_score;
  let above = 0;
  for (let bar = counts.length - 1; bar >= 0; bar -= 1) {
    above += counts[bar];
    if (!isOod((1 + above) / (calibration.images + 1), alpha, model)) return edges[bar + 1];
  }
  return edges[0];
}

export function drawHistogram(svg, model, alpha, here) {
  const { edges, counts } = model.calibration.ood_score;
  const limit = scoreThreshold(model, alpha);
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
