// Requests to the service. Paths are relative, so the page also works below a path prefix.

const ATTEMPTS = 4;
const KEY = "psc-api-key";

export class Problem extends Error {
  constructor(status, detail, retryAfter = null) {
    super(detail);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { "X-API-Key": key } : {};
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
    // Not a problem document: the status has to do.
  }
  throw new Problem(response.status, detail, Number.isFinite(retryAfter) ? retryAfter : null);
}

const path = (name, rest = "") => `models/${encodeURIComponent(name)}${rest}`;

export async function getModel(name = null) {
  return (await request(name === null ? "model" : path(name))).json();
}

export async function getLive(name) {
  return (await request(path(name, "/live"))).json();
}

export async function getExamples(name) {
  return (await (await request(path(name, "/examples"))).json()).files;
}

export async function getExample(name, file) {
  const response = await request(path(name, `/examples/${encodeURIComponent(file)}`));
  return new File([await response.blob()], file, { type: response.headers.get("Content-Type") ?? "" });
}

// What the interface of this service lists for a prediction, asked once.
let parameters = null;
async function listed() {
  parameters ??= request("openapi.json")
    .then((response) => response.json())
    .then((document) => new Set(document.paths["/predict"].post.parameters.map(({ name }) => name)))
    .catch(() => new Set());
  return parameters;
}

export const canMap = async () => (await listed()).has("map");

// Explained at once where a second request would count twice among the images that the service watches for drift.
export async function predict(name, file, { map = false } = {}) {
  const query = new URLSearchParams({ explain: true, ...(map && { map: true }) });
  if ((await listed()).has("monitor")) query.set("monitor", false);
  for (let attempt = 1; ; attempt += 1) {
    const form = new FormData();
    form.append("images", file, file.name);
    try {
      const answer = await request(path(name, `/predict?${query}`), { method: "POST", body: form });
      return await answer.json();
    } catch (problem) {
      const again = problem.status === 429 || problem.status === 503;
      if (!again || attempt === ATTEMPTS) throw problem;
      const seconds = Math.min(problem.retryAfter ?? attempt, 30);
      await new Promise((done) => setTimeout(done, seconds * 1000));
    }
  }
}
