// A completion's tokens with a background by log-prob, ratio, advantage or weights version.

import { h, replace, number, signed } from "./dom.js";

export const KINDS = [["logprob", "log-prob"], ["ratio", "ratio"], ["advantage", "advantage"], ["version", "version"], ["none", "none"]];
const UNSAMPLED = { [-1]: "from elsewhere", [-2]: "inserted" }; // versions of tokens that the run did not sample
const MOST_SPANS = 20000; // tokens with a background of their own; the rest is plain text

// From −1 to 1, or from 0 to 1, and the color that this mixes into the page's.
function strength(kind, data, i) {
  if (kind === "logprob") return Math.min(1, -data.logprobs[i] / 4); // 1 at a probability of 0.018
  if (kind === "ratio") return data.log_ratios ? Math.max(-1, Math.min(1, data.log_ratios[i] / Math.log(1.5))) : 0;
  if (kind === "advantage") {
    const value = data.advantage ?? data.centered;
    return value === null || value === undefined ? 0 : Math.max(-1, Math.min(1, value / 2));
  }
  return 0;
}

function available(kind, data) {
  if (kind === "ratio") return data.log_ratios !== null && data.log_ratios !== undefined;
  if (kind === "advantage") return data.advantage !== null && data.advantage !== undefined;
  return true;
}

function paint(element, kind, data, i, order) {
  if (kind === "version") element.dataset.v = order.get(data.versions[i]) % 6;
  else if (kind !== "none") {
    const value = strength(kind, data, i);
    if (Math.abs(value) < 0.02) return;
    const base = kind === "logprob" ? "--low" : value > 0 ? "--plus" : "--minus";
    element.style.backgroundColor = `color-mix(in oklab, var(${base}) ${Math.round(Math.abs(value) * 62)}%, transparent)`;
  }
}

function facts(data, i) {
  const ratio = data.log_ratios ? Math.exp(data.log_ratios[i]) : null;
  return [`token ${i + 1} of ${data.token_ids.length + (data.left_out || 0)}`, `id ${data.token_ids[i]}`,
    `log-prob ${number(data.logprobs[i])} (probability ${number(Math.exp(data.logprobs[i]))})`,
    ratio === null ? "ratio not recorded" : `ratio ${number(ratio, 4)}`, UNSAMPLED[data.versions[i]] || `weights version ${data.versions[i]}`].join(" · ");
}

export function legend(kind, data) {
  const swatch = (part, base) => h("i", { vars: { "background-color": `color-mix(in oklab, var(${base}) ${part}%, transparent)` } });
  if (kind === "logprob") return h("div", { class: "scale" }, "certain ", [0, 16, 31, 47, 62].map((p) => swatch(p, "--low")), " probability below 0.02");
  if (kind === "ratio") return available(kind, data)
    ? h("div", { class: "scale" }, "trainer less likely, below 0.67 ", [62, 31].map((p) => swatch(p, "--minus")), swatch(0, "--plus"), [31, 62].map((p) => swatch(p, "--plus")), " above 1.5 more likely")
    : h("div", { class: "scale" }, data.filtered ? "This completion was filtered: the trainer never saw it." : "The ratio was not recorded by this run.");
  if (kind === "advantage") return h("div", { class: "scale" }, available(kind, data)
    ? `All its tokens have the advantage ${signed(data.advantage)}.` : data.filtered ? "This completion was filtered, so it has no advantage."
      : `The advantage was not recorded by this run; shown instead: the reward minus its group’s mean, ${signed(data.centered)}.`);
  if (kind === "version") {
    const order = [...new Set(data.versions)].sort((a, b) => a - b);
    return h("div", { class: "scale" }, "sampled by the weights of version ", order.map((v, n) => [h("i", { "data-v": n % 6 }), `${UNSAMPLED[v] || v} `]));
  }
  return h("div", { class: "scale" });
}

// The tokens as one text, with a cursor for pointer and arrow keys, whose facts go to `readout`.
// `versions` decides the colors of versions.
export function tokens(data, kind, readout, versions = data.versions) {
  const texts = data.tokens_text || data.token_ids.map((id) => `⟨${id}⟩`);
  const order = new Map([...new Set(versions)].sort((a, b) => a - b).map((v, n) => [v, n]));
  const count = Math.min(texts.length, MOST_SPANS);
  const spans = Array.from({ length: count }, (_, i) => {
    const span = h("span", { class: "token" }, texts[i]);
    paint(span, kind, data, i, order);
    return span;
  });
  let place = -1;
  const point = (i) => {
    if (spans[place]) spans[place].classList.remove("at");
    place = i;
    if (!spans[i]) { replace(readout); return; }
    spans[i].classList.add("at");
    replace(readout, facts(data, i));
  };
  const box = h("div", {
    class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys move through them",
    onpointerover: (event) => { const i = spans.indexOf(event.target); if (i >= 0) point(i); },
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      point(Math.max(0, Math.min(count - 1, place + step)));
      spans[place].scrollIntoView({ block: "nearest" });
    },
  }, spans, texts.slice(count).join(""),
  data.left_out ? h("span", { class: "muted" }, ` … ${data.left_out.toLocaleString("en")} more tokens`) : null);
  return box;
}
