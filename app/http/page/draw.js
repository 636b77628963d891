// A canvas for models that take small grey images. A drawing becomes a PNG file, which goes the way of every other.

const LARGEST = 64; // pixels; nobody draws a larger image
const SHOWN = 640; // pixels of the canvas's longer side
const STROKE = 0.085; // its width, as a fraction of the shorter side: that of a handwritten digit
const BODY = 5 / 7 - STROKE; // what a drawing fills of the sides at most: in MNIST, 20 of 28 pixels with the ink
const UNTOLD = 0.2; // a mean this near to the middle does not tell ink from paper
const element = (id) => document.getElementById(id);
const canvas = element("canvas");
let size = [1, 1]; // of the file: what the model resizes and cuts
let isInkBright = false;
let strokes = []; // each a list of points in fractions of the canvas
let asked = 0;

export function offerDrawing({ mode, width, height, resize, mean }) {
  const scale = resize ? resize / Math.min(width, height) : 1;
  size = [width, height].map((side) => Math.round(scale * side));
  element("draw").hidden = mode !== "L" || Math.max(...size) > LARGEST;
  element("invert").hidden = Math.abs(mean[0] - 0.5) > UNTOLD;
  isInkBright = mean[0] < 0.5; // Most of an image is paper.
  [canvas.width, canvas.height] = size.map((side) => Math.round((SHOWN * side) / Math.max(...size)));
  show();
}

function show() {
  const context = paint(canvas, strokes).getContext("2d");
  if (strokes.length === 0) {
    Object.assign(context, { fillStyle: isInkBright ? "#aaa" : "#666", textAlign: "center", font: "36px sans-serif" });
    context.fillText("Draw here", canvas.width / 2, canvas.height / 2);
  }
  for (const id of ["unstroke", "wipe", "ask"]) element(id).disabled = strokes.length === 0;
}

function paint(surface, lines) {
  const { width, height } = surface;
  const context = surface.getContext("2d");
  const [ink, paper] = isInkBright ? ["#fff", "#000"] : ["#000", "#fff"];
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  Object.assign(context, { strokeStyle: ink, lineWidth: STROKE * Math.min(width, height), lineCap: "round", lineJoin: "round" });
  for (const line of lines) {
    context.beginPath();
    context.moveTo(line[0][0] * width + 0.01, line[0][1] * height); // A tap is a dot; a line of no length would not be drawn.
    for (const [x, y] of line) context.lineTo(x * width, y * height);
    context.stroke();
  }
  return surface;
}

// Training images lie in the middle and have a margin; a hand is not so exact.
function centred() {
  const [x, y] = [0, 1].map((axis) => {
    const all = strokes.flatMap((line) => line.map((point) => point[axis]));
    return { low: Math.min(...all), high: Math.max(...all) };
  });
  const scale = Math.min(1, ...[x, y].map(({ low, high }) => BODY / (high - low)));
  const moved = (value, { low, high }) => 0.5 + scale * (value - (low + high) / 2);
  return strokes.map((line) => line.map((point) => [moved(point[0], x), moved(point[1], y)]));
}

function place({ clientX, clientY }) {
  const { left, top, width, height } = canvas.getBoundingClientRect();
  return [(clientX - left) / width, (clientY - top) / height];
}

// A stroke may leave the canvas, which keeps the pointer until that is lifted.
export function startDrawing(ask) {
  canvas.addEventListener("pointerdown", (event) => {
    if (!event.isPrimary || event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    strokes.push([place(event)]);
    show();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!canvas.hasPointerCapture(event.pointerId)) return;
    const between = event.getCoalescedEvents?.() ?? []; // Over plain HTTP from another machine, browsers do not offer them.
    strokes.at(-1)?.push(...between.map(place), place(event));
    show();
  });
  const acts = {
    unstroke: () => strokes.pop(),
    wipe: () => (strokes = []),
    invert: () => (isInkBright = !isInkBright),
    ask: async () => {
      asked += 1;
      const picture = await paint(new OffscreenCanvas(...size), centred()).convertToBlob({ type: "image/png" });
      ask(new File([picture], `drawing ${asked}.png`, { type: picture.type }));
    },
  };
  for (const [id, act] of Object.entries(acts)) {
    element(id).addEventListener("click", () => {
      act();
      show();
    });
  }
}
