// The service in this browser. In a folder that `psc-export --for web` wrote, this module answers what the page asks the
// service, by the exported graph in WebAssembly. It loads the page last, and nothing is left that could send an image.

const MAX_PIXELS = 25_000_000; // as the service
const ROWS = 512; // that are read at once: a canvas that is too large for the browser is read as zeros
const GREY = [19595, 38470, 7471]; // of 65536: the weights of red, green and blue in Pillow's grey
const ask = globalThis.fetch.bind(globalThis);
const note = document.getElementById("local");
const runtime = (name) => new URL(`../onnxruntime/${name}`, import.meta.url).href;

async function fetchFile(path) {
  const response = await ask(path, { cache: "no-cache" }); // A new export is noticed, and its files belong together.
  if (!response.ok) throw new Refused(response.status, `The file server answered ${response.status} for ${path}.`);
  return response;
}

async function load() {
  const ort = await import(runtime("ort.wasm.min.js"));
  ort.env.wasm.wasmPaths = { mjs: runtime("ort-wasm-simd-threaded.js"), wasm: runtime("ort-wasm-simd-threaded.wasm") };
  ort.env.wasm.proxy = true; // In a worker, so that the page answers meanwhile.
  const { version } = await model();
  const graph = await (await fetchFile(`model-any-size.onnx?${version}`)).arrayBuffer();
  const session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"], logSeverityLevel: 3 }).catch((problem) => {
    throw new Error(`${problem.message} Reload the page.`); // The runtime does not try again.
  });
  note.textContent = "The model runs in this browser: your images stay here.";
  return { session, Tensor: ort.Tensor };
}

// What was loaded, each once; after a failure all of it again for the next who asks, as the export may be another one then.
const kept = new Map();
const once = (load) => () => {
  if (!kept.has(load)) kept.set(load, load().catch((problem) => {
    kept.clear();
    throw problem;
  }));
  return kept.get(load);
};

const model = once(async () => (await fetchFile("model.json")).json());
const loaded = once(load);
loaded().catch((problem) => (note.textContent = `The model could not be loaded. ${problem.message}`));
let last = Promise.resolve(); // One image after the other: WebAssembly has one thread here.

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

globalThis.fetch = async (path, { body } = {}) => {
  const [asked, query] = String(path).split("?");
  try {
    if (new URLSearchParams(query).has("map")) throw new Refused(422, "There is no map without a service.");
    if (asked.endsWith("/predict")) return Response.json(await predict(body.get("images")));
    if (asked.endsWith("/examples")) return await fetchFile("examples.json");
    if (asked.includes("/examples/")) return await fetchFile(`examples/${asked.split("/").pop()}`);
    if (asked === "model" || asked.startsWith("models/")) return Response.json(await model());
    throw new Refused(404, "There is no service behind this page.");
  } catch (problem) {
    const status = problem.status ?? (problem instanceof TypeError ? 503 : 500); // A lost connection is a TypeError.
    return Response.json({ detail: problem.message }, { status });
  }
};

// What needs a service.
for (const node of document.querySelectorAll('#views a[href="#live"]')) node.remove();

async function predict(file) {
  const { name, version, layer, policy, ...about } = await model();
  const [pixels, sizes] = await pixelsOf(file, about.input);
  const { session, Tensor } = await loaded();
  const running = last.then(() => session.run({ images: new Tensor("uint8", pixels, sizes) }));
  last = running.catch(() => {});
  return { model: { name, version, layer }, policy, predictions: [answer(await running, about)] };
}

// Return the answer to one image as the service words it.
function answer(found, { classes, checks, decisions, task }) {
  const numbers = Object.entries(found).map(([name, { data, dims }]) => [name, dims.length > 1 ? [...data] : plain(data[0])]);
  const values = Object.fromEntries(numbers);
  values.decision = decisions[values.decision];
  values.is_ood = Boolean(values.is_ood);
  if (values.checks) values.checks = Object.fromEntries(checks.map((name, at) => [name, values.checks[at]]));
  if (task !== "classification") return values;
  return { ...values, label: classes[values.class_index], prediction_set: classes.filter((_, at) => values.prediction_set[at]) };
}

const plain = (value) => (typeof value === "bigint" ? Number(value) : value);

const canvas = (width, height) => new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });

// Some browsers change what is read from a canvas, so that no site can tell their users apart by it.
function changesWhatIsRead() {
  const context = canvas(256, 1);
  const colours = Array.from({ length: 256 }, (_, at) => [at, 255 - at, (37 * at) % 256]);
  for (const [at, colour] of colours.entries()) {
    context.fillStyle = `rgb(${colour})`;
    context.fillRect(at, 0, 1, 1);
  }
  const painted = colours.flatMap((colour) => [...colour, 255]);
  return context.getImageData(0, 0, 256, 1).data.some((value, at) => value !== painted[at]);
}

// Decode a file as the service does: upright, blended onto the background, grey where the network sees grey.
async function pixelsOf(file, { mode, background = "black" }) {
  if (changesWhatIsRead()) throw new Refused(415, "This browser changes the pixels that a page reads; allow this page to read canvases, or use another browser.");
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Refused(415, "This browser cannot read the image; choose a JPEG or PNG file.");
  });
  try {
    return readPixels(bitmap, mode, background);
  } finally {
    bitmap.close();
  }
}

function readPixels(bitmap, mode, background) {
  const { width, height } = bitmap;
  if (width * height > MAX_PIXELS) throw new Refused(413, `The image has more than ${MAX_PIXELS / 1e6} million pixels; make it smaller.`);
  // A canvas keeps colours times alpha, so that the colour of what is transparent is lost.
  const transparent = new Refused(415, "The image is transparent, and a browser changes its colours; make it opaque.");
  const context = canvas(width, Math.min(ROWS, height));
  context.fillStyle = background;
  const channels = mode === "L" ? 1 : 3;
  const pixels = new Uint8Array(width * height * channels);
  let isVisible = false;
  for (let top = 0, to = 0; top < height; top += ROWS) {
    const read = () => context.getImageData(0, 0, width, Math.min(ROWS, height - top)).data;
    context.globalCompositeOperation = "copy";
    context.drawImage(bitmap, 0, -top);
    isVisible ||= read().some((value) => value > 0);
    context.globalCompositeOperation = "destination-over";
    if (background !== "none") context.fillRect(0, 0, width, ROWS);
    const data = read();
    for (let from = 0; from < data.length; from += 4) {
      if (data[from + 3] < 255) throw transparent;
      if (channels === 1) pixels[to++] = (GREY[0] * data[from] + GREY[1] * data[from + 1] + GREY[2] * data[from + 2] + 0x8000) >> 16;
      else for (let colour = 0; colour < 3; colour += 1) pixels[to++] = data[from + colour];
    }
  }
  if (!isVisible) throw transparent;
  return [pixels, [1, height, width, channels]];
}

await import("./page.js");
