// A run's summary: results before and after, how it learned, examples, what changed.

import { h, replace, asked, badge, number, pictures } from "./dom.js";
import { get, holds, measured } from "./api.js";
import { Chart } from "./chart.js";
import { fill, sections } from "./charts.js";
import { legend, tokens } from "./shading.js";
import { conversation, transcript } from "./conversation.js";

export const SHORTCUTS = [["← →", "move the cursor of a focused chart, or through focused tokens"]];

let charts = [];

export function leave() {
  charts.forEach(({ chart }) => chart.close());
  charts = [];
}

export async function show(main, theValues, page) {
  const values = { run: "0", ...theValues };
  const run = page.runs[+values.run];
  const [found, specs, tail] = await Promise.all([get("summary", { run: run.run }), get("charts"), measured(run.run)]);
  Object.assign(run, { tail });
  const [title, learning] = sections([run], specs).find(([, made]) => made.length) || ["", []];
  const kept = found.traces.filter(({ update, row }) => holds("rollout", { update, row }));
  const traces = await Promise.all(kept.map(async ({ update, row, why }) => ({ why, ...await get("rollout", { run: run.run, update, row }) })));
  leave();
  const accuracy = new Chart({ title: "Accuracy over tokens", unit: "share of completions that are right within so many tokens", percent: true });
  charts = [...learning, { chart: accuracy }];
  replace(main,
    page.runs.length > 1 ? h("div", { class: "bar" }, page.runPicker(run.run, (value) => page.go("summary", { run: value }))) : null,
    h("div", { class: "title" }, h("h1", {}, run.name), h("p", { class: "muted" }, found.subtitle)),
    tail.damaged.map((reason) => h("p", { class: "error" }, reason)),
    found.notes.map(([heading, text]) => h("p", { class: "notice" }, h("b", {}, heading), ` ${text}`)),
    results(found), facts(found.facts), tables(found.tables),
    section(found.accuracy.length, "Effort", h("div", { class: "charts" }, accuracy.element)),
    section(learning.length, title, h("div", { class: "charts" }, learning.map(({ chart }) => chart.element)),
      h("p", { class: "note" }, page.link("curves", {}, "All curves"), ", over updates or time.")),
    section(found.samples.length, "Completions before and after",
      h("p", { class: "note" }, "The first evaluation problems in each language, not selected by result; of the completions of each, one with their most frequent verdict."), found.samples.map(sample)),
    section(traces.length, "Completions of training",
      h("p", { class: "note" }, "Shaded by the version of the weights that sampled each token. A typical one has the most frequent verdict of its update (at one third, two thirds and the end of the run); the best has the highest reward of the last. Of several, the one that the most versions wrote is shown."),
      traces.map((data) => trace(data, run, page))),
    section(found.changes.length, "Changed during the run", panel(["from update", "key", "before", "after"],
      found.changes.map((c) => [c.update, c.key, text(c.before), text(c.after)]))),
    section(found.restarts.length, "Restarts of the trainer",
      h("p", { class: "note" }, "The trainer was lost and started again from a checkpoint; the updates in between were made again, and count once."),
      panel(["lost after update", "restarted from update", "reason"], found.restarts.map((r) => [r.reached, r.restarted_from, r.lost]))),
    section(found.events.length, "Warnings and events",
      found.events_left_out ? h("p", { class: "note" }, `${found.events_left_out} older ones are in events.log.`) : null,
      h("ul", { class: "panel events" }, found.events.map((e) => h("li", {}, h("time", {}, new Date(1000 * e.time).toLocaleString()), h("span", {}, e.text))))),
    found.config ? h("details", { class: "panel" }, h("summary", { class: "muted" }, "Configuration"), h("pre", {}, found.config)) : null);
  fill(learning, [run]);
  accuracy.set(found.accuracy.map(({ name, points }, i) => ({ name, points, color: `var(--run${i % 6})` })), { xLabel: "tokens", xFormat: String });
}

