// Requests to the service. Paths are relative, so that the page also works below a path prefix.

const ATTEMPTS = 4;
const KEY = "psc-api-key";
export const FEEDBACK_KEY = "psc-feedback-key";

export class Problem extends Error {
  constructor(status, detail, retryAfter = null) {
    super(detail);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Keep a key for this session, and return "" or why it can be none: fetch throws at what a header cannot carry.
export function useKey(text, role = KEY) {
  const key = text.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return "This key has a character that no key has. Copy it again.";
  sessionStorage.setItem(role, key);
  return "";
}

export const hasFeedbackKey = () => (sessionStorage.getItem(FEEDBACK_KEY) ?? sessionStorage.getItem(KEY)) !== null;

async function request(path, options = {}, role = KEY) {
  const key = sessionStorage.getItem(role) ?? sessionStorage.getItem(KEY); // An admin key has every role.
  const headers = { ...options.headers, ...(key && { "X-API-Key": key }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Problem(0, "The service cannot be reached.");
  }
  if (response.ok) return response;
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  let detail = `The service answered ${response.status}.`;
  try {
    const problem = await response.json();
    detail = problem.detail ?? problem.title ?? detail;
  } catch {
    // Not a problem document: only the status is known.
  }
  throw new Problem(response.status, detail, Number.isFinite(retryAfter) ? retryAfter : null);
}

// A service that is busy or restarting, or a proxy that does not reach it, is asked again.
const PASSING = [0, 429, 502, 503];

export async function patiently(ask) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await ask();
    } catch (problem) {
      if (!isPassing(problem) || attempt === ATTEMPTS) throw problem;
      const seconds = Math.min(problem.retryAfter ?? attempt, 30);
      await new Promise((done) => setTimeout(done, seconds * 1000));
    }
  }
}

export const isPassing = ({ status }) => PASSING.includes(status);

// A person may also send again what took too long; each attempt costs the service as much.
export const canBeSentAgain = ({ status }) => [...PASSING, 408, 504].includes(status);

const path = (name, rest = "") => `models/${encodeURIComponent(name)}${rest}`;

export async function getModel(name = null) {
  return (await request(name === null ? "model" : path(name))).json();
}

export async function getLive(name) {
  return (await request(path(name, "/live"), { signal: AbortSignal.timeout(10_000) })).json();
}

export async function getExamples(name) {
  return (await (await patiently(() => request(path(name, "/examples")))).json()).files;
}

export async function getExample(name, file) {
  const response = await patiently(() => request(path(name, `/examples/${encodeURIComponent(file)}`)));
  return new File([await response.blob()], file, { type: response.headers.get("Content-Type") ?? "" });
}

export async function getChecked(name) {
  return (await patiently(() => request(path(name, "/checked"), {}, FEEDBACK_KEY))).json();
}

export async function getUnreviewed(which, model) {
  const query = new URLSearchParams({ limit: 50, ...which, ...(model && { model }) });
  return (await patiently(() => request(`feedback/images?${query}`, {}, FEEDBACK_KEY))).json();
}

export async function getLoggedImage(file) {
  return (await patiently(() => request(`feedback/images/${encodeURIComponent(file)}`, {}, FEEDBACK_KEY))).blob();
}

export async function sendLabel(label) {
  const headers = { "Content-Type": "application/json" };
  await request("feedback", { method: "POST", headers, body: JSON.stringify(label), keepalive: true }, FEEDBACK_KEY);
}

// The explanation is requested at once, and nothing that a person tries out counts in the service's drift.
export async function predict(name, file, { map = false } = {}) {
  const query = new URLSearchParams({ explain: true, ...(map && { map: true }), monitor: false });
  const form = new FormData();
  form.append("images", file, file.name);
  return (await patiently(() => request(path(name, `/predict?${query}`), { method: "POST", body: form }))).json();
}
