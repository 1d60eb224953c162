// A search over a run's rollouts.

import { h, replace, asked, badge, number, signed, notice, select } from "./dom.js";
import { get } from "./api.js";

export const SHORTCUTS = [["/", "search the completions' texts"], ["j k", "next row, row before"],
  ["Enter", "open the row"], ["n p", "next page, page before"]];
const LIMIT = 50;
const FIELDS = ["text", "problem", "reason", "verdict", "language", "domain", "finish_reason", "ending", "tool", "trained", "version", "update", "reward", "tokens"];

let page, values, main, controller, list, status, pager, form;
export let found = { rows: [], run: 0, place: "" }; // the rows shown last and their address, for the view of one
let offset = 0;

const grouped = () => values.by === "group";

export function leave() { if (controller) controller.abort(); }

export async function show(theMain, theValues, thePage) {
  main = theMain; page = thePage;
  values = { run: "0", sort: "update", order: "desc", ...theValues };
  offset = +(values.offset || 0);
  const facets = await get("facets", { run: values.run });
  list = h("tbody", {});
  status = h("p", { class: "count", role: "status" });
  pager = h("div", { class: "pager" });
  form = filters(facets);
  const damaged = Object.values(facets.damaged);
  replace(main, form, notice(facets.missing.filter((name) => name === "advantage" || name === "log_ratios")),
    damaged.map((reason) => h("p", { class: "error" }, `Not shown: ${reason}`)),
    facets.total ? [status, h("div", { class: "scroll" }, h("table", { class: "rows" }, head(), list)), pager]
      : h("p", { class: "empty" }, "This run has recorded no rollouts yet, or was told to record none (rollouts: none)."));
  if (facets.total) await run();
}

function filters(facets) {
  const options = (name, all) => [["", all], ...Object.entries(facets[name]).filter(([key]) => key !== "None").map(([key, n]) => [key, `${key} (${n.toLocaleString("en")})`])];
  const range = (name, label, hint) => h("label", { class: "field" }, h("span", {}, label),
    h("input", { name, value: values[name] || "", placeholder: hint, inputmode: "text", autocomplete: "off", size: 9, oninput: later }));
  const text = (name, label, hint) => h("label", { class: "field" }, h("span", {}, label),
    h("input", { name, type: "search", value: values[name] || "", placeholder: hint, autocomplete: "off", spellcheck: "false", oninput: later }));
  const choice = (name, label, all, listed = options(name, all)) => listed.length > 1
    ? select(label, listed, values[name] || "", (value) => change({ [name]: value })) : null;
  const filtered = Object.entries(facets.filtered).filter(([key]) => key !== "None").map(([key, n]) => [key, `filtered: ${key} (${n.toLocaleString("en")})`]);
  const open = !matchMedia("(max-width: 700px)").matches || FIELDS.some((name) => values[name]);
  return h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); change({}); } },
    h("details", { class: "fold", open }, h("summary", {}, "Filters"), h("div", { class: "wide" },
      page.runs.length > 1 ? page.runPicker(+values.run, (value) => page.go("rollouts", { ...values, run: value, offset: "" })) : null,
      text("text", "Completion", "part of the text  ( / )"), text("problem", "Problem", "part of the statement or id"),
      text("reason", "Reason", "part of the verdict’s reason")),
    h("div", { class: "narrow" },
      select("Rows", [["", "completions"], ["group", "groups"]], values.by || "", (by) => page.go("rollouts", { ...values, by, offset: "" })),
      choice("verdict", "Verdict", "any"), choice("language", "Language", "any"), choice("domain", "Domain", "any"),
      choice("finish_reason", "Ended by", "any"), choice("ending", "Ending", "any"), choice("tool", "Tool called", "any"),
      choice("trained", "Used", "any", [["", "any"], ["trained", "trained on"], ...(filtered.length > 1 ? [["filtered", "filtered"]] : []), ...filtered]),
      range("reward", "Reward", "0.5..1"), range("tokens", "Length", "100..200"), range("update", "Update", "1..10"),
      range("version", "Version", "3"),
      h("button", { type: "button", class: "quiet", onclick: () => page.go("rollouts", { run: values.run }) }, "Clear"))));
}

let waiting = null;
function later() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const change = {};
    for (const name of FIELDS) if (form.elements[name]) change[name] = form.elements[name].value.trim();
    Object.assign(values, change);
    offset = 0;
    address();
    run();
  }, 200);
}

function change(changes) {
  Object.assign(values, changes);
  offset = 0;
  address();
  run();
}

function address() {
  const shown = { ...values, offset: offset || "" };
  if (shown.sort === "update") delete shown.sort;
  if (shown.order === "desc") delete shown.order;
  page.go("rollouts", shown, true);
}

function head() {
  const sorted = (name, label) => h("th", { scope: "col", class: "n", "aria-sort": values.sort === name ? (values.order === "desc" ? "descending" : "ascending") : undefined },
    h("button", { type: "button", onclick: (event) => {
      const order = values.sort === name && values.order === "desc" ? "asc" : "desc";
      change({ sort: name, order });
      event.target.closest("thead").replaceWith(head());
    } }, label, values.sort === name ? (values.order === "desc" ? " ↓" : " ↑") : ""));
  if (grouped()) {
    return h("thead", {}, h("tr", {}, sorted("update", "Update"), h("th", { scope: "col" }, "Problem, and the rewards of its completions"),
      h("th", { scope: "col" }, "Verdicts"), sorted("reward", "Mean reward"), sorted("tokens", "Mean tokens"), h("th", { scope: "col" }, "Language")));
  }
  return h("thead", {}, h("tr", {}, sorted("update", "Update"), h("th", { scope: "col" }, "Problem and completion"),
    h("th", { scope: "col" }, "Verdict"), sorted("reward", "Reward"), sorted("advantage", "Advantage"), sorted("tokens", "Tokens"),
    h("th", { scope: "col" }, "Language"), h("th", { scope: "col", class: "n" }, "Versions")));
}