const section = (shown, title, ...children) => (shown ? h("section", {}, h("h2", {}, title), children) : null);
const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const percent = (x) => `${(100 * x).toFixed(2)}%`;
const end = (when) => (when === "before" ? "var(--muted)" : "var(--run0)");

function results({ passed, tiles }) {
  if (!passed.length && !tiles.length) return null;
  return h("div", { class: "results" },
    passed.length ? h("div", { class: "panel" }, h("h3", {}, "pass@1 ", h("span", { class: "muted" }, "with 95 % interval")), passed.map(([when, e]) =>
      h("div", { class: "range", vars: { "--c": end(when) } }, h("span", { class: "muted" }, when),
        h("span", { class: "track", vars: { "--low-end": percent(e.low), "--high-end": percent(e.high), "--value": percent(e.value) } }, h("i", {}), h("b", {})),
        h("span", {}, h("b", {}, e.value.toFixed(3)), h("span", { class: "muted" }, ` [${e.low.toFixed(3)}, ${e.high.toFixed(3)}]`))))) : null,
    tiles.map((tile) => h("div", { class: "panel" }, h("h3", {}, tile.title), h("div", { class: "big" }, tile.after), h("div", { class: "muted" }, `from ${tile.before}`))));
}

const facts = (found) => (found.length
  ? h("dl", { class: "panel line-facts" }, found.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null);

function tables(found) {
  const cell = (e) => h("td", { class: "n" }, e.value.toFixed(2), e.low !== undefined ? h("small", {}, ` [${e.low.toFixed(2)}, ${e.high.toFixed(2)}]`) : null);
  return section(found.length, "Evaluation",
    h("p", { class: "note" }, "pass@1 unless named otherwise; brackets are 95 % intervals, clustered by problem."),
    h("div", { class: "tables" }, found.map((table) => h("div", { class: table.ends.length > 2 ? "panel wide" : "panel" }, h("h3", {}, table.title),
      h("table", { class: "figures" }, h("thead", {}, h("tr", {}, h("th", {}), table.ends.map((when) => h("th", { class: "n", scope: "col" }, when)))),
        h("tbody", {}, table.rows.map(([key, cells]) => h("tr", {}, h("th", { scope: "row" }, key), cells.map(cell)))))))));
}

const panel = (heads, rows) => h("div", { class: "panel" }, h("table", { class: "figures" },
  h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", {}, value)))))));

function sample(found) {
  return h("article", { class: "panel" },
    h("p", { class: "statement asked-for", lang: found.language }, found.ends.some(([, row]) => row.prompt) ? h("span", { class: "muted" }, "the row’s problem: ") : null, found.problem),
    pictures(found.pictures),
    found.reference === null ? null : h("p", { class: "muted" }, "reference: ", h("code", {}, found.reference)),
    h("div", { class: "pair" }, found.ends.map(([when, row]) => h("div", {},
      h("p", { class: "meta" }, h("b", {}, when), badge(row.verdict), row.of > 1 ? h("span", {}, `${row.right} of ${row.of} are right`) : null, row.reward === null ? null : h("span", {}, `reward ${row.reward.toFixed(2)}`), row.reason ? h("span", {}, row.reason) : null),
      row.turns ? transcript(row) : h("pre", { class: "completion" }, h("span", { class: "muted" }, row.thoughts), row.thoughts ? "\n\n" : "", row.answer)))));
}

function trace(data, run, page) {
  const readout = h("p", { class: "token-facts", "aria-live": "polite" });
  return h("article", { class: "panel" },
    h("p", { class: "meta" }, page.link("rollout", { run: run.run, update: data.update, row: data.row }, `update ${data.update}`),
      h("b", {}, data.why), badge(data.verdict), h("span", {}, `reward ${number(data.reward)}`)),
    h("p", { class: "statement asked-for", lang: data.language }, asked(data)),
    legend("version", data), data.ending ? conversation(data, "version", readout) : tokens(data, "version", readout), readout);
}
