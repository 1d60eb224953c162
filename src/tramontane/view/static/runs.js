// The runs side by side: their table, and one metric of all of them, by group.

import { h, replace, select, number, clock, plural } from "./dom.js";
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { csv, markdown, save } from "./export.js";
import { compared, grouped, kept, mean, ordered, texts } from "./table.js";

export const SHORTCUTS = [["/", "filter"], ["x", "over updates, or over time"], ["l", "linear or logarithmic axis"], ["c", "compare the two chosen runs"]];
const POLL = 3000; // milliseconds between two looks at runs that train
const MOST_CURVES = 40; // without a group; more would hide each other
const DEFAULTS = { metric: "reward" };

let page, values, table, curves, box, chart, finder, timer = null;

export function leave() {
  clearTimeout(timer);
  timer = null;
  if (chart) chart.close();
  chart = null;
}

export async function show(main, theValues, thePage) {
  page = thePage;
  values = { ...DEFAULTS, ...theValues };
  [table, curves] = await Promise.all([get("table"), get("curve", { metric: values.metric })]);
  const metrics = [...new Set([values.metric, ...table.metrics])];
  finder = h("input", { type: "search", name: "filter", value: values.filter || "", autocomplete: "off", placeholder: "seed=0 pass@1>0.4 finished  ( / )",
    oninput: (event) => set({ filter: event.target.value }) });
  box = { count: h("p", { class: "count" }), table: h("div", { class: "scroll" }), plot: h("div", {}), pair: h("div", { class: "controls" }) };
  const names = [["", "no group"], ...table.keys.map((key) => [key, key])];
  const option = (name, title) => h("label", { class: "check" }, h("input", { type: "checkbox", name, checked: Boolean(values[name]), onchange: (event) => set({ [name]: event.target.checked ? "1" : "" }) }), title);
  replace(main,
    h("div", { class: "bar" },
      h("div", { class: "controls" }, h("label", { class: "field wide" }, h("span", {}, "Filter"), finder),
        select("Group by", names, values.group, (group) => set({ group })),
        select("Metric", metrics.map((name) => [name, name.replaceAll("_", " ")]), values.metric, async (metric) => {
          curves = await get("curve", { metric });
          set({ metric });
        }), option("time", "wall time"), option("log", "log axis")),
      h("div", { class: "controls" }, box.pair,
        h("button", { type: "button", onclick: () => save("runs.csv", "text/csv", csv(shownRows(false))) }, "CSV"),
        h("button", { type: "button", onclick: () => save("runs.md", "text/markdown", markdown(shownRows(true))) }, "Markdown"))),
    box.plot, box.count, box.table);
  draw();
  poll();
}

function set(change) {
  Object.assign(values, change);
  page.go("runs", { ...values, metric: values.metric === DEFAULTS.metric ? "" : values.metric }, true);
  draw();
}

const chosen = () => (values.picked || "").split(",").filter(Boolean).map(Number);
const rows = () => ordered(kept(table.rows, values.filter || ""), values.sort || "", values.down === "1");
const title = (row) => page.runs[row.run].label;

function shownRows(rounded) {
  return values.group ? grouped(rows(), values.group).lines(table, rounded) : [texts.header(table, rounded), ...rows().map((row) => texts.row(row, table, rounded))];
}

function draw() {
  const found = rows();
  replace(box.count, `${plural(found.length, "run")}${found.length < table.rows.length ? ` of ${table.rows.length}` : ""}`,
    values.group ? `, ${plural(grouped(found, values.group).groups.length, "group")}; figures are means over runs, with 95 % intervals` : "");
  const pair = chosen().filter((run) => run < page.runs.length);
  replace(box.pair, pair.length === 2 ? page.link("compare", { a: pair[0], b: pair[1] }, `Compare ${pair.map((run) => page.runs[run].label).join(" and ")}`)
    : h("span", { class: "muted" }, values.group ? "" : "Choose two runs to compare them."));
  replace(box.table, values.group ? groupTable(found) : runTable(found));
  plot(found);
}

function head(names) {
  const by = (name) => set(values.sort === name ? { down: values.down === "1" ? "" : "1" } : { sort: name, down: "" });
  return h("thead", {}, h("tr", {}, names.map(([name, text, numeric]) => h("th", {
    scope: "col", class: numeric ? "n" : "", "aria-sort": values.sort === name ? (values.down ? "descending" : "ascending") : undefined,
  }, name === null ? text : h("button", { type: "button", onclick: () => by(name) }, text, values.sort === name ? (values.down ? " ↓" : " ↑") : "")))));
}

const result = (found) => h("td", { class: "n" }, found ? [number(found.value), found.low === undefined || found.low === null ? null : h("small", {}, ` [${number(found.low)}, ${number(found.high)}]`)] : "");

