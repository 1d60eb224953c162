// Elements are made here and nowhere else. Texts become text nodes: what a model wrote is never
// read as HTML, and the page's policy (trusted types) refuses any attempt.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") {
      for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    } else if (name in { value: 1, checked: 1, disabled: 1, selected: 1, hidden: 1 }) {
      element[name] = value;
    } else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) =>
  fill(document.createElementNS(SVG, tag), props, children);

export function replace(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

export function select(label, options, value, onchange) {
  const box = h("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", { class: "field" }, h("span", {}, label), box);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toFixed(digits));
}

export const signed = (value, digits = 2) =>
  value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export const badge = (verdict) =>
  h("span", { class: `badge ${["right", "wrong", "malformed", "unscorable"].includes(verdict) ? verdict : "other"}` }, verdict || "–");

export function clock(seconds) {
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min${whole % 60 ? ` ${whole % 60} s` : ""}` : `${+seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export const notice = (texts) => texts && texts.length
  ? h("p", { class: "notice" }, "Not in this run: ", texts.join("; "), ".") : null;

// Images, scaled, with the number of tokens that each takes in a prompt.
export const pictures = (shown) => (shown?.length ? h("div", { class: "pictures" }, shown.map(({ image, tokens }, i) =>
  h("figure", {}, image ? h("img", { src: image, alt: `image ${i + 1}` }) : h("span", { class: "muted" }, "cannot be read"),
    h("figcaption", {}, tokens === null ? `image ${i + 1}` : plural(tokens, "token"))))) : null);

// The statement of a row's problem. In a conversation, its environment may have asked something else.
export const asked = (row) => [row.ending ? h("span", { class: "muted" }, "the row’s problem: ") : null, row.problem || row.problem_id];
