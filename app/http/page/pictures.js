// Pictures as small as the page shows them. A photograph of 25 megapixels would take 100 MB in every tile; here the
// browser makes a small one off the main thread, and only so many at once are in memory. The file is sent as it is.

const SIDE = 512;
const AT_ONCE = 2;
const waiting = [];
let running = 0;

// Return the URL of a small picture of a file; of the file itself if it is small or the browser cannot read it.
export function pictureOf(file) {
  return new Promise((done) => {
    waiting.push({ file, done });
    work();
  });
}

// Make the picture of a file before those that wait.
export function hurry(file) {
  const at = waiting.findIndex((each) => each.file === file);
  if (at > 0) waiting.unshift(...waiting.splice(at, 1));
}

// Make none of those that wait.
export const forget = () => waiting.splice(0);

function work() {
  if (running === AT_ONCE || waiting.length === 0) return;
  running += 1;
  const { file, done } = waiting.shift();
  smaller(file)
    .catch(() => file)
    .then((picture) => {
      running -= 1;
      done(URL.createObjectURL(picture));
      work();
    });
}

async function smaller(file) {
  const [width, height] = await sizeOf(file);
  const scale = SIDE / Math.max(width, height);
  if (scale >= 1) return file;
  const [resizeWidth, resizeHeight] = [width, height].map((side) => Math.max(1, Math.round(scale * side)));
  const bitmap = await createImageBitmap(file, { resizeWidth, resizeHeight, resizeQuality: "medium" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
  return canvas.convertToBlob({ type: "image/webp", quality: 0.85 });
}

// Return the files that were dropped, with those in folders.
export async function dropped({ items, files }) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return entries.some(({ isDirectory }) => isDirectory) ? (await Promise.all(entries.map(filesIn))).flat() : [...files];
}

const paths = new WeakMap(); // of files in a dropped folder, from this on

export const pathOf = (file) => paths.get(file) ?? file.name;

async function filesIn(entry) {
  const ask = (node, method) => new Promise((done, fail) => node[method](done, fail));
  if (entry.isFile) {
    if (entry.name.startsWith(".")) return [];
    const file = await ask(entry, "file");
    paths.set(file, entry.fullPath.slice(1));
    return [file];
  }
  const [reader, inside] = [entry.createReader(), []];
  for (let some; (some = await ask(reader, "readEntries")).length > 0; ) inside.push(...some); // It gives only so many at once.
  return (await Promise.all(inside.map(filesIn))).flat();
}

const TITLES = { latin1: /^tEXtTitle\0(.*)/s, "utf-8": /^iTXtTitle\0\0\0[^\0]*\0[^\0]*\0(.*)/s }; // uncompressed chunks

// Return the title that a PNG file carries, or "".
export async function titleOf(file) {
  const data = new DataView(await file.arrayBuffer());
  for (let at = 8; at + 12 <= data.byteLength; at += 12 + data.getUint32(at)) {
    const chunk = data.buffer.slice(at + 4, at + 8 + data.getUint32(at));
    for (const [encoding, title] of Object.entries(TITLES)) {
      const found = title.exec(new TextDecoder(encoding).decode(chunk));
      if (found) return found[1];
    }
  }
  return "";
}

// Return the upright size from the header: a browser decodes an image only to paint it, and never paints this one.
function sizeOf(file) {
  return new Promise((done, fail) => {
    const probe = new Image();
    const url = URL.createObjectURL(file);
    probe.addEventListener("load", () => done([probe.naturalWidth, probe.naturalHeight]));
    probe.addEventListener("error", fail);
    for (const event of ["load", "error"]) probe.addEventListener(event, () => URL.revokeObjectURL(url));
    probe.src = url;
  });
}