function runTable(found) {
  const short = compared(table.keys);
  const names = [[null, ""], ["name", "run"], ["state", "state"], ...table.keys.map((key) => [key, short(key)]), ...table.results.map((name) => [name, name, true]),
    ["update", "updates", true], ["seconds", "time", true], ["machine", "machine"]];
  const pick = (run, on) => set({ picked: [...chosen().filter((other) => other !== run), ...(on ? [run] : [])].slice(-2).join(",") });
  return h("table", { class: "rows runs-table" }, head(names), h("tbody", {}, found.map((row) => h("tr", { title: row.fault || row.path },
    h("td", {}, h("input", { type: "checkbox", "aria-label": `Choose ${title(row)}`, checked: chosen().includes(row.run), onchange: (event) => pick(row.run, event.target.checked) })),
    h("td", {}, page.link("summary", { run: row.run }, title(row))),
    h("td", {}, h("span", { class: `state ${row.state.replace(" ", "-")}` }, row.state)),
    table.keys.map((key) => h("td", { "data-label": short(key) }, texts.value(row.config[key]))),
    table.results.map((name) => result(row.results[name])),
    h("td", { class: "n" }, `${row.update}/${row.updates ?? "?"}`), h("td", { class: "n" }, row.seconds === null ? "" : clock(row.seconds)), h("td", {}, row.machine)))));
}

const named = (group) => texts.value(group.value) || "not set"; // a config of another version may lack the key

function groupTable(found) {
  const { groups } = grouped(found, values.group);
  const names = [[values.group, values.group], [null, "runs", true], ...table.results.map((name) => [name, name, true]), [null, "time", true]];
  return h("table", { class: "rows runs-table" }, head(names), h("tbody", {}, groups.map((group) => h("tr", {},
    h("td", {}, h("i", { class: "swatch", vars: { "--c": group.color } }), named(group)), h("td", { class: "n" }, group.rows.length),
    table.results.map((name) => result(mean(group.rows.map((row) => row.results[name] && row.results[name].value)))),
    h("td", { class: "n" }, clock(mean(group.rows.map((row) => row.seconds))?.value ?? 0))))));
}

// At each update, the mean over a group's runs that have it, with its 95 % interval. Over time, runs
// have no places in common, so each has a line of its own in the group's color.
function series(found) {
  const points = (row) => (curves[row.run] || []).map(([update, seconds, y]) => [values.time ? seconds / 60 : update, y]).filter(([x]) => Number.isFinite(x));
  if (!values.group) return found.slice(0, MOST_CURVES).map((row) => ({ name: title(row), color: page.runs[row.run].color, points: points(row) }));
  return grouped(found, values.group).groups.flatMap((group) => {
    const name = `${values.group.split(".").at(-1)} ${named(group)}`;
    if (values.time) return group.rows.map((row, i) => ({ name, color: group.color, points: points(row), again: i > 0 }));
    const at = new Map();
    for (const row of group.rows) for (const [x, y] of points(row)) at.set(x, [...(at.get(x) || []), y]);
    return [{ name, color: group.color, points: [...at].sort(([a], [b]) => a - b).map(([x, ys]) => {
      const m = mean(ys);
      return m.low === undefined ? [x, m.value] : [x, m.value, m.low, m.high];
    }) }];
  });
}

function plot(found) {
  const log = values.log === "1", made = series(found), few = !values.group && found.length > MOST_CURVES;
  const points = made.flatMap((s) => s.points), hidden = log ? points.filter(([, y]) => y <= 0).length : 0;
  if (chart) chart.close();
  chart = new Chart({ title: values.metric.replaceAll("_", " "), unit: values.group && !values.time ? "mean and 95 % band over runs" : "", log, from_zero: false,
    note: [few && `The first ${MOST_CURVES} of ${found.length} runs; group or filter them to see the others.`,
      hidden && `${hidden} of ${plural(points.length, "value")} are 0 or below: a log axis has no place for them.`].filter(Boolean).join(" ") });
  replace(box.plot, chart.element);
  chart.set(made, { smooth: 0, xLabel: values.time ? "after" : "update", xFormat: values.time ? (x) => clock(60 * x) : (x) => String(Math.round(x * 100) / 100) });
}

function poll() {
  timer = setTimeout(async () => {
    try {
      if (table.rows.some((row) => ["running", "not started"].includes(row.state))) {
        [table, curves] = await Promise.all([get("table"), get("curve", { metric: values.metric })]);
        if (timer === null) return;
        draw();
      }
      page.say("");
    } catch (error) {
      page.say(`No answer: ${error.message}. Is tramontane view still running?`);
    }
    if (timer !== null) poll();
  }, POLL);
}

export function key(event) {
  if (event.key === "/") { finder.focus(); finder.select(); return true; }
  const box = { x: "time", l: "log" }[event.key];
  if (box) { document.querySelector(`main input[name=${box}]`).click(); return true; }
  const [a, b] = chosen();
  if (event.key === "c" && b !== undefined) { page.go("compare", { a, b }); return true; }
  return false;
}
