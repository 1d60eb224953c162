// Curves of several runs over each other, live while they train.

import { h, replace, clock } from "./dom.js";
import { get, measured } from "./api.js";
import { Chart } from "./chart.js";

export const SHORTCUTS = [["x", "over updates, or over time"], ["+ −", "smooth more, smooth less"],
  ["← →", "move the cursor of a focused chart"]];
const POLL = 2000; // milliseconds between two looks at runs that train
const KEY_COLOURS = ["var(--run0)", "var(--run1)", "var(--run2)", "var(--run3)", "var(--run4)", "var(--run5)"];

let timer = null, charts = [], state = null, page = null, specs = null;
const hidden = new Set();

export function leave() {
  clearTimeout(timer);
  timer = null;
  charts.forEach(({ chart }) => chart.close());
  charts = [];
}

export async function show(main, values, thePage) {
  page = thePage;
  state = { x: values.x === "time" ? "time" : "update", smooth: +(values.smooth || 0) };
  specs = specs || await get("charts");
  const found = await Promise.all(page.runs.map((run) => measured(run.run)));
  page.runs.forEach((run, i) => Object.assign(run, { tail: found[i] }));
  state.body = h("div", { class: "sections" });
  state.chips = h("ul", { class: "chips", "aria-label": "Runs" });
  state.damaged = h("div", {});
  state.note = h("b", {});
  state.slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, oninput: (e) => set({ smooth: +e.target.value }) });
  state.axis = h("select", { onchange: (e) => set({ x: e.target.value }) },
    h("option", { value: "update", selected: state.x === "update" }, "updates"),
    h("option", { value: "time", selected: state.x === "time" }, "wall time"));
  replace(main, h("div", { class: "bar" }, state.chips,
    h("div", { class: "controls" },
      h("label", { class: "field" }, h("span", {}, "Over"), state.axis),
      h("label", { class: "field" }, h("span", {}, "Smoothing ", state.note), state.slider))), state.damaged, state.body);
  build();
  poll();
}

function set(change) {
  Object.assign(state, change);
  page.go("curves", { x: state.x === "time" ? "time" : "", smooth: state.smooth || "" }, true);
  refresh();
}

export function key(event) {
  if (event.key === "x") { set({ x: state.x === "time" ? "update" : "time" }); state.axis.value = state.x; return true; }
  if (event.key === "+" || event.key === "-") {
    const smooth = Math.min(0.98, Math.max(0, state.smooth + (event.key === "+" ? 0.2 : -0.2)));
    state.slider.value = smooth;
    set({ smooth: +smooth.toFixed(2) });
    return true;
  }
  return false;
}

const shown = () => page.runs.filter((run) => !hidden.has(run.run));
const rowsOf = (run) => [...run.tail.rows.values()].sort((a, b) => a.update - b.update);

function chips() {
  replace(state.damaged, page.runs.flatMap((run) => run.tail.damaged).map((reason) => h("p", { class: "error" }, reason)));
  replace(state.chips, page.runs.map((run) => {
    const rows = run.tail.rows.size;
    const last = rows ? Math.max(...run.tail.rows.keys()) : 0;
    const status = run.tail.finished ? "finished" : `update ${last}${run.updates ? ` of ${run.updates}` : ""}`;
    return h("li", {}, h("label", { class: "chip", vars: { "--c": page.colour(run.run) }, title: run.path },
      h("input", { type: "checkbox", checked: !hidden.has(run.run), onchange: (e) => {
        if (e.target.checked) hidden.delete(run.run); else hidden.add(run.run);
        build();
      } }), h("i", {}), h("b", {}, run.label), h("span", {}, status)));
  }));
}