// The server answers within half a second with what it has; the same request continues from there.
async function run() {
  if (controller) controller.abort();
  controller = new AbortController();
  const signal = controller.signal;
  const params = { run: values.run, by: values.by, sort: values.sort, descending: values.order === "desc", offset, limit: LIMIT };
  for (const name of FIELDS) params[name] = values[name];
  try {
    for (;;) {
      const answer = await get("rollouts", params, signal);
      found = { rows: grouped() ? answer.rows.flatMap((r) => r.members.map((m) => ({ ...m, update: r.update }))) : answer.rows, run: +values.run, place: location.hash };
      draw(answer);
      if (answer.done) return;
    }
  } catch (error) {
    if (error.name !== "AbortError") { status.textContent = error.message; replace(list); replace(pager); }
  }
}

function draw(answer) {
  const all = answer.total.toLocaleString("en"), count = answer.count.toLocaleString("en");
  status.textContent = answer.done ? (grouped() ? `${count} groups` : `${count} of ${all} completions`) : `${count} found in ${answer.scanned} of ${answer.files} updates …`;
  if (answer.unreadable.length) status.textContent += `; damaged files, not shown: ${answer.unreadable.join(", ")}`;
  const focused = [...list.children].indexOf(document.activeElement.closest && document.activeElement.closest("tr"));
  replace(list, answer.rows.map(grouped() ? groupRow : row));
  if (focused >= 0 && list.children[focused]) list.children[focused].querySelector("a").focus();
  const last = Math.min(offset + LIMIT, answer.count);
  replace(pager, answer.count > LIMIT || offset ? [
    h("button", { type: "button", disabled: !offset, onclick: () => move(-1) }, "← Before"),
    h("span", {}, `${(offset + 1).toLocaleString("en")} to ${last.toLocaleString("en")}`),
    h("button", { type: "button", disabled: last >= answer.count, onclick: () => move(1) }, "Next →")] : []);
}

function row(r) {
  const versions = r.oldest === null ? "–" : r.oldest === r.newest ? String(r.oldest) : `${r.oldest}–${r.newest}`;
  return h("tr", { onclick: (event) => { if (!event.target.closest("a") && !String(getSelection())) open(r); } },
    h("td", { class: "n" }, r.update), h("td", { class: "texts" },
      page.link("rollout", { run: values.run, update: r.update, row: r.row }, h("span", { class: "problem" }, asked(r))),
      h("span", { class: "snippet" }, marked(r.snippet, values.text))),
    h("td", {}, badge(r.verdict), r.filtered ? h("span", { class: "tag" }, r.filtered) : null, r.ending && r.ending !== "completed" ? h("span", { class: "tag" }, r.ending.replaceAll("_", " ")) : null, r.reason ? h("span", { class: "reason" }, r.reason) : null),
    h("td", { class: "n", "data-label": "reward" }, number(r.reward)), h("td", { class: "n", "data-label": "advantage" }, signed(r.advantage)),
    h("td", { class: "n", "data-label": "tokens" }, r.tokens), h("td", { "data-label": "language" }, r.language || "–"),
    h("td", { class: "n", "data-label": "versions" }, versions));
}

// A group: its problem once, and a link to each of its completions.
function groupRow(r) {
  return h("tr", { onclick: (event) => { if (!event.target.closest("a") && !String(getSelection())) open(r); } },
    h("td", { class: "n" }, r.update),
    h("td", { class: "texts" }, page.link("rollout", { run: values.run, update: r.update, row: r.row }, h("span", { class: "problem" }, asked(r))),
      h("span", { class: "members" }, r.members.map((m) => h("a", { href: `#rollout?${new URLSearchParams({ run: values.run, update: r.update, row: m.row })}`, class: `badge ${m.verdict || "other"}`,
        title: `completion ${m.index}: ${m.verdict}, reward ${number(m.reward)}` }, number(m.reward, 2))))),
    h("td", {}, `${r.right} of ${r.members.length} right`, r.filtered ? h("span", { class: "tag" }, r.filtered) : null),
    h("td", { class: "n", "data-label": "reward" }, number(r.reward)), h("td", { class: "n", "data-label": "tokens" }, number(r.tokens, 0)),
    h("td", { "data-label": "language" }, r.language || "–"));
}

function marked(text, pattern) {
  const place = pattern ? text.toLowerCase().indexOf(pattern.toLowerCase()) : -1;
  if (place < 0) return text;
  const end = place + pattern.length;
  return [text.slice(0, place), h("mark", {}, text.slice(place, end)), text.slice(end)];
}

const open = (r) => page.go("rollout", { run: values.run, update: r.update, row: r.row });

function move(step) {
  offset = Math.max(0, offset + step * LIMIT);
  address();
  run();
  main.scrollIntoView();
}

export function key(event) {
  if (event.key === "/") { form.elements.text.focus(); form.elements.text.select(); return true; }
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (step && list && !event.target.closest("select")) {
    const rows = [...list.children];
    const place = rows.indexOf(document.activeElement.closest("tr"));
    const next = rows[Math.min(rows.length - 1, Math.max(0, place < 0 ? 0 : place + step))];
    if (next) { next.querySelector("a").focus(); next.scrollIntoView({ block: "nearest" }); }
    return true;
  }
  if (event.key === "n" || event.key === "p") {
    const button = pager && pager.querySelectorAll("button")[event.key === "n" ? 1 : 0];
    if (button && !button.disabled) button.click();
    return true;
  }
  return false;
}
