// How figures are written, and elements made. Text goes in as text nodes alone.

export const DASH = "–";

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return element;
}

export function say(element, text) {
  const wanted = text === null || text === undefined ? DASH : String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function number(value, digits = 0) {
  return missing(value) ? DASH : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Three digits and a prefix: [12.3, "kB"].
export function scaled(value, unit = "") {
  if (missing(value)) return [DASH, ""];
  let size = value;
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let place = 0;
  while (Math.abs(size) >= 999.5 && place < prefixes.length - 1) { size /= 1000; place += 1; }
  const digits = place === 0 && Number.isInteger(size) ? 0 : Math.abs(size) >= 99.95 ? 0 : Math.abs(size) >= 9.995 ? 1 : 2;
  return [size.toFixed(digits), `${prefixes[place]}${unit}`];
}

export function amount(value, unit = "") {
  return scaled(value, unit).filter(Boolean).join(" ");
}

export function percent(value) {
  return missing(value) ? DASH : `${(100 * value).toFixed(1)} %`;
}

export function fixed(value, digits) {
  return missing(value) ? DASH : value.toFixed(digits);
}

export function duration(seconds) {
  if (missing(seconds)) return DASH;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function clock(unixS) {
  return new Date(1000 * unixS).toLocaleTimeString("en-GB");
}

// The end of a peer id, where ids differ.
export function short(id) {
  return printable(id).slice(-8);
}

// Control and direction marks could make a name look like another, or turn a line around.
export function printable(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "?");
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function missing(value) {
  return value === null || value === undefined || !Number.isFinite(value);
}
