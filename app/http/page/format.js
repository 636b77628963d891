// Numbers as text, and texts as elements.

export function percent(fraction) {
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "< 0.1\u00a0%";
  return `${value.toFixed(1)}\u00a0%`;
}

// With the width of an interval, to the decimal of its second digit, as `to_width` in psc_core/answers.py; else three digits.
export function number(value, width) {
  if (width >= 1e-6 && width < 1e15) {
    const places = 1 - Math.floor(Math.log10(width));
    const rounded = Math.round(value * 10 ** places) / 10 ** places + 0; // 0 and not −0
    return rounded.toFixed(Math.max(places, 0)).replaceAll("-", "\u2212");
  }
  const tiny = value !== 0 && Math.abs(value) < 0.0005;
  const text = tiny ? value.toExponential(1) : Number(value.toPrecision(3)).toString();
  return text.replaceAll("-", "\u2212");
}

// A number that was measured, with all digits that a float of 32 bits keeps; a whole number with all.
export const exact = (value) => String(Number.isInteger(value) ? value : Number(value.toPrecision(7))).replaceAll("-", "\u2212");

// Return a fraction as so many out of so many: 5 of 100, 2 of 1000.
export function outOf(fraction, whole = Math.round) {
  const all = 10 ** Math.max(2, Math.ceil(-Math.log10(fraction) - 1e-9));
  return [whole(all * fraction), all];
}

// The same for a bound, which is never rounded down.
export const atMost = (fraction) => outOf(fraction, (count) => Math.ceil(count - 1e-9));

// Return a name as nodes between which a line may break: behind its words, and before a file's extension.
export const breakable = (name) => name.split(/(?<=[-_ ])|(?=\.\w+$)/).flatMap((part) => [document.createElement("wbr"), part]);

export function make(tag, name, ...content) {
  const node = document.createElement(tag);
  node.className = name;
  node.append(...content);
  return node;
}

export function nats(value) {
  return `${number(value)}\u00a0nats`;
}