// Which charts there are depends on the runs that are shown and on their metrics.
function build() {
  charts.forEach(({ chart }) => chart.close());
  charts = [];
  chips();
  const runs = shown();
  const keys = new Set(runs.flatMap((run) => [...run.tail.rows.values()].flatMap((row) => Object.keys(row).filter((k) => typeof row[k] === "number"))));
  state.keys = keys.size;
  const used = new Set(["update", "wall_seconds"]);
  const sections = specs.map(({ title, charts: listed }) => [title, listed.map((spec) => {
    const present = Object.entries(spec.keys).filter(([name]) => keys.has(name));
    present.forEach(([name]) => used.add(name));
    return [spec, present];
  })]);
  const others = [...keys].filter((name) => !used.has(name)).sort();
  sections.push(["Other metrics", others.map((name) => [{ title: name.replaceAll("_", " "), unit: "", from_zero: false }, [[name, name]]])]);
  replace(state.body, sections.map(([title, listed]) => {
    const made = listed.flatMap(([spec, present]) => make(spec, present, runs));
    if (title === "Learning") made.unshift(...evaluationCharts(runs));
    charts.push(...made);
    if (!made.length) return null;
    return h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, made.map(({ chart }) => chart.element)));
  }));
  if (!charts.length) add_empty();
  refresh();
}

function add_empty() {
  replace(state.body, h("p", { class: "empty" }, page.runs.length === hidden.size ? "No run is chosen." : "No update is recorded yet; this page shows the first as soon as it is done."));
}

function make(spec, present, runs) {
  if (!present.length) return [];
  const options = { title: spec.title, unit: spec.unit, percent: spec.percent, log: spec.log, fromZero: spec.from_zero };
  const single = runs.length === 1;
  if (single) return [{ chart: new Chart(options), keys: present }];
  return present.map(([name, label]) => ({
    chart: new Chart({ ...options, title: present.length > 1 ? `${spec.title}: ${label}` : spec.title }),
    keys: [[name, label]],
  }));
}

function evaluationCharts(runs) {
  const sets = new Set(runs.flatMap((run) => run.tail.evaluations.filter((e) => e.pass_at_1).map((e) => e.set || "held_out")));
  return [...sets].map((set) => ({
    chart: new Chart({ title: set === "held_out" ? "pass@1, held-out" : `pass@1, ${set}`, unit: "with 95 % intervals", percent: true, legend: true }), set,
  }));
}

function refresh() {
  const time = state.x === "time";
  state.note.textContent = state.smooth ? state.smooth.toFixed(2) : "off";
  const view = { smooth: state.smooth, xLabel: time ? "after" : "update", xFormat: time ? (x) => clock(60 * x) : (x) => String(Math.round(x * 100) / 100) };
  const runs = shown();
  const single = runs.length === 1;
  const rows = new Map(runs.map((run) => [run.run, rowsOf(run)]));
  const x = (row) => (time ? row.wall_seconds / 60 : row.update);
  for (const { chart, keys, set } of charts) {
    if (set) { chart.set(runs.map((run) => marks(run, set, time, rows.get(run.run))), { ...view, smooth: 0 }); continue; }
    chart.set(runs.flatMap((run) => keys.map(([name, label], i) => ({
      name: single ? label : run.label,
      colour: single && keys.length > 1 ? KEY_COLOURS[i % KEY_COLOURS.length] : page.colour(run.run),
      points: rows.get(run.run).filter((row) => typeof row[name] === "number").map((row) => [x(row), row[name]]),
    }))), view);
  }
}

function marks(run, set, time, rows) {
  const seconds = new Map(rows.map((row) => [row.update, row.wall_seconds / 60]));
  const last = rows.length ? rows[rows.length - 1].update : 0;
  const found = run.tail.evaluations.filter((e) => (e.set || "held_out") === set && e.pass_at_1).map((e) => {
    const update = e.version ?? (e.when === "after" ? last : 0);
    return [time ? seconds.get(update) ?? 0 : update, e.pass_at_1.value, e.pass_at_1.low, e.pass_at_1.high];
  });
  return { name: run.label, colour: page.colour(run.run), points: found.map(([x, y]) => [x, y]), marks: found };
}

async function poll() {
  timer = setTimeout(async () => {
    try {
      const live = page.runs.filter((run) => !run.tail.finished);
      const tails = await Promise.all(live.map((run) => measured(run.run)));
      if (timer === null) return;
      if (tails.some((tail) => tail.changed)) {
        const keys = new Set(shown().flatMap((run) => [...run.tail.rows.values()].flatMap((row) => Object.keys(row).filter((k) => typeof row[k] === "number"))));
        if (!charts.length || keys.size !== state.keys) build(); else { chips(); refresh(); }
      }
      page.say("");
    } catch (error) {
      page.say(`No answer: ${error.message}. Is tramontane view still running?`);
    }
    if (timer !== null) poll();
  }, POLL);
}
