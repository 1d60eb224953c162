// One completion: what is known of it, its tokens, and the others of its group.

import { h, replace, asked, badge, number, pictures, plural, signed, notice } from "./dom.js";
import { get, isReport } from "./api.js";
import { KINDS, legend, tokens } from "./shading.js";
import * as search from "./rollouts.js";
import { groupTable } from "./groups.js";
import { conversation } from "./conversation.js";

export const SHORTCUTS = [["s", "next shading"], ["j k", "next completion of the search, one before"],
  ["← →", "move through the focused tokens"], ["Esc", "back to the search"]];

let page, values, data, shading;

export async function show(main, theValues, thePage) {
  page = thePage; values = theValues;
  const run = page.runs[+values.run || 0];
  data = await get("rollout", { run: run.run, update: values.update, row: values.row });
  if (!data.group_rows) { // a report has them once, with the group
    const { groups } = await get("groups", { update: data.update });
    data.group_rows = groups.find((group) => group.group === data.group).completions;
  }
  data.centered = (data.group_rows.find((r) => r.row === data.row) || {}).centered;
  const kind = values.shade || localStorage.getItem("shade") || "logprob";
  shading = h("div", { class: "shaded" });
  const parts = Object.entries(data.parts || {}).map(([name, value]) => `${name} ${signed(value)}`).join(", ");
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  replace(main,
    h("div", { class: "crumbs" }, isReport ? null : h("a", { href: "#rollouts", onclick: (e) => { e.preventDefault(); back(); } }, "← Rollouts"),
      h("span", {}, `${run.label} · update ${data.update} · group ${data.group} · completion ${data.index}`),
      page.link("groups", { run: run.run, update: data.update }, "All groups of the update"),
      page.runs.length > 1 ? page.link("compare", { a: run.run, b: page.runs.find((r) => r.run !== run.run).run, problem: data.problem_id }, "Compare with another run") : null),
    notice(data.missing),
    h("dl", { class: "facts" },
      fact("Verdict", badge(data.verdict), data.reason ? h("span", { class: "reason" }, data.reason) : null),
      fact("Reward", number(data.reward), parts ? h("small", {}, ` ${parts}`) : null),
      fact("Advantage", signed(data.advantage, 3)),
      fact("Tokens", `${data.tokens}, ended by ${data.finish_reason}`),
      data.ending ? fact("Ending", data.ending.replaceAll("_", " "), data.ending_reason ? h("span", { class: "reason" }, data.ending_reason) : null,
        h("small", {}, ` ${plural(data.turns.length, "turn")}, ${plural(data.turns.reduce((n, turn) => n + turn.calls.length, 0), "call")}`)) : null,
      fact("Versions", data.oldest === null ? "–" : data.oldest === data.newest ? data.oldest : `${data.oldest} to ${data.newest}`),
      fact("Answer", h("code", {}, data.answer ?? "–")), fact("Reference", h("code", {}, data.reference ?? "–")),
      fact("Language, domain", `${data.language || "–"}, ${data.domain || "–"}`),
      data.filtered ? fact("Filtered", data.filtered, data.filtered_detail ? `: ${data.filtered_detail}` : "") : null),
    h("section", {}, h("h2", {}, "Problem ", h("small", {}, data.problem_id)), h("pre", { class: "statement" }, asked(data)),
      pictures(data.pictures)),
    h("section", {}, h("div", { class: "heading" }, h("h2", {}, data.ending ? "Conversation" : "Completion"), picker(kind)), shading),
    h("section", {}, h("h2", {}, "Its group"), groupTable(page, run.run, data.update, data.group_rows, data.row)));
  shade(kind);
}

function picker(kind) {
  return h("fieldset", { class: "segments" }, h("legend", {}, "Shading"), KINDS.map(([name, label]) =>
    h("label", {}, h("input", { type: "radio", name: "shade", value: name, checked: name === kind, onchange: () => shade(name) }), h("span", {}, label))));
}

function shade(kind) {
  values.shade = kind;
  localStorage.setItem("shade", kind);
  const readout = h("p", { class: "token-facts", "aria-live": "polite" });
  replace(shading, legend(kind, data), data.ending ? conversation(data, kind, readout) : tokens(data, kind, readout), readout);
}

function back() {
  if (isReport) page.go("groups", { update: data.update });
  else if (search.found.place) location.hash = search.found.place; else page.go("rollouts", { run: values.run });
}

export function key(event) {
  if (event.key === "s") {
    const names = KINDS.map(([name]) => name);
    const next = names[(names.indexOf(values.shade) + 1) % names.length];
    document.querySelector(`.segments input[value=${next}]`).checked = true;
    shade(next);
    return true;
  }
  const step = { j: 1, k: -1 }[event.key];
  if (step) {
    const place = search.found.rows.findIndex((r) => r.update === data.update && r.row === data.row);
    const next = search.found.rows[place + step];
    if (place >= 0 && next) page.go("rollout", { run: values.run, update: next.update, row: next.row }, false);
    return true;
  }
  if (event.key === "Escape") { back(); return true; }
  return false;
}
