// Save the page's answers as a file: one row per image, decided as on the page.

import { pathOf } from "./pictures.js";
import { taskOf } from "./tasks.js";

function row({ file, prediction, decision, other, problem }, rival) {
  if (!prediction) return { file: pathOf(file), error: problem ?? "no answer yet" };
  const { probabilities, explanation, checks = {}, prediction_set: set, is_ood: isOod, ...scores } = prediction;
  return {
    file: pathOf(file),
    ...scores,
    decision,
    is_ood: decision === "abstain_ood",
    ...(set && { prediction_set: set }),
    ...(probabilities && { probabilities }),
    ...Object.fromEntries(Object.entries(checks ?? {}).map(([check, p]) => [`check_${check}`, p])),
    ...(rival && other && { other_decision: other.decision, other_answer: taskOf(rival).value(other.prediction) }),
  };
}

// A list is one of JSON. A spreadsheet would take such a text for a formula, unless a quote comes first.
function cell(value) {
  const text = Array.isArray(value) ? JSON.stringify(value) : String(value ?? "");
  const safe = typeof value === "number" ? text : text.replace(/^[=+\-@\t\r]/, "'$&");
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function toCsv(images, { rival }) {
  const table = images.map((image) => row(image, rival));
  const columns = [...new Set(table.flatMap(Object.keys))];
  return [columns, ...table.map((each) => columns.map((name) => each[name]))].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}

export function toJson(images, { model, policy, rival }) {
  const document = { model: { name: model.name, version: model.version }, other: rival?.name, policy, images: images.map((image) => row(image, rival)) };
  return `${JSON.stringify(document, null, 1)}\n`;
}

export function save(name, type, text) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
